"""Ray for a run: a private cluster or one to join, its workers' interpreter, and the slots of every
component.

Ray's messages are pickles, so run and cluster must have one version of Ray and of Python.
Everything else (torch, SGLang) comes from the run's environment, which must lie at the same path on
every node: workers run the run's own interpreter.
"""

import importlib
import logging
import os
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from glob import glob
from typing import Any

import psutil
import ray
from ray._private import ray_logging, services
from ray._raylet import Config as RayConfig  # pyright: ignore[reportAttributeAccessIssue]  # Cython, without stubs
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from rlinf_vl.config.engines import may_broadcast
from rlinf_vl.config.placement import Placement, placement_of, slots_named
from rlinf_vl.config.schema import ClusterConfig, Config
from rlinf_vl.errors import ConfigError, RunError
from rlinf_vl.runtime.cluster import cluster_to_join, reachable
from rlinf_vl.runtime.environment import variables_set
from rlinf_vl.runtime.nodes import ElasticNodes, Node, WorkerPlacement, nodes_with

log = logging.getLogger(__name__)

#: Seconds that the head of a cluster to join has to accept a connection.
PROBE_S = 5.0
#: Seconds that each node has to start a worker: a first import of Ray from a shared disk is slow.
WORKER_S = 120.0
#: Environment of actor processes without a GPU. By default glibc returns the memory of each freed
#: activation to the kernel, which clears it for the next one.
#: malloc reads this when a process starts.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**36)}
#: Device files of NVIDIA's and AMD's GPUs.
GPU_FILES = ("/dev/nvidia[0-9]*", "/dev/kfd")
#: Times that a private Ray is started until one is up, and a part of the error that says it was late.
START_ATTEMPTS = 3
STARTED_LATE = "timed out during startup"
#: Seconds that the cluster has to offer the nodes and slots asked for.
PLACEMENT_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Reservation:
    """The slots that the cluster has reserved for a run."""

    device: str
    actor: tuple[dict[str, Any], ...]  #: Ray options of each actor rank
    rollout: tuple[WorkerPlacement, ...]  #: of each rollout worker
    placement: Placement  #: the slots of both
    elastic: ElasticNodes | None = (
        None  #: with `cluster.elastic_rollout`: workers may join and leave
    )


@dataclass(frozen=True, slots=True)
class _RaySettings:
    """The settings that Ray is started with; a run of others needs a new start."""

    ray_address: str | None
    slots: int
    environment: dict[str, str]


@dataclass(frozen=True, slots=True)
class _RunningRay:
    """Ray that was left running for this process' next run (see `ray_cluster`)."""

    settings: _RaySettings
    address: str


_running_ray: _RunningRay | None = None


@contextmanager
def ray_cluster(config: Config, keep: bool = False) -> Iterator[dict[str, Any]]:
    """Join the cluster that `cluster.ray_address` names, or run a private one on this machine while
    the context lasts.

    Yields further Ray options of each actor.

    Args:
        keep: leave Ray running for the next run of this process, unless the block raises. If Ray is
            already running, by the caller's own `ray.init` or left by a run of the same settings,
            it is used as it is, and left running.

    Raises:
        ConfigError: nothing answers at the address of the cluster, several nodes are asked for and
            there is none to join, or its nodes can't run this run's interpreter.
    """
    global _running_ray
    environment = _actor_environment(config.cluster, may_broadcast(config))
    cluster = config.cluster
    settings = _RaySettings(cluster.ray_address, _slots(config), environment)
    present_address = (
        ray.get_runtime_context().gcs_address if keep and ray.is_initialized() else None
    )
    # Ray that runs, but was not started here, is the caller's own: its workers lack the
    # environment.
    if present_address and (_running_ray is None or _running_ray.address != present_address):
        log.info("using the Ray of this process, at %s", present_address)
        yield {"runtime_env": {"env_vars": environment}}
        return
    try:
        if not present_address or _running_ray is None or _running_ray.settings != settings:
            ray.shutdown()
            _start_ray(config, environment)
        yield {}
        _running_ray = (
            _RunningRay(settings, ray.get_runtime_context().gcs_address) if keep else None
        )
    except BaseException:
        _running_ray = None
        raise
    finally:
        if _running_ray is None:
            ray.shutdown()


def _slots(config: Config) -> int:
    """Return the CPUs of a private cluster."""
    return max(os.cpu_count() or 1, slots_named(config))


