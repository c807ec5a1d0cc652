# shellcheck shell=bash
# Sourced by the scripts beside it: which Python runs Ray, and where the head is.

RAY_PORT="${RAY_PORT:-6379}"
RAY_WAIT_TIMEOUT="${RAY_WAIT_TIMEOUT:-300}"
export RAY_USAGE_STATS_ENABLED=0

say() { printf '[ray] %s\n' "$*"; }
die() { printf '[ray] error: %s\n' "$*" >&2; exit "${code:-1}"; }

[[ "$RAY_PORT" =~ ^[0-9]+$ ]] || code=2 die "RAY_PORT must be a number, not '$RAY_PORT'"
[[ "$RAY_WAIT_TIMEOUT" =~ ^[0-9]+$ ]] || code=2 die "RAY_WAIT_TIMEOUT must be whole seconds, not '$RAY_WAIT_TIMEOUT'"

# RLINF_VL_PYTHON, else the activated environment, else the repository's, else python3.
ray_python() {
    local root candidate
    root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
    for candidate in "${RLINF_VL_PYTHON:-}" "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" "$root/.venv/bin/python" \
        "$root/.venv-sglang/bin/python" "$(command -v python3 || true)"; do
        if [[ -n "$candidate" && -x "$candidate" ]]; then printf '%s' "$candidate"; return; fi
    done
    die "no Python found; make the environment with: bash requirements/install.sh"
}

# host:port of the head, from MASTER_ADDR, else RAY_HEAD_FILE; nothing if the file is not there yet.
head_address() {
    if [[ -n "${MASTER_ADDR:-}" ]]; then
        printf '%s:%s' "$MASTER_ADDR" "$RAY_PORT"
    elif [[ -n "${RAY_HEAD_FILE:-}" && -s "$RAY_HEAD_FILE" ]]; then
        head -n 1 -- "$RAY_HEAD_FILE"
    fi
}

# Whether something listens at host:port, within three seconds.
# shellcheck disable=SC2016  # expanded by the inner shell
listening() { timeout 3 bash -c ': <"/dev/tcp/${0%:*}/${0##*:}"' "$1" 2>/dev/null; }
