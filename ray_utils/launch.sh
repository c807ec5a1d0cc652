#!/usr/bin/env bash
# One node's part in a run, from start to end: call it on every node of the cluster, with the settings of start_ray.sh.
#
#   bash ray_utils/launch.sh [N [--cpu] -- COMMAND…]
#
# Every node joins the cluster. Rank 0 waits for N GPUs (or CPUs) and runs COMMAND, whose exit code it returns; the others serve until
# the head has gone. Without arguments rank 0 serves too, until it is asked to stop. In the end this node's Ray is stopped, whatever
# happened. SIGTERM and SIGINT go to COMMAND as SIGTERM, so that it can write a checkpoint; nodes that serve wait for it.
set -euo pipefail
# shellcheck source=ray_utils/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
unset RAY_ADDRESS # of a launcher's own Ray
trap 'bash "$here/stop_ray.sh"' EXIT
trap '[[ -n "${child:-}" ]] && kill -TERM "$child" 2>/dev/null || exit 143' TERM INT

finish() { # run a command to its end: a signal ends `wait`, not the command
    local code
    "$@" &
    child=$!
    while true; do
        code=0
        wait "$child" || code=$?
        kill -0 "$child" 2>/dev/null || return "$code"
    done
}
finish run_node start
if [[ "${RANK:-0}" == 0 ]] && (($#)); then
    finish bash "$here/check_ray.sh" "$@"
else
    finish run_node serve
fi
