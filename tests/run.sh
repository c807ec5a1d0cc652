#!/usr/bin/env bash
# Makes the environment with the test tools and runs the tests. Arguments go to pytest:
#   bash tests/run.sh tests/unit -k algo
# Without any, the quick tests run: about 5 minutes on two cores. The first argument may name other ones:
#   --all      the slow tests, too, about 45 minutes
#   --slow     the slow tests alone
#   --nightly  grids, peers, notebooks and hosts struck at random, for an hour or two, which neither of them has
#   --sglang   the environment that has SGLang (11 GB), and the tests that need it or its torch, about 15 minutes;
#              without, those that need it are skipped
# All use one process more than there are cores (four at most), since whole runs also wait.
set -euo pipefail

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv" with=() tests=()
cores="$(getconf _NPROCESSORS_ONLN)"
parallel=(-n "$((cores < 4 ? cores + 1 : 4))" --dist loadfile --no-loadscope-reorder)
order=(tests/unit tests/integration tests/e2e) # the many that take moments before the few that take minutes
if (($# > 1)); then order=(); fi # paths of the user's own may follow
suite="${1:-}"
case "$suite" in
    --sglang)
        about="tests with SGLang, about 15 minutes"
        # Two at a time: an engine takes a few GB, and polls on a core of its own.
        venv="$root/.venv-sglang" with=(--sglang) tests=(-n 2 "${parallel[@]:2}")
        tests+=(-o faulthandler_timeout=240)  # seconds, after which a test says where its threads stand
        tests+=(tests/e2e/test_sglang_agents_run.py tests/integration/sglang tests/e2e/test_sglang_run.py)
        tests+=(tests/unit/models/test_attention.py tests/unit/models/test_layers.py)  # SGLang's torch is a newer one
        ;;
    --all) about="quick and slow tests, about 45 minutes" tests=("${parallel[@]}" -m "not nightly" ${order[@]+"${order[@]}"}) ;;
    --slow) about="slow tests, about 40 minutes" tests=("${parallel[@]}" -m "slow and not nightly" ${order[@]+"${order[@]}"}) ;;
    --nightly) about="tests for a night, one or two hours" tests=("${parallel[@]}" -m nightly) ;;
    "") about="quick tests, about 5 minutes" tests=("${parallel[@]}" -m "not slow") ;;
    *) about="" ;;
esac
if [[ -n "$about" ]]; then
    echo "[tests] $about on two cores; pytest says how many"
    shift "$(($# > 0))"
fi
bash "$root/requirements/install.sh" ${with[@]+"${with[@]}"} --dev

# One thread a process: the tests start several, and busy threads that outnumber the cores cost more than they give.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false RAY_USAGE_STATS_ENABLED=0
unset PYTHONDONTWRITEBYTECODE  # every process would compile our files and pytest's assertions anew
cd -- "$root"
exec "$venv/bin/python" -m pytest ${tests[@]+"${tests[@]}"} "$@"
