#!/usr/bin/env bash
# Runs one experiment: makes the environment if it is missing, then trains. Hydra overrides go through untouched.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd -- "$here/../.." && pwd)"

mapfile -t configs < <(find "$root/examples" -name '[!_]*.yaml' -exec grep -l '^defaults:' {} + | sort)

usage() {
    {
        echo "usage: bash examples/reasoning/run_main_grpo_vqa.sh CONFIG [hydra overrides…]"
        echo
        echo "  such as: … toy-grpo-cpu runner.max_steps=20 runner.experiment_name=short"
        echo "  or several runs: … toy-grpo-cpu --multirun actor.optim.lr=1e-4,5e-4 runner.seed=1,2"
        echo
        echo "CONFIG is the path of your own YAML file, or the name of one in this folder or $root/examples:"
        for path in "${configs[@]}"; do echo "  $(basename -- "$path" .yaml)"; done
    } >&2
    exit 2
}
if (($# == 0)); then usage; fi
name="$1"
shift
file_of() { # path of a config by its name, in a folder or in the examples
    local path
    if [[ -f "$2/$1.yaml" ]]; then
        echo "$2/$1.yaml"
        return
    fi
    for path in "${configs[@]}"; do
        if [[ "$(basename -- "$path" .yaml)" == "$1" ]]; then echo "$path"; fi
    done
}
if [[ "$name" == */* || -f "$name" ]]; then
    config="${name%.yaml}.yaml"
else
    config="$(file_of "${name%.yaml}" "$PWD")"
fi
if [[ ! -f "$config" ]]; then
    printf "no config '%s'\n\n" "$name" >&2
    usage
fi

# The engine decides on the environment: an override names it, or the config does, or the one that it builds on.
backend=""
while [[ -z "$backend" && -n "$config" ]]; do
    backend="$(sed -nE 's/^ *rollout_backend: *([a-z]+).*/\1/p' "$config")"
    base="$(sed -nE 's/^defaults: *\[ *([^], ]+).*/\1/p; t; 0,/^ *- /s/^ *- *([^ ]+).*/\1/p' "$config" | head -n 1)"
    if [[ "$base" == "$(basename -- "$config" .yaml)" ]]; then break; fi # a circle, which the check names
    config="$(file_of "$base" "$(dirname -- "$config")")"
done
for override in "$@"; do
    if [[ "$override" == rollout.rollout_backend=* ]]; then backend="${override#*=}"; fi
done

# A mistake in the config must not wait for the 11 GB of SGLang's environment: the light environment tells it, or one with
# the few packages that this takes. Where not even that can be made, the installation is left to say why.
check_config() {
    local python="$root/.venv/bin/python" candidate scratch code=0
    if ! "$python" -c "import hydra, huggingface_hub, jinja2, numpy, psutil, pyarrow, rich, upath" 2>/dev/null; then
        scratch="$(mktemp -d)"
        trap 'rm -rf -- "$scratch"' RETURN
        python="$scratch/bin/python"
        for candidate in "${PYTHON:-python3.12}" python3.11 python3; do
            if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then break; fi
        done
        echo "[check] looking at the config before SGLang is installed …"
        "$candidate" -m venv -- "$scratch" &&
            "$python" -m pip install -qq --disable-pip-version-check -r "$root/requirements/check.txt" ||
            return 0
    fi
    PYTHONPATH="$root" "$python" -m rlinf_vl train --check "$name" "$@" || code=$?
    return "$((code == 2 ? 2 : 0))"
}

# RLINF_VL_PYTHON names a Python that has the requirements (a cluster's image); otherwise an environment is made.
python="${RLINF_VL_PYTHON:-}"
if [[ -n "$python" ]]; then
    export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
elif [[ "$backend" == sglang ]]; then
    if [[ ! -f "$root/.venv-sglang/.rlinf_vl" ]]; then check_config "$@"; fi # else the run itself tells it at once
    bash "$root/requirements/install.sh" --sglang
    python="$root/.venv-sglang/bin/python"
else
    bash "$root/requirements/install.sh"
    python="$root/.venv/bin/python"
fi

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false RAY_USAGE_STATS_ENABLED=0
exec "$python" -m rlinf_vl train "$name" "$@"
