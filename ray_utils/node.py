"""This machine's part in a Ray cluster: what start_ray.sh, check_ray.sh, stop_ray.sh and launch.sh do. See docs/cluster.md.

Ray itself runs in processes of their own: it reads its token when it is imported, and a call that hangs can be ended.
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

from rlinf_vl.runtime.cluster import MARK, NodeRecord, reachable, read_record, record_path, use_token, write_private

T = TypeVar("T")

#: Seconds between two looks at something waited for.
PERIOD_S = 1.0
#: Seconds that `ray start` may take, and then the head to list the new node.
START_S = 90
#: Seconds that a head has to answer, the start of the Python that asks it included.
ANSWER_S = 15
#: Seconds that a head may be out of reach before a node that serves takes it for gone.
GONE_S = 30
#: Seconds that Ray's processes have to end by themselves.
GRACE_S = 5

#: Prints the nodes of the cluster at argv[1] as JSON.
NODES = """
import json, sys
from ray._raylet import GcsClient
print(json.dumps([
    {"ip": n.node_manager_address, "id": n.node_id.hex(), "resources": dict(n.resources_total)}
    for n in GcsClient(address=sys.argv[1]).get_all_node_info().values() if n.state == 0  # alive
]))
"""


class HeadGone(Exception):
    """The head has signed off while this node joined it."""


def until(attempt: Callable[[], T], seconds: float) -> T:
    """What `attempt` returns once it no longer raises `NotYet`. Says why it waits, and gives up after `seconds`."""
    end, said = time.monotonic() + seconds, ""
    while True:
        try:
            return attempt()
        except NotYet as why:
            left = end - time.monotonic()
            if left <= 0:
                die(f"gave up after {seconds:g} s: {why}")
            if str(why) != said:
                say(f"{why}; waiting up to {left:.0f} s")
                said = str(why)
            time.sleep(min(PERIOD_S, left))


# --- start ------------------------------------------------------------------------------------------------------------


def start(*arguments: str) -> None:
    rank, size, port = number("RANK", 0), number("WORLD_SIZE", 1), head_port()
    if rank >= size:
        die(f"RANK must lie in 0…WORLD_SIZE-1; RANK={rank}, WORLD_SIZE={size}", 2)
    if size > 1 and not (setting("MASTER_ADDR") or setting("RAY_HEAD_FILE")):
        die(f"WORLD_SIZE={size} needs MASTER_ADDR, or RAY_HEAD_FILE on a disk that every node sees", 2)
    if rank == 0:
        start_head(port, size, arguments)
    else:
        join_head(port, rank, arguments)


def start_head(port: int, size: int, arguments: tuple[str, ...]) -> None:
    ip = head_ip(size)
    address, head_file = f"{ip}:{port}", setting("RAY_HEAD_FILE")
    record = node_that_works(address)
    if record:
        say(f"the head already runs at {address}")
    else:
        if head_file:  # of an earlier cluster: whoever waits for this one must not find it
            forget(head_file)
        if holder := holder_of(port):
            die(f"port {port} of this machine is taken by {holder}; end that, or choose another port with RAY_PORT")
        say(f"starting the head at {address}")
        options = [
            "--head",
            f"--port={port}",
            f"--dashboard-host={setting('RAY_DASHBOARD_HOST') or '127.0.0.1'}",
            *arguments,
        ]
        record = start_node(address, ip, new_token(), options)
    if head_file:  # the token first: whoever finds the address wants it
        if not given_token():
            write_private(shared_token(), Path(record.token_path).read_text())
        write_private(Path(head_file), f"{address}\n")
        replace(record, head_file=os.path.abspath(head_file)).save()
    say(f"head is up at {address}; {size - 1} other node(s) may join. Runs that start on this node use this cluster")
    say(f"for Ray's own commands: export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={record.token_path}")


def join_head(port: int, rank: int, arguments: tuple[str, ...]) -> None:
    def found() -> tuple[str, str, str]:
        address = head_address(port)
        ip = chosen_ip() or route_to(address.rpartition(":")[0])
        if not ip or not reachable(address, source=ip):
            raise NotYet(unreachable(address, ip))
        token, where = token_for(address)
        nodes_of(address, token, where)  # it is Ray, and takes the token
        return address, ip, token

    address, ip, token = until(found, number("RAY_WAIT_TIMEOUT", 300))
    if node_that_works(address):
        say(f"this machine has already joined {address}")
        return
    say(f"joining the head at {address} from {ip}")
    try:
        start_node(address, ip, token, [f"--address={address}", *arguments])
        say(f"rank {rank} joined {address} as {ip}")
    except HeadGone:  # the run was over before this node had looked twice
        say(f"the head at {address} has gone while this node joined")


def node_that_works(address: str) -> NodeRecord | None:
    """This machine's node, if it is a living member of the cluster at `address`. What is left of a dead one is ended."""
    record = read_record()
    if record is None:
        return None
    if record.runs() and reachable(record.address):
        if record.address != address:
            die(f"a node of the cluster at {record.address} runs on this machine; stop it first: ray_utils/stop_ray.sh")
        # A head that is too busy to answer is no reason to end a node that may be at work: give up instead.
        if until(lambda: listed(record, *token_for(address)), ANSWER_S):
            return record
    say(f"ending what is left of a node of the cluster at {record.address}")
    end_node(record.mark, record.group)
    return None


