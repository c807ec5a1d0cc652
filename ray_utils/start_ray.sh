#!/usr/bin/env bash
# Starts Ray on this node: run it once on every node of the cluster, in any order, as often as you like.
#
#   RANK, WORLD_SIZE    this node's number and how many nodes there are (default 0 and 1); rank 0 is the head
#   MASTER_ADDR         the head's address, known to every node; or else
#   RAY_HEAD_FILE       a file on a shared disk through which the head tells it
#   RAY_PORT            the head's port (default 6379)
#   RAY_WAIT_TIMEOUT    seconds to wait for the head (default 300)
#   RLINF_VL_PYTHON     the Python that has Ray (default: the activated environment, or .venv)
# Arguments go to `ray start`, such as --num-cpus=8.
set -euo pipefail
# shellcheck source=ray_utils/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

RANK="${RANK:-0}" WORLD_SIZE="${WORLD_SIZE:-1}"
if ! [[ "$RANK" =~ ^[0-9]+$ && "$WORLD_SIZE" =~ ^[0-9]+$ && "$RANK" -lt "$WORLD_SIZE" ]]; then
    code=2 die "RANK must lie in 0…WORLD_SIZE-1; RANK=$RANK, WORLD_SIZE=$WORLD_SIZE"
fi
((WORLD_SIZE == 1)) || [[ -n "${MASTER_ADDR:-}${RAY_HEAD_FILE:-}" ]] ||
    code=2 die "WORLD_SIZE=$WORLD_SIZE needs MASTER_ADDR, or RAY_HEAD_FILE on a disk that every node sees"
python="$(ray_python)"
"$python" -c 'import ray' 2>/dev/null || die "$python has no Ray; bash requirements/install.sh makes an environment"
ray() { "$python" -m ray.scripts.scripts "$@"; }

# The GCS address of the Ray node that runs on this machine, nothing if none does.
local_node() { ps -ww -u "$(id -u)" -o args= | sed -n 's/^[^ ]*raylet\/raylet .*--gcs-address=\([^ ]*\).*/\1/p' | head -n 1; }
running="$(local_node)"

if ((RANK == 0)); then
    # The address of this machine that the others use: MASTER_ADDR if it is one of ours, else that of the default route.
    address="$("$python" - "${MASTER_ADDR:-}" <<'EOF'
import socket, sys

def ours(host):
    try:
        with socket.socket() as s:
            s.bind((socket.gethostbyname(host), 0))
            return s.getsockname()[0]
    except OSError:
        return None

def default_route():
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.connect(("192.0.2.1", 9))  # sends nothing
            return s.getsockname()[0]
    except OSError:
        return "127.0.0.1"

print((sys.argv[1] and ours(sys.argv[1])) or default_route())
EOF
    )"
    head="$address:$RAY_PORT"
    if [[ "$running" == "$head" ]] && ray health-check --address "$head" >/dev/null 2>&1; then
        say "the head already runs at $head"
    elif [[ -n "$running" ]]; then
        die "a node of the cluster at $running runs on this machine; stop it first: bash ray_utils/stop_ray.sh"
    else
        if [[ -n "${RAY_HEAD_FILE:-}" ]]; then rm -f -- "$RAY_HEAD_FILE"; fi # of an earlier cluster
        say "starting the head at $head"
        ray start --head --node-ip-address="$address" --port="$RAY_PORT" --dashboard-host=127.0.0.1 \
            --disable-usage-stats "$@" >/dev/null
    fi
    if [[ -n "${RAY_HEAD_FILE:-}" ]]; then # whole or not at all: written aside, then renamed
        mkdir -p -- "$(dirname -- "$RAY_HEAD_FILE")"
        printf '%s\n' "$head" >"$RAY_HEAD_FILE.$$"
        mv -- "$RAY_HEAD_FILE.$$" "$RAY_HEAD_FILE"
    fi
    say "head is up; $((WORLD_SIZE - 1)) other node(s) may join. Join with cluster.ray_address=auto on this node"
    exit 0
fi

said=""
until head="$(head_address)" && [[ -n "$head" ]] && listening "$head" &&
    timeout 30 "$python" -m ray.scripts.scripts health-check --address "$head" >/dev/null 2>&1; do
    if [[ -z "$head" ]]; then
        why="$RAY_HEAD_FILE is not there yet"
    elif [[ -z "${MASTER_ADDR:-}" ]]; then
        why="$RAY_HEAD_FILE names $head, where no Ray head answers (left by an earlier cluster?)"
    else
        why="no Ray head answers at $head yet"
    fi
    ((SECONDS < RAY_WAIT_TIMEOUT)) || die "gave up after $RAY_WAIT_TIMEOUT s: $why. Is rank 0 started?"
    if [[ "$why" != "$said" ]]; then say "waiting up to $RAY_WAIT_TIMEOUT s for the head: $why"; said="$why"; fi
    sleep 2
done
resolved="$("$python" -c 'import socket, sys; print(socket.gethostbyname(sys.argv[1]))' "${head%:*}"):${head##*:}"
if [[ "$running" == "$resolved" || "$running" == "$head" ]]; then
    say "rank $RANK has already joined $head"
elif [[ -n "$running" ]]; then
    die "a node of another cluster ($running) runs on this machine; stop it first: bash ray_utils/stop_ray.sh"
else
    ray start --address="$resolved" --disable-usage-stats "$@" >/dev/null
    say "rank $RANK joined $head"
fi