def _start_ray(config: Config, environment: dict[str, str]) -> None:
    """Connect to a cluster, or start a private one; its workers have `environment`."""
    cluster = config.cluster
    options = {
        "logging_level": logging.WARNING,
        "log_to_driver": True,
        "namespace": f"rlinf_vl-{os.getpid()}",
    }
    # No usage reports, unless the user wants them; and processes that reserve no GPU still see the
    # GPUs.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if not sys.stderr.isatty():
        _keep_colors_out()
    address, node_ip = cluster_to_join(cluster.ray_address, os.environ)
    RayConfig.initialize("")  # Ray read RAY_AUTH_MODE at its import; this reads it again
    if address:
        # Ray itself would wait for minutes.
        if not reachable(address.removeprefix("ray://"), timeout=PROBE_S):
            is_variable = cluster.ray_address == "auto" and "RAY_ADDRESS" in os.environ
            raise ConfigError(
                f"{'the environment variable RAY_ADDRESS' if is_variable else 'cluster.ray_address'}: "
                f"nothing accepts a connection at {address} within {PROBE_S:g} s. If that cluster "
                "has ended, unset it for a private one on this machine, or start one with "
                "ray_utils/start_ray.sh; if it runs, name its head as HOST:PORT"
            )
        log.info("joining the Ray cluster at %s", address)
        runtime_env = {"py_executable": shlex.quote(sys.executable), "env_vars": environment}
        with _explain_versions(address):
            ray.init(address=address, _node_ip_address=node_ip, runtime_env=runtime_env, **options)
        _check_nodes()
    elif cluster.num_nodes > 1:
        raise ConfigError(
            f"cluster.num_nodes: {cluster.num_nodes} machines need a running Ray cluster, and "
            "none that ray_utils/start_ray.sh started runs on this node; start it, or name its "
            "head with cluster.ray_address=HOST:PORT"
        )
    else:
        # All processes of a private cluster inherit it from the first ones.
        with variables_set(environment), _own_sessions():
            _init_private(num_cpus=_slots(config), **options)


def _init_private(**options: Any) -> None:
    """Start a private Ray; on a busy machine more than once.

    A raylet has 30 s to register, which no setting of Ray 2.60 changes. Ray then raises, and leaves
    the processes that it has started until this one ends.
    """
    present_children = set(psutil.Process().children())
    for attempt in range(START_ATTEMPTS):
        try:
            ray.init(address="local", include_dashboard=False, **options)
            return
        except Exception as error:
            left_running = set(psutil.Process().children()) - present_children
            _kill(left_running)
            if STARTED_LATE not in str(error) or attempt + 1 == START_ATTEMPTS:
                raise
            log.warning("Ray did not start within 30 s, as on a busy machine; it is started again")


def _kill(processes: Collection[psutil.Process]) -> None:
    """Kill processes and what they have started, and wait for their end."""
    victims = list(processes)
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            victims += process.children(recursive=True)
    for process in victims:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(victims, timeout=10)


def _keep_colors_out() -> None:
    """Make Ray write the lines of workers without colors, including repeated lines that it only
    counts."""
    os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    if os.environ["RAY_COLOR_PREFIX"] == "0" and hasattr(ray_logging, "_color"):
        ray_logging._color = str  # pyright: ignore[reportPrivateUsage]


