"""Starts, checks, serves and stops this machine's node of a Ray cluster (docs/cluster.md).

start_ray.sh, check_ray.sh, stop_ray.sh and launch.sh call it. Ray runs in separate processes, since
it reads its token on import, and since a hanging call can be killed there.
"""

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import psutil
from rendezvous import (
    NotYet,
    chosen_ip,
    die,
    first_line,
    given_token,
    head_address,
    head_ip,
    head_port,
    interfaces,
    kept_token,
    new_token,
    number,
    route_to,
    say,
    setting,
    shared_token,
    token_for,
    unreachable,
)

from rlinf_vl.runtime.cluster import (
    MARK,
    NodeRecord,
    reachable,
    read_record,
    record_path,
    use_token,
    write_private,
)

T = TypeVar("T")

#: Seconds between two attempts while waiting.
PERIOD_S = 1.0
#: Time limit of `ray start`, and then of the head to list the new node, in seconds.
START_S = 90
#: Time limit of a head's answer, in seconds, the start of the Python process that asks it included.
ANSWER_S = 15
#: Seconds for which a head may be unreachable before a serving node concludes that it has ended.
GONE_S = 30
#: Seconds that Ray's processes get to end by themselves before they are killed.
GRACE_S = 5

#: A program that prints the living nodes of the cluster at argv[1] as JSON.
NODES = """
import json, sys
from ray._raylet import GcsClient
print(json.dumps([
    {"ip": n.node_manager_address, "id": n.node_id.hex(), "resources": dict(n.resources_total)}
    for n in GcsClient(address=sys.argv[1]).get_all_node_info().values() if n.state == 0  # alive
]))
"""


class HeadGone(Exception):
    """The head has stopped while this node was joining it."""


def until(attempt: Callable[[], T], seconds: float) -> T:
    """Repeat `attempt` until it no longer raises `NotYet`, and return its result.

    Prints each new reason for waiting, and exits after `seconds`.
    """
    end, last_reason = time.monotonic() + seconds, ""
    while True:
        try:
            return attempt()
        except NotYet as why:
            remaining = end - time.monotonic()
            if remaining <= 0:
                die(f"gave up after {seconds:g} s: {why}")
            if str(why) != last_reason:
                say(f"{why}; waiting up to {remaining:.0f} s")
                last_reason = str(why)
            time.sleep(min(PERIOD_S, remaining))


# --- start ----------------------------------------------------------------------------------------


def start(*arguments: str) -> None:
    """Start this machine's node as RANK says: 0 is the head, the others join it."""
    rank, size, port = number("RANK", 0), number("WORLD_SIZE", 1), head_port()
    if rank >= size:
        die(f"RANK must lie in 0…WORLD_SIZE-1; RANK={rank}, WORLD_SIZE={size}", 2)
    if size > 1 and not (setting("MASTER_ADDR") or setting("RAY_HEAD_FILE")):
        die(
            f"WORLD_SIZE={size} needs MASTER_ADDR, or RAY_HEAD_FILE on a disk that every node sees",
            2,
        )
    if rank == 0:
        start_head(port, size, arguments)
    else:
        join_head(port, rank, arguments)


def start_head(port: int, size: int, arguments: tuple[str, ...]) -> None:
    """Start the head unless it runs, and write its address and token for the other nodes."""
    ip = head_ip(size)
    address, head_file = f"{ip}:{port}", setting("RAY_HEAD_FILE")
    record = node_that_works(address)
    if record:
        say(f"the head already runs at {address}")
    else:
        if head_file:
            # It may be of an earlier cluster; nodes that wait for this head must not read that.
            forget(head_file)
        if holder := holder_of(port):
            die(
                f"port {port} of this machine is taken by {holder}; end that, or choose another "
                "port with RAY_PORT"
            )
        say(f"starting the head at {address}")
        options = [
            "--head",
            f"--port={port}",
            f"--dashboard-host={setting('RAY_DASHBOARD_HOST') or '127.0.0.1'}",
            *arguments,
        ]
        record = start_node(address, ip, new_token(), options)
    if head_file:
        # The token is written first: a node that finds the address needs the token at once.
        if not given_token():
            write_private(shared_token(), Path(record.token_path).read_text())
        write_private(Path(head_file), f"{address}\n")
        replace(record, head_file=os.path.abspath(head_file)).save()
    say(
        f"head is up at {address}; {size - 1} other node(s) may join. Runs that start on this node "
        "use this cluster"
    )
    say(
        "for Ray's own commands: export RAY_AUTH_MODE=token "
        f"RAY_AUTH_TOKEN_PATH={record.token_path}"
    )


