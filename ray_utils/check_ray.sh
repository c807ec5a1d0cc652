#!/usr/bin/env bash
# Waits until the cluster offers at least N GPUs (or CPUs); exit code 1 if it does not within RAY_WAIT_TIMEOUT seconds.
# Run it on a node that has joined. The head is found as start_ray.sh does; without MASTER_ADDR and RAY_HEAD_FILE it is
# the one this node belongs to.
set -euo pipefail
# shellcheck source=ray_utils/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

resource=GPU wanted=""
for argument in "$@"; do
    case "$argument" in
        --cpu) resource=CPU ;;
        *) wanted="$argument" ;;
    esac
done
[[ "$wanted" =~ ^[0-9]+$ ]] || code=2 die "usage: bash ray_utils/check_ray.sh N [--cpu]"
python="$(ray_python)"

# The answer itself is bounded too: joining a dying cluster can hang.
report="$(mktemp)"
trap 'rm -f -- "$report"' EXIT
code=0
timeout --kill-after=5 "$((RAY_WAIT_TIMEOUT + 2))" "$python" - "$wanted" "$resource" "$RAY_WAIT_TIMEOUT" \
    "$(head_address)" "$report" <<'EOF' || code=$?
import contextlib, logging, pathlib, socket, sys, time

wanted, resource, timeout, address, report = sys.argv[1:]
wanted, start, said = int(wanted), time.monotonic(), None
deadline = start + float(timeout)


def state(message):
    global said
    pathlib.Path(report).write_text(message)
    if message != said:
        print(f"[ray] {message}", flush=True)
    said = message


def reachable():
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=3):
        return True
    return False


connected = False
while time.monotonic() < deadline:
    if not connected and address and not reachable():
        state(f"no Ray head answers at {address}")
    else:
        import ray

        try:
            if not connected:
                ray.init(address=address or "auto", logging_level=logging.ERROR, log_to_driver=False)
            connected = True
            offered = int(ray.cluster_resources().get(resource, 0))
            nodes = sum(node["Alive"] for node in ray.nodes())
            state(f"{nodes} node(s) offer {offered} {resource}(s); at least {wanted} wanted")
            if offered >= wanted:
                sys.exit(0)
        except (ConnectionError, RuntimeError, ValueError) as error:
            state(f"cannot join {address or 'a cluster on this node'}: {str(error).splitlines()[0]}")
    time.sleep(min(2, max(0, deadline - time.monotonic())))
sys.exit(1)
EOF
((code == 0)) || code=1 die "gave up after $RAY_WAIT_TIMEOUT s: $(cat -- "$report")"
