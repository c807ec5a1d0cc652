"""Ray actors that may die or hang: detecting it, and ending them whatever state their process is
in.

torch is imported where it is needed: the process that records trajectories does without.
"""

import hashlib
import ipaddress
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import psutil
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.experimental.internal_kv import _internal_kv_put
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlinf_vl.errors import reason_of

#: Seconds between two heartbeats of an actor that is at work.
HEARTBEAT_PERIOD_S = 5.0
#: Threads of an actor process beside a GPU beyond which it gets no faster.
MAX_THREADS = 16
#: Seconds to wait, after an actor's call has failed, for the death of another actor that may have
#: caused it.
CAUSE_TIMEOUT_S = 15
#: Seconds to wait for a node to end a process; it may have to start a worker for that.
KILL_S = 5.0


class ActorsLost(RuntimeError):
    """An actor that others wait for has died or hangs."""


def first_report(text: str) -> bool:
    """Return whether no process of this Ray job has reported `text` before; without Ray, True.

    Ray's key-value store decides, so workers of all nodes together report an error once.
    """
    if not ray.is_initialized():
        return True
    job = ray.get_runtime_context().get_job_id()
    key = hashlib.sha256(f"{job} {text}".encode()).digest()
    try:
        return not _internal_kv_put(key, b"1", overwrite=False, namespace="rlinf_vl reports")
    except Exception:  # without Ray's head, a report too many is better than none
        return True


@ray.remote(num_cpus=0, max_retries=0)
def _kill_process(pid: int) -> None:
    """End a process, also a stopped or wedged one, which does not answer Ray."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@ray.remote
def gpu_ids() -> Sequence[int | str]:
    """Return the ids of the GPUs that Ray gives this task."""
    return ray.get_gpu_ids()


def see_gpus(further_gpus: Sequence[int | str] = ()) -> None:
    """Let this process see the GPUs that Ray gave it and `further_gpus`, as 0, 1, …, and no others of
    the host, also under RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, [*ray.get_gpu_ids(), *further_gpus]))


