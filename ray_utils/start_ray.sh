#!/usr/bin/env bash
# Starts Ray on this node: run it once on every node of the cluster, in any order, as often as you like.
#
#   RANK, WORLD_SIZE    this node's number and how many nodes there are (default 0 and 1); rank 0 is the head
#   MASTER_ADDR         the head's address, known to every node; or else
#   RAY_HEAD_FILE       a file on a shared disk through which the head tells it, and the token in a file beside it
#   RAY_PORT            the head's port (default 6379)
#   RAY_INTERFACE       the network interface to use, such as eth1; or
#   RAY_NODE_IP         its address (default: that of the route to the head)
#   RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH
#                       the cluster's token, or a file with it, if it does not come through RAY_HEAD_FILE
#   RAY_WAIT_TIMEOUT    seconds to wait for the head (default 300)
#   RLINF_VL_PYTHON     the Python that has Ray (default: the activated environment, or .venv); workers run that of each run
# Arguments go to `ray start`, such as --num-cpus=8. More: docs/cluster.md
set -euo pipefail
# shellcheck source=ray_utils/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
run_node start "$@"