def join_head(port: int, rank: int, arguments: tuple[str, ...]) -> None:
    """Wait for the head, and join its cluster unless this machine has joined already."""

    def find_head() -> tuple[str, str, str]:
        address = head_address(port)
        ip = chosen_ip() or route_to(address.rpartition(":")[0])
        if not ip or not reachable(address, source=ip):
            raise NotYet(unreachable(address, ip))
        token, token_source = token_for(address)
        nodes_of(address, token, token_source)  # raises unless it is Ray and accepts the token
        return address, ip, token

    address, ip, token = until(find_head, number("RAY_WAIT_TIMEOUT", 300))
    if node_that_works(address):
        say(f"this machine has already joined {address}")
        return
    say(f"joining the head at {address} from {ip}")
    try:
        start_node(address, ip, token, [f"--address={address}", *arguments])
        say(f"rank {rank} joined {address} as {ip}")
    except HeadGone:  # a short run may end while this node is still joining
        say(f"the head at {address} has gone while this node joined")


def node_that_works(address: str) -> NodeRecord | None:
    """Return this machine's node if it is a living member of the cluster at `address`.

    The remaining processes of a dead node are ended.
    """
    record = read_record()
    if record is None:
        return None
    if record.runs() and reachable(record.address):
        if record.address != address:
            die(
                f"a node of the cluster at {record.address} runs on this machine; stop it first: "
                "ray_utils/stop_ray.sh"
            )
        # A head may be too busy to answer while this node works: give up rather than end the node.
        if until(lambda: listed(record, *token_for(address)), ANSWER_S):
            return record
    say(f"ending what is left of a node of the cluster at {record.address}")
    end_node(record.mark, record.group)
    return None


def start_node(address: str, ip: str, token: str, options: list[str]) -> NodeRecord:
    """Run `ray start`, wait until the head lists the node under `ip`, and record the node.

    If that fails, all started processes are ended.
    """
    mark, token_path = secrets.token_hex(8), kept_token()
    write_private(token_path, token)
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {
        MARK: mark
    }
    use_token(str(token_path), environment)
    if not ip.startswith("127."):
        # Otherwise torch.distributed looks up its own address by host name, which may be another.
        environment.setdefault(
            "GLOO_SOCKET_IFNAME",
            next(name for name, addresses in interfaces().items() if ip in addresses),
        )
    command = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        f"--node-ip-address={ip}",
        "--disable-usage-stats",
    ]
    # The output goes to a file: Ray's processes inherit it and would keep a pipe open.
    with contextlib.ExitStack() as undo, tempfile.TemporaryFile() as output:
        channels = {
            "stdin": subprocess.DEVNULL,
            "stdout": output,
            "stderr": output,
            "process_group": 0,
        }
        starting = subprocess.Popen(command + options, env=environment, **channels)
        undo.callback(end_node, mark, starting.pid)
        try:
            code: int | str = starting.wait(START_S)
        except subprocess.TimeoutExpired:
            code = f"no end after {START_S} s"
        raylet = next(iter(named("raylet", processes_of(mark, starting.pid))), None)
        if code or raylet is None:
            if signed_off(address):
                raise HeadGone
            output.seek(0)
            die(
                f"ray start failed ({code or 'no raylet lives'}):\n"
                f"{output.read().decode(errors='replace')[-2000:]}"
            )
        node_id = next(
            word for word in raylet.cmdline() if word.startswith("--node_id=")
        ).partition("=")[2]
        record = NodeRecord(address, ip, node_id, raylet.pid, mark, starting.pid, str(token_path))

        def joined() -> None:
            if signed_off(address):
                raise HeadGone
            if not listed(record, token, str(token_path)):
                raise NotYet(f"the head at {address} does not list this node as {ip}")

        until(joined, START_S)
        record.save()
        undo.pop_all()
    return record