def own_process(device: str, further_gpus: Sequence[int | str] = ()) -> None:
    """Set up an actor's process, before it or a child of it touches a GPU.

    It gets its threads (one on a CPU, `threads_beside` a GPU), its GPUs (`see_gpus`), and the
    network interface of its node's address.
    """
    import torch

    threads = 1
    if device == "cuda":
        see_gpus(further_gpus)
        node = ray.get_runtime_context().get_node_id()
        (gpus,) = (n["Resources"].get("GPU", 1) for n in ray.nodes() if n["NodeID"] == node)
        threads = threads_beside(len(os.sched_getaffinity(0)), int(gpus))
    # Of its children, too.
    os.environ |= {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
    }
    torch.set_num_threads(threads)
    # Otherwise gloo looks up its own address by host name, which may be one that other nodes do not
    # reach. `ray_utils/start_ray.sh` sets it, too; a Ray that was started otherwise does not.
    if interface := interface_of(ray.util.get_node_ip_address()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def interface_of(address: str) -> str | None:
    """Return the network interface of this host that has the address.

    It is None for an address of this host alone (127.0.0.1), which processes of other hosts can't
    reach by any interface.
    """
    if ipaddress.ip_address(address).is_loopback:
        return None
    for interface, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return interface
    return None


def threads_beside(cores: int, gpus: int) -> int:
    """Return the threads of each of a GPU's two processes (a rank, an engine) on a host with so
    many cores and GPUs."""
    return max(1, min(MAX_THREADS, cores // (2 * gpus)))


def where() -> tuple[str, int]:
    """Return (node id, process id) of the calling actor, as `kill` needs them."""
    return ray.get_runtime_context().get_node_id(), os.getpid()


def entry(name: str, process: ray.ObjectRef, restarts: int) -> dict[str, object]:
    """Return an actor's entry in the status file.

    Never waits: an actor that has not answered yet is restarting, or waits for a node.

    Args:
        process: the actor's `where`.
    """
    node, pid, state = "", 0, "restarting"
    if ray.wait([process], timeout=0)[0]:
        try:
            (node, pid), state = ray.get(process), "alive"
        except RayError:
            state = "dead"
    return {"name": name, "node": node[:8], "pid": pid, "state": state, "restarts": restarts}


def kill(actor, process: ray.ObjectRef) -> None:
    """End an actor's process even if it is stopped.

    Waits `KILL_S` at most: a node that does not answer by then gets longer in a thread, and Ray
    ends the actor when the node is back.

    Args:
        process: the actor's `where`.
    """
    ray.kill(actor)
    ending = threading.Thread(target=_end, args=(process,), name="end a process", daemon=True)
    ending.start()
    ending.join(KILL_S)


def _end(process: ray.ObjectRef) -> None:
    """Kill a process through its node."""
    with suppress(RayError):  # it never started, or it or its node is dead already
        node, pid = ray.get(process, timeout=1)
        on_node = NodeAffinitySchedulingStrategy(node, soft=False)
        ray.get(_kill_process.options(scheduling_strategy=on_node).remote(pid), timeout=60)


class Heartbeat:
    """The heartbeat of an actor, which is asked every few seconds whether it is healthy.

    Args:
        ask: calls a method of the actor that answers soon, even while it works.
        timeout: seconds without an answer after which the actor counts as hung.
    """

    def __init__(self, ask: Callable[[], ray.ObjectRef], timeout: float) -> None:
        self._ask = ask
        self._timeout = timeout
        self._pending: ray.ObjectRef | None = None
        self._since = time.monotonic()  # time of the pending call, or of the last answer

    def restart(self) -> None:
        """Count from now: the actor is expected to be healthy."""
        self._pending = None
        self._since = time.monotonic()

    def failure(self) -> str | None:
        """Return the reason why the actor is dead or hung; None if it is healthy. Never waits."""
        time_s = time.monotonic()
        if self._pending is None:
            if time_s - self._since >= HEARTBEAT_PERIOD_S:
                self._pending, self._since = self._ask(), time_s
            return None
        answered, _ = ray.wait([self._pending], timeout=0)
        if not answered:
            silent_s = time_s - self._since
            return f"no heartbeat for {silent_s:.0f} s" if silent_s > self._timeout else None
        try:
            is_healthy = ray.get(self._pending)
        except RayError as error:
            return cause_of(error)
        self._pending, self._since = None, time_s
        return None if is_healthy else "its engine is dead"


def wait_for_all(
    pending: Sequence[ray.ObjectRef],
    actors: Mapping[str, Any],
    *,
    heartbeat_timeout: float = math.inf,
    timeout: float = math.inf,
    own_faults: tuple[type[Exception], ...] = (),
) -> list[Any]:
    """Return the results of actors' calls that wait for each other.

    If one of these actors dies or hangs, no call may end, so all actors are watched.

    Args:
        actors: by name; each has a method `process` that answers while it works.
        heartbeat_timeout: seconds without an answer after which an actor counts as hung.
        own_faults: errors that a call may raise without another actor's death being the reason.

    Raises:
        ActorsLost: an actor died or hangs, or the calls take longer than `timeout` seconds.
        RayActorError: an actor's constructor failed.
        RayTaskError: a call failed while all actors live, or with one of `own_faults`.
    """
    heartbeats = {
        name: Heartbeat(actor.process.remote, heartbeat_timeout) for name, actor in actors.items()
    }
    waiting = list(pending)
    deadline = time.monotonic() + timeout
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=HEARTBEAT_PERIOD_S / 5)
        try:
            ray.get(done)
        except RayError as error:
            # The actor's node is lost, or its result.
            if not isinstance(error, RayActorError | RayTaskError):
                raise ActorsLost(f"an actor is lost: {cause_of(error)}") from error
            if isinstance(error, RayActorError):
                if error.actor_init_failed:  # any other actor's constructor would fail, too
                    raise
                dead = error
            elif isinstance(error.cause, own_faults):
                raise
            elif (dead := _find_dead(actors.values())) is None:
                if _of_network(error.cause):
                    raise ActorsLost(f"they have lost each other: {reason_of(error)}") from error
                raise
            name = next(
                (name for name, actor in actors.items() if actor._actor_id.hex() == dead.actor_id),
                "an actor",
            )
            raise ActorsLost(f"{name} died: {cause_of(dead)}") from error
        for name, heartbeat in heartbeats.items() if heartbeat_timeout < math.inf else ():
            if reason := heartbeat.failure():
                raise ActorsLost(f"{name}: {reason}")
        if waiting and time.monotonic() > deadline:
            raise ActorsLost(f"not done within {timeout:.0f} s")
    return ray.get(list(pending))


def _find_dead(actors: Collection[Any]) -> RayActorError | None:
    """Return the error of an actor that is dead, or dies within `CAUSE_TIMEOUT_S`; None if all
    live."""
    deadline = time.monotonic() + CAUSE_TIMEOUT_S
    pending: list[ray.ObjectRef] = []
    while time.monotonic() < deadline:
        # all are asked again until the time is over: Ray learns of a death some seconds later
        pending += (
            [actor.process.remote() for actor in actors] if len(pending) < len(actors) else []
        )
        answered, pending = ray.wait(pending, num_returns=len(pending), timeout=0.5)
        for reference in answered:
            try:
                ray.get(reference)
            except RayActorError as error:
                return error
    return None


def _of_network(cause: BaseException | None) -> bool:
    """Return whether a collective failed in transport: its peer is gone or out of reach, which Ray
    may not know yet."""
    from torch.distributed import DistError  # pyright: ignore[reportPrivateImportUsage]

    return isinstance(cause, DistError) or (
        isinstance(cause, RuntimeError) and "gloo/transport" in str(cause)
    )


def cause_of(error: RayError) -> str:
    """Return Ray's reason for a death or a loss, on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if len(lines) < 2 else f"{lines[0]} ({lines[-1]})"
