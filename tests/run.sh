#!/usr/bin/env bash
# Makes the environment with the test tools and runs the tests. Arguments go to pytest:
#   bash tests/run.sh tests/unit -k algo
# Without any, the quick tests run, about 12 minutes on two cores. With --all first, the slow ones run, too, but for those of which
# another test keeps most of the promise; with --spare first, these. All use one process more than there are cores (four at most),
# since whole runs also wait: whole runs first, the longest, unit tests last.
# With --sglang first: the environment that has SGLang (11 GB), and the tests that need it or its torch; without, those that need
# it are skipped.
set -euo pipefail

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv" with=() tests=()
cores="$(getconf _NPROCESSORS_ONLN)"
parallel=(-n "$((cores < 4 ? cores + 1 : 4))" --dist loadfile --no-loadscope-reorder)
if [[ "${1:-}" == --sglang ]]; then
    shift
    # Two at a time: an engine takes a few GB, and polls on a core of its own.
    venv="$root/.venv-sglang" with=(--sglang) tests=(-n 2 "${parallel[@]:2}")
    tests+=(-o faulthandler_timeout=240)  # seconds, after which a test says where its threads stand
    tests+=(tests/e2e/test_sglang_agents_run.py tests/integration/sglang tests/e2e/test_sglang_run.py)
    tests+=(tests/unit/models/test_attention.py tests/unit/models/test_layers.py)  # SGLang's torch is a newer one
elif [[ "${1:-}" == --all ]]; then
    shift
    tests=("${parallel[@]}" -m "not spare and not chaos")
elif [[ "${1:-}" == --spare ]]; then
    shift
    tests=("${parallel[@]}" -m spare)
elif (($# == 0)); then
    tests=("${parallel[@]}" -m "not slow and not chaos")
fi
bash "$root/requirements/install.sh" ${with[@]+"${with[@]}"} --dev

# One thread a process: the tests start several, and busy threads that outnumber the cores cost more than they give.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false RAY_USAGE_STATS_ENABLED=0
cd -- "$root"
exec "$venv/bin/python" -m pytest ${tests[@]+"${tests[@]}"} "$@"