def start_node(address: str, ip: str, token: str, options: list[str]) -> NodeRecord:
    """Run `ray start`, see that the head lists the node under `ip`, and record it. Leaves nothing behind if that fails."""
    mark, token_path = secrets.token_hex(8), kept_token()
    write_private(token_path, token)
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {MARK: mark}
    use_token(str(token_path), environment)
    if not ip.startswith("127."):  # torch.distributed looks for its own address by host name otherwise
        environment.setdefault("GLOO_SOCKET_IFNAME", next(name for name, own in interfaces().items() if ip in own))
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={ip}", "--disable-usage-stats"]
    # The output goes to a file: Ray's processes would keep a pipe open.
    with contextlib.ExitStack() as undo, tempfile.TemporaryFile() as output:
        channels = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output, "process_group": 0}
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
            die(f"ray start failed ({code or 'no raylet lives'}):\n{output.read().decode(errors='replace')[-2000:]}")
        node_id = next(word for word in raylet.cmdline() if word.startswith("--node_id=")).partition("=")[2]
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


# --- check, serve and stop ---------------------------------------------------------------------------------------------------


def check(*arguments: str) -> None:
    numbers = [argument for argument in arguments if argument != "--cpu"]
    if len(numbers) != 1 or not numbers[0].isdigit():
        die("usage: bash ray_utils/check_ray.sh N [--cpu] [-- COMMAND…]", 2)
    wanted, resource, port = int(numbers[0]), "CPU" if "--cpu" in arguments else "GPU", head_port()
    of = f" of {setting('WORLD_SIZE')}" if setting("WORLD_SIZE") else ""

    def offered() -> str:
        address = head_address(port)
        if not reachable(address):
            raise NotYet(unreachable(address))
        nodes = nodes_of(address, *token_for(address))
        total = int(sum(node["resources"].get(resource, 0) for node in nodes))
        there = ", ".join(sorted(node["ip"] for node in nodes))
        state = f"{len(nodes)}{of} node(s) ({there}) offer {total} {resource}(s); at least {wanted} wanted"
        if total < wanted:
            raise NotYet(state)
        return state

    say(until(offered, number("RAY_WAIT_TIMEOUT", 300)))


def serve() -> None:
    """Wait while this node serves: rank 0 until it is asked to stop, the others until the head has gone, whatever they are asked."""
    record, head = read_record(), number("RANK", 0) == 0
    if record is None and not head and setting("RAY_HEAD_FILE") and not first_line(setting("RAY_HEAD_FILE")):
        say("the head has gone; there is nothing to serve")
        return
    record = record or die("start_ray.sh has started nothing on this node")
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, (lambda *_: sys.exit()) if head else (lambda *_: say("asked to stop; the head goes first")))
    say(f"serving the cluster at {record.address}")
    seen = time.monotonic()
    while record.runs() and time.monotonic() - seen < GONE_S:
        time.sleep(PERIOD_S)
        if reachable(record.address):
            seen = time.monotonic()
        elif signed_off(record.address):
            break
    if reachable(record.address):
        die(f"Ray has ended on this node, while the head at {record.address} lives")
    say(f"the head at {record.address} has gone")


