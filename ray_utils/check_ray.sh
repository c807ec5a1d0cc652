#!/usr/bin/env bash
# Waits until the cluster offers at least N GPUs (or CPUs); exit code 1 if it does not within RAY_WAIT_TIMEOUT seconds.
#
#   bash ray_utils/check_ray.sh N [--cpu] [-- COMMAND…]
#
# Then becomes COMMAND. The head is found as start_ray.sh does; without MASTER_ADDR and RAY_HEAD_FILE it is the one this node
# belongs to.
set -euo pipefail
# shellcheck source=ray_utils/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
wanted=()
while (($#)) && [[ "$1" != -- ]]; do
    wanted+=("$1")
    shift
done
(run_node check "${wanted[@]}")
if (($# > 1)); then exec "${@:2}"; fi