@contextmanager
def reserve(
    config: Config, learns: bool = True, options: Mapping[str, Any] | None = None
) -> Iterator[Reservation]:
    """Reserve the slots of every component for as long as the context lasts; those of actor ranks
    only if it `learns`.

    A slot is a GPU (`cluster.device` cuda) or a process's share of the CPUs. Components on one slot
    share its bundle. Each node's bundles are a placement group of their own, meant for that node:
    if others use it, or it is lost, Ray finds them another node.

    Args:
        options: further Ray options of each actor.

    Raises:
        ConfigError: the placement does not fit the cluster.
        RunError: the cluster does not offer the slots within `PLACEMENT_TIMEOUT_S`.
    """
    cluster, device = config.cluster, config.cluster.device
    if device == "auto":
        device = "cuda" if ray.cluster_resources().get("GPU", 0) >= 1 else "cpu"
    kinds = ("CPU", "GPU") if device == "cuda" else ("CPU",)
    nodes = nodes_with(kinds[-1])
    alive_nodes = sum(1 for node in ray.nodes() if node["Alive"])
    if alive_nodes < cluster.num_nodes:
        hint = "wait for them with ray_utils/check_ray.sh, or lower it"
        raise RunError(
            f"cluster.num_nodes: {cluster.num_nodes}, but the cluster has {alive_nodes}; {hint}"
        )
    try:
        placement = placement_of(config, [node.slots for node in nodes])
    except ConfigError as error:
        node_names = ", ".join(
            f"node {number} is {node.address}" for number, node in enumerate(nodes)
        )
        raise ConfigError(*error.problems, *([node_names] if len(nodes) > 1 else [])) from None
    is_elastic = learns and cluster.elastic_rollout
    ranks = [(slot,) for slot in placement.actor] if learns else []
    users = [*ranks, *placement.engines]  # the slots of each actor rank, then of each engine
    # An engine beside several ranks takes its share of its first slot's bundle, and looks up the
    # GPUs of the others (`WorkerPlacement.further_slots`): Ray has no fractions of several GPUs.
    spread_engines = {
        slots
        for slots in placement.engines
        if learns and len(slots) > 1 and not set(slots).isdisjoint(placement.actor)
    }
    # Elastic workers reserve nothing, so that they end with their node instead of moving.
    bundles = sorted(
        {
            bundle
            for slots in (ranks if is_elastic else users)
            for bundle in ([(slot,) for slot in slots] if slots in spread_engines else [slots])
        }
    )
    n_users = Counter(slot for slots in users for slot in slots)
    groups: dict[int, PlacementGroup] = {}  # by node
    try:
        for number, node in enumerate(nodes):
            if node_bundles := [
                slots for slots in bundles if placement.node_of(slots[0]) == number
            ]:
                resources: list[dict[str, float]] = [
                    dict.fromkeys(kinds, float(len(slots))) for slots in node_bundles
                ]
                groups[number] = placement_group(
                    resources, strategy="STRICT_PACK", _soft_target_node_id=node.id
                )
        _wait_for(groups.values(), sum(map(len, bundles)), kinds[-1])
        log.info(
            "who sits where (cluster.component_placement):\n%s",
            placement.map(_addresses(nodes, groups)),
        )

        def options_in(bundle: tuple[int, ...]) -> dict[str, Any]:
            """Return the Ray options of a process with its share of a bundle."""
            number = placement.node_of(bundle[0])
            index = sum(
                1
                for earlier in bundles
                if earlier < bundle and placement.node_of(earlier[0]) == number
            )
            strategy = PlacementGroupSchedulingStrategy(groups[number], index)
            shares = {f"num_{kind.lower()}s": len(bundle) / n_users[bundle[0]] for kind in kinds}
            return {"scheduling_strategy": strategy, **shares, **(options or {})}

        rank_options = tuple(options_in(slots) for slots in ranks)
        elastic = None
        if is_elastic:
            placed_nodes = {nodes[placement.node_of(slots[0])].id for slots in users}
            size = config.rollout.tensor_parallel_size
            elastic = ElasticNodes(kinds, size, options or {}, list(groups.values()), placed_nodes)
            rollout = [
                elastic.place_worker(nodes[placement.node_of(slots[0])].id, len(slots))
                for slots in placement.engines
            ]
        else:
            rollout = []
            for slots in placement.engines:
                shared = learns and not set(slots).isdisjoint(placement.actor)
                first, *further = (
                    [(slot,) for slot in slots] if slots in spread_engines else [slots]
                )
                further_slots = tuple(map(options_in, further)) if device == "cuda" else ()
                rollout.append(
                    WorkerPlacement(options_in(first), len(slots), shared, further_slots)
                )
        yield Reservation(device, rank_options, tuple(rollout), placement, elastic)
    finally:
        for group in groups.values():
            remove_placement_group(group)


def _wait_for(groups: Collection[PlacementGroup], slots: int, kind: str) -> None:
    """Wait until all of these groups have their nodes."""
    deadline = time.monotonic() + PLACEMENT_TIMEOUT_S
    for group in groups:
        if not group.wait(timeout_seconds=max(0.0, deadline - time.monotonic())):
            raise RunError(
                f"cluster.component_placement needs {slots} {kind} slots; the cluster offers "
                f"{ray.cluster_resources().get(kind, 0):g}, of which "
                f"{ray.available_resources().get(kind, 0):g} are free beside those that this run "
                "has got; wait until others' runs have ended, or name fewer slots"
            )