def signed_off(address: str) -> bool:
    """On another node than the head's: whether the head at `address` has stopped, and taken its file away."""
    file = setting("RAY_HEAD_FILE")
    return bool(number("RANK", 0) and file) and first_line(file) != address and not reachable(address)


def stop() -> None:
    record = read_record()
    if record is None:
        say("start_ray.sh has started nothing on this node, or it is stopped already")
        return
    ended = end_node(record.mark, record.group)
    say(f"ended {ended} process(es) of the cluster at {record.address}; none of this node is left")
    if record.head_file and first_line(record.head_file) == record.address:  # not that of a later head elsewhere
        forget(record.head_file)


def forget(head_file: str) -> None:
    for path in (head_file, f"{head_file}.token"):
        Path(path).unlink(missing_ok=True)


# --- processes --------------------------------------------------------------------------------------------------------


def living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def named(name: str, processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.name() == name:
                found.append(process)
    return found


def processes_of(mark: str, group: int) -> list[psutil.Process]:
    """Living processes that inherited the mark, and their descendants.

    Some write their title over their environment; those are found by their process group once their parent has gone."""
    found: set[psutil.Process] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):  # gone, or another user's
            if process.environ().get(MARK) == mark:
                found |= {process, *process.children(recursive=True)}
            elif process.name().startswith("ray::") and os.getpgid(process.pid) == group:
                found.add(process)
    return living(found)


def end(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """End processes, by force if they do not within `GRACE_S`; those that live even so."""
    left = living(processes)
    for action in ("terminate", "kill"):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                getattr(process, action)()
        deadline = time.monotonic() + GRACE_S
        while (left := living(left)) and time.monotonic() < deadline:
            time.sleep(0.1)
    return left


def end_node(mark: str, group: int) -> int:
    """End a node's processes and forget its record; returns how many there were."""
    family = processes_of(mark, group)
    # The raylet first: it signs off, and ends its workers. The GCS last: the others end faster while it answers.
    gcs = named("gcs_server", family)
    end(named("raylet", family))
    end(process for process in family if process not in gcs)
    if left := end({*gcs, *processes_of(mark, group)}):
        die(f"process {', '.join(str(process.pid) for process in left)} of this node does not end")
    record = read_record()
    if record is None or record.mark == mark:
        for path in (record_path(), kept_token()):
            path.unlink(missing_ok=True)
    return len(family)


def holder_of(port: int) -> str | None:
    """Who listens on a port of this machine, None if nobody does."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that linger do not count
        try:
            probe.bind(("0.0.0.0", port))
            return None
        except OSError as error:
            why = str(error)
    for connection in psutil.net_connections("tcp"):
        if connection.laddr.port == port and connection.status == psutil.CONN_LISTEN and connection.pid:
            return f"process {connection.pid} ({psutil.Process(connection.pid).name()})"
    return f"another process ({why})"


# --- the cluster's view ------------------------------------------------------------------------------------------------


def nodes_of(address: str, token: str, where: str) -> list[dict]:
    """The living nodes of a cluster: `ip`, `id`, `resources`. `NotYet` if it does not answer, or refuses the token."""
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    command = [sys.executable, "-c", NODES, address]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=ANSWER_S)
    except subprocess.TimeoutExpired:
        raise NotYet(f"what listens at {address} does not answer as a Ray head does") from None
    if done.returncode == 0:
        return json.loads(done.stdout)
    if "InvalidAuthToken" in done.stderr:
        raise NotYet(f"the head at {address} refuses the token of {where}; every node needs the head's token")
    raise NotYet(f"what listens at {address} does not answer as a Ray head does: {done.stderr.strip()[-300:]}")


def listed(record: NodeRecord, token: str, where: str) -> bool:
    """Whether the head lists this node, alive, under its address. `NotYet` if it does not answer."""
    if not reachable(record.address):
        raise NotYet(f"nothing answers at {record.address}, the address that this node goes by")
    return (record.node_id, record.node_ip) in [
        (node["id"], node["ip"]) for node in nodes_of(record.address, token, where)
    ]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        {"start": start, "check": check, "serve": serve, "stop": stop}[sys.argv[1]](*sys.argv[2:])
    except KeyboardInterrupt:
        sys.exit(130)
