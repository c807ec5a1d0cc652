#!/usr/bin/env bash
# Stops every Ray process of this user on this node, and on rank 0 takes the head's file away.
set -euo pipefail
# shellcheck source=ray_utils/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

python="$(ray_python)"
output="$("$python" -m ray.scripts.scripts stop --grace-period "${RAY_STOP_GRACE:-20}" 2>&1)" || die "$output"
say "no Ray process is left on this node"
if [[ "${RANK:-0}" == 0 && -n "${RAY_HEAD_FILE:-}" ]]; then rm -f -- "$RAY_HEAD_FILE"; fi