def _addresses(nodes: Sequence[Node], groups: Mapping[int, PlacementGroup]) -> list[str]:
    """Return the address of each node that a placement numbers.

    It is the node on which Ray has put the bundles, another one where the numbered node had no
    room.
    """
    names = [node.address for node in nodes]
    address_by_id = {node.id: node.address for node in nodes}
    for number, group in groups.items():
        actual_id = next(iter(placement_group_table(group)["bundles_to_node_id"].values()))
        if actual_id != nodes[number].id:
            names[number] = (
                f"{address_by_id.get(actual_id, actual_id)}: {names[number]} has no room"
            )
            log.warning("cluster.component_placement: node %d is %s", number, names[number])
    return names


@contextmanager
def _own_sessions() -> Iterator[None]:
    """Give the processes that Ray starts sessions of their own, and with them other process groups.

    Ctrl-C and a scheduler's SIGTERM go to the whole group of this process. They are for the run,
    which saves and then ends Ray in order; with Ray dead it could not. Ray's processes still end
    with this one, killed or not: the kernel kills them (PR_SET_PDEATHSIG), whatever their session.
    """
    popen = services.ConsolePopen
    services.ConsolePopen = partial(popen, start_new_session=True)
    try:
        yield
    finally:
        services.ConsolePopen = popen


def _actor_environment(cluster: ClusterConfig, broadcasts: bool = True) -> dict[str, str]:
    """Return the environment variables of actor processes.

    `broadcasts`: ranks and engines may meet in one process group (`may_broadcast`).
    """
    # SGLang turns both off in its processes unless they are set. The members of a group must agree;
    # by themselves, ranks are quicker with both on.
    group_settings = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE") if broadcasts else ()
    threads = "1"  # beside GPUs, `ray_process.own_process` sets more
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        # Beside a GPU, freed host memory held images and checkpoints: the system should get it back.
        **({} if _on_gpus(cluster) else MALLOC),
        **{name: os.environ.get(name, "0") for name in group_settings},
    }


def _on_gpus(cluster: ClusterConfig) -> bool:
    """Return whether actors will have GPUs: as the config says, or as this machine has any that Ray would find."""
    if cluster.device != "auto":
        return cluster.device == "cuda"
    return os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1") and any(map(glob, GPU_FILES))


@contextmanager
def _explain_versions(address: str) -> Iterator[None]:
    """Turn Ray's error on a cluster of another version into a ConfigError with a hint."""
    try:
        yield
    except RuntimeError as error:
        versions = re.findall(r"Ray: (\S+)\s+Python: (\S+)", str(error))
        if not str(error).startswith("Version mismatch") or len(versions) != 2:
            raise
        (ray_there, python_there), (ray_here, python_here) = versions
        raise ConfigError(
            f"cluster.ray_address: the cluster at {address} was started with Ray {ray_there} on "
            f"Python {python_there}; this run has Ray {ray_here} on Python {python_here} "
            f"({sys.executable}). Start the cluster with the run's Python: "
            f"RLINF_VL_PYTHON={sys.executable} bash ray_utils/start_ray.sh on every node; or the "
            "run with the cluster's"
        ) from None


def _check_nodes() -> None:
    """Start a worker with the run's interpreter on every node, and import this package there.

    Raises:
        ConfigError: names the nodes that can't.
    """

    @ray.remote(num_cpus=0, max_retries=0)
    def start() -> None:  # pickled by value: the node itself reports a missing package
        importlib.import_module("rlinf_vl")

    nodes = {
        start.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(): node
        for node in ray.nodes()
        if node["Alive"]
    }
    done, unanswered = ray.wait(list(nodes), num_returns=len(nodes), timeout=WORKER_S)
    problems = dict.fromkeys(unanswered, f"no worker within {WORKER_S:g} s")
    for ref in done:
        try:
            ray.get(ref)
        except Exception as error:
            problems[ref] = str(error).strip().splitlines()[-1]
    for ref in unanswered:
        ray.cancel(ref, force=True)
    if problems:
        addresses = {ref: nodes[ref]["NodeManagerAddress"] for ref in problems}
        raise ConfigError(
            *(
                f"node {addresses[ref]} can't run {sys.executable}: {reason}"
                for ref, reason in problems.items()
            ),
            "workers run the run's own interpreter: its environment and this checkout must lie at "
            "the same path on every node",
        )
