#!/usr/bin/env bash
# Stops what start_ray.sh started on this node, and nothing else; on rank 0 it takes the head's file away too.
set -euo pipefail
# shellcheck source=ray_utils/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
run_node stop "$@"