# --- check, serve and stop ------------------------------------------------------------------------


def check(*arguments: str) -> None:
    """Wait until the cluster's nodes have at least N GPUs, or CPUs."""
    numbers = [argument for argument in arguments if argument != "--cpu"]
    if len(numbers) != 1 or not numbers[0].isdigit():
        die("usage: bash ray_utils/check_ray.sh N [--cpu] [-- COMMAND…]", 2)
    required, resource, port = (
        int(numbers[0]),
        "CPU" if "--cpu" in arguments else "GPU",
        head_port(),
    )
    of_all = f" of {setting('WORLD_SIZE')}" if setting("WORLD_SIZE") else ""

    def count_resources() -> str:
        address = head_address(port)
        if not reachable(address):
            raise NotYet(unreachable(address))
        nodes = nodes_of(address, *token_for(address))
        total = int(sum(node["resources"].get(resource, 0) for node in nodes))
        node_ips = ", ".join(sorted(node["ip"] for node in nodes))
        state = f"{len(nodes)}{of_all} node(s) ({node_ips}) offer {total} {resource}(s); at least {required} wanted"
        if total < required:
            raise NotYet(state)
        return state

    say(until(count_resources, number("RAY_WAIT_TIMEOUT", 300)))


def serve() -> None:
    """Wait while this node serves the cluster.

    Rank 0 waits until it gets a signal to stop. The other ranks ignore signals and wait until the
    head has ended.
    """
    record, head = read_record(), number("RANK", 0) == 0
    if (
        record is None
        and not head
        and setting("RAY_HEAD_FILE")
        and not first_line(setting("RAY_HEAD_FILE"))
    ):
        say("the head has gone; there is nothing to serve")
        return
    record = record or die("start_ray.sh has started nothing on this node")
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(
            name,
            (lambda *_: sys.exit())
            if head
            else (lambda *_: say("asked to stop; the head goes first")),
        )
    say(f"serving the cluster at {record.address}")
    last_reachable = time.monotonic()
    while record.runs() and time.monotonic() - last_reachable < GONE_S:
        time.sleep(PERIOD_S)
        if reachable(record.address):
            last_reachable = time.monotonic()
        elif signed_off(record.address):
            break
    if reachable(record.address):
        die(f"Ray has ended on this node, while the head at {record.address} lives")
    say(f"the head at {record.address} has gone")


def signed_off(address: str) -> bool:
    """Return whether the head at `address`, on another node, has stopped and removed its file."""
    file = setting("RAY_HEAD_FILE")
    return (
        bool(number("RANK", 0) and file) and first_line(file) != address and not reachable(address)
    )


def stop() -> None:
    """End this machine's node; the head's address and token are deleted with it."""
    record = read_record()
    if record is None:
        say("start_ray.sh has started nothing on this node, or it is stopped already")
        return
    ended = end_node(record.mark, record.group)
    say(f"ended {ended} process(es) of the cluster at {record.address}; none of this node is left")
    # A later head, on another node, may have written its own address to the file.
    if record.head_file and first_line(record.head_file) == record.address:
        forget(record.head_file)


def forget(head_file: str) -> None:
    """Delete the head's address and token from the shared disk."""
    for path in (head_file, f"{head_file}.token"):
        Path(path).unlink(missing_ok=True)


