# shellcheck shell=bash
# Sourced by the scripts beside it: the Python that has Ray, which then runs node.py.

# RLINF_VL_PYTHON, else the activated environment, else the repository's, else python3.
ray_python() {
    local candidate
    for candidate in "${RLINF_VL_PYTHON:-}" "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" "$root/.venv/bin/python" \
        "$root/.venv-sglang/bin/python" "$(command -v python3 || true)"; do
        if [[ -n "$candidate" && -x "$candidate" ]]; then printf '%s' "$candidate"; return; fi
    done
    echo "[ray] error: no Python found; make the environment with: bash requirements/install.sh" >&2
    return 1
}

# run_node VERB [ARGUMENT…]
run_node() {
    local root python
    root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
    python="$(ray_python)"
    if ! "$python" -c 'import ray, psutil' 2>/dev/null; then
        echo "[ray] error: $python has no Ray; bash requirements/install.sh makes an environment" >&2
        return 1
    fi
    export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" RAY_USAGE_STATS_ENABLED=0
    export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0 # Ray's workers inherit it, as those of a private cluster do
    exec "$python" "$root/ray_utils/node.py" "$@"
}
