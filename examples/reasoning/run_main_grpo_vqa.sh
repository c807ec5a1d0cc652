#!/usr/bin/env bash
# Runs one experiment: makes the environment if it is missing, then trains. Hydra overrides go through untouched.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd -- "$here/../.." && pwd)"
configs="$here/config/vqa"

usage() {
    {
        echo "usage: bash examples/reasoning/run_main_grpo_vqa.sh CONFIG_NAME [hydra overrides…]"
        echo
        echo "  such as: … toy-grpo-cpu runner.max_steps=20 runner.experiment_name=short"
        echo
        echo "configs (in $configs):"
        for path in "$configs"/[!_]*.yaml; do echo "  $(basename -- "$path" .yaml)"; done
    } >&2
    exit 2
}
if (($# == 0)); then usage; fi
name="${1%.yaml}"
shift
if [[ "$name" == */* || ! -f "$configs/$name.yaml" ]]; then
    printf "no config named '%s'\n\n" "$name" >&2
    usage
fi

# The engine decides on the environment: an override names it, or the config does.
backend="$(sed -nE 's/^ *rollout_backend: *([a-z]+).*/\1/p' "$configs/$name.yaml")"
for override in "$@"; do
    if [[ "$override" == rollout.rollout_backend=* ]]; then backend="${override#*=}"; fi
done

# RLINF_VL_PYTHON names a Python that has the requirements (a cluster's image); otherwise an environment is made.
python="${RLINF_VL_PYTHON:-}"
if [[ -n "$python" ]]; then
    export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
elif [[ "$backend" == sglang ]]; then
    bash "$root/requirements/install.sh" --sglang
    python="$root/.venv-sglang/bin/python"
else
    bash "$root/requirements/install.sh"
    python="$root/.venv/bin/python"
fi

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false RAY_USAGE_STATS_ENABLED=0
exec "$python" -m rlinf_vl train "$name" "$@"