# --- processes ------------------------------------------------------------------------------------


def living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that run; a zombie doesn't."""
    alive = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive


def named(name: str, processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return the processes of this name."""
    matching = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.name() == name:
                matching.append(process)
    return matching


def processes_of(mark: str, group: int) -> list[psutil.Process]:
    """Return the living processes that inherited the mark, and their descendants.

    Some processes write their title over their environment. Once their parent has ended, they are
    recognized by their process group.
    """
    members: set[psutil.Process] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):  # ended, or another user's
            if process.environ().get(MARK) == mark:
                members |= {process, *process.children(recursive=True)}
            elif process.name().startswith("ray::") and os.getpgid(process.pid) == group:
                members.add(process)
    return living(members)


def end(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """End processes, and kill those that do not end within `GRACE_S`.

    Returns:
        The processes that are still alive.
    """
    alive = living(processes)
    for action in ("terminate", "kill"):
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                getattr(process, action)()
        deadline = time.monotonic() + GRACE_S
        while (alive := living(alive)) and time.monotonic() < deadline:
            time.sleep(0.1)
    return alive


def end_node(mark: str, group: int) -> int:
    """End a node's processes and delete its record; return the number of processes."""
    members = processes_of(mark, group)
    # The raylet ends first: it leaves the cluster and ends its workers. The GCS ends last, since
    # the others end faster while it answers.
    gcs = named("gcs_server", members)
    end(named("raylet", members))
    end(process for process in members if process not in gcs)
    if alive := end({*gcs, *processes_of(mark, group)}):
        die(f"process {', '.join(str(process.pid) for process in alive)} of this node does not end")
    record = read_record()
    if record is None or record.mark == mark:
        for path in (record_path(), kept_token()):
            path.unlink(missing_ok=True)
    return len(members)


def holder_of(port: int) -> str | None:
    """Describe the process that listens on a port of this machine; None if the port is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore lingering connections
        try:
            probe.bind(("0.0.0.0", port))
            return None
        except OSError as error:
            bind_error = str(error)
    for connection in psutil.net_connections("tcp"):
        if (
            connection.laddr.port == port
            and connection.status == psutil.CONN_LISTEN
            and connection.pid
        ):
            return f"process {connection.pid} ({psutil.Process(connection.pid).name()})"
    return f"another process ({bind_error})"


# --- the cluster's view ---------------------------------------------------------------------------


def nodes_of(address: str, token: str, token_source: str) -> list[dict]:
    """Return the living nodes of a cluster, each with `ip`, `id` and `resources`.

    Raises:
        NotYet: the head does not answer, or refuses the token.
    """
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    command = [sys.executable, "-c", NODES, address]
    try:
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=ANSWER_S
        )
    except subprocess.TimeoutExpired:
        raise NotYet(f"what listens at {address} does not answer as a Ray head does") from None
    if result.returncode == 0:
        return json.loads(result.stdout)
    if "InvalidAuthToken" in result.stderr:
        raise NotYet(
            f"the head at {address} refuses the token of {token_source}; every node needs the "
            "head's token"
        )
    raise NotYet(
        f"what listens at {address} does not answer as a Ray head does: "
        f"{result.stderr.strip()[-300:]}"
    )


def listed(record: NodeRecord, token: str, token_source: str) -> bool:
    """Return whether the head lists this node as alive under its address.

    Raises:
        NotYet: the head does not answer.
    """
    if not reachable(record.address):
        raise NotYet(f"nothing answers at {record.address}, the address that this node goes by")
    return (record.node_id, record.node_ip) in [
        (node["id"], node["ip"]) for node in nodes_of(record.address, token, token_source)
    ]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        {"start": start, "check": check, "serve": serve, "stop": stop}[sys.argv[1]](*sys.argv[2:])
    except KeyboardInterrupt:
        sys.exit(130)
