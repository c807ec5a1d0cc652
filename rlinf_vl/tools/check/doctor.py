"""`doctor`: compare this machine with the needs of a run, and report what to do.

`machine.look` gathers facts about the machine and changes nothing; `check` judges them, and can be
given another machine's facts. `train` calls both in its own process before it starts Ray: it needs
their imports anyway, a second later.
"""

import argparse
import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from rlinf_vl.config.load import parse_config
from rlinf_vl.config.parts import load_part
from rlinf_vl.config.placement import placement_of, slots_named
from rlinf_vl.config.schema import Config
from rlinf_vl.config.toys import TOYS
from rlinf_vl.config.validate import validate_config
from rlinf_vl.errors import ConfigError
from rlinf_vl.tools.check.findings import Finding, Status, conclude
from rlinf_vl.tools.check.inputs import START_RULES
from rlinf_vl.tools.check.machine import HOOK, TESTED, Machine, look

GIB = 2**30
#: Bytes that a process must be allowed to lock beside an adapter of InfiniBand or RoCE.
MEMLOCK_BYTES = GIB
#: The oldest NVIDIA driver for each major version of CUDA.
DRIVERS = {13: 580, 12: 525}
#: Settings of the environment that hurt a GPU run, and why.
HARMFUL = {
    "CUDA_LAUNCH_BLOCKING=1": "every kernel is waited for",
    "NCCL_P2P_DISABLE=1": "GPUs of one machine exchange through host memory",
    "NCCL_SHM_DISABLE=1": "NCCL goes through the network inside a machine",
    "NCCL_IB_DISABLE=1": "machines exchange over TCP even where there is InfiniBand",
    "PYTORCH_NO_CUDA_MEMORY_CACHING=1": "every allocation waits for the GPU",
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True": "the memory saver refuses it; the run takes it from engines only",
    "PYTORCH_ALLOC_CONF=expandable_segments:True": "the memory saver refuses it; the run takes it from engines only",
}


def line(subject: str, finding: str, problem: object = "", status: Status = "fail") -> Finding:
    """Make a finding: ok, or of `status` with the `problem` after it.

    A false `problem` is none.
    """
    if not problem:
        return Finding("ok", subject, finding)
    return Finding(status, subject, f"{finding}: {problem}")


def main(arguments: argparse.Namespace) -> int:
    """Run `rlinf-vl doctor [CONFIG]`; return 1 if a line fails, otherwise 0."""
    config = parse_config(arguments.config, arguments.overrides) if arguments.config else None
    machine = look(config)
    lines = check(machine, config)
    if config:
        # Joining a cluster that does not answer would wait for its time limit.
        if machine.cluster and machine.cluster_answers:
            lines.append(_join(config))
        try:
            validate_config(config, START_RULES)
        except ConfigError as error:
            lines += [Finding("fail", "config", problem) for problem in error.problems]
    return conclude(lines, render(lines), arguments.json)


def refuse(config: Config) -> None:
    """Raise ConfigError with every line of `check` on this machine that fails.

    Lines about the weights take seconds. They are left out where none can fail: with full weights,
    and a disk with room for them whatever they are.
    """
    machine = look(config)
    has_room = not config.actor.model.is_lora and machine.run_disk >= _most_checkpoint_bytes(
        config.rollout.model.model_path
    )
    lines = check(machine, config, weights=not has_room)
    failed = [f"{line.subject}: {line.text}" for line in lines if line.status == "fail"]
    if failed:
        raise ConfigError(*failed)


def render(lines: Iterable[Finding]) -> str:
    """Return the lines as a Markdown table."""
    rows = [("", "what", "found"), ("---", "---", "---"), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def check(machine: Machine, config: Config | None = None, weights: bool = True) -> list[Finding]:
    """Return the findings about the machine.

    With a `config` they include its processes, and with `weights` those of its model. GPUs are
    judged where the config, or the machine, has them.
    """
    lines = [line for checker in CHECKS for line in checker(machine, config)]
    return lines if config is None else [*lines, *_of_processes(machine, config, weights)]


def _versions(machine: Machine, config: Config | None) -> Iterator[Finding]:
    """Yield findings about the versions of Python and of packages."""
    sglang = config is not None and config.rollout.rollout_backend == "sglang"
    needed = {"torch", "transformers", "ray"} | ({"sglang"} if sglang else set())
    for name, version in {"python": machine.python, **machine.packages}.items():
        if version:
            same = any(re.fullmatch(rf"{re.escape(t)}([.+].*)?", version) for t in TESTED[name])
            yield line(
                name, version, not same and f"not tested; tested: {', '.join(TESTED[name])}", "warn"
            )
        elif name in needed:
            install = f"bash requirements/install.sh{' --sglang' if sglang else ''}"
            yield line(name, "not installed", f"`{install}` makes an environment that has it")
    if machine.moved:
        moved = f"other versions than the environment was made with: {', '.join(machine.moved)}"
        yield line("packages", moved, f"`{machine.restore}` puts them back", "warn")


def _gpus(machine: Machine, config: Config | None) -> Iterator[Finding]:
    """Yield findings about GPUs, CUDA, the driver, and the environment's settings of them."""
    if not _on_gpus(machine, config):
        yield line("GPUs", f"{len(machine.gpus)}, none needed")
        return
    n_gpus, cuda = len(machine.gpus), machine.cuda_major
    missing_libraries = machine.missing_libraries
    # The head of a cluster needs no GPU of its own; what it lacks says nothing about the others.
    status = "warn" if machine.cluster and not n_gpus else "fail"
    finding = (
        f"{n_gpus} of {min(machine.gpus) / GIB:.1f} GiB"
        if n_gpus
        else "none that the driver shows on this machine"
    )
    yield line(
        "GPUs",
        finding,
        not n_gpus and "set cluster.device=cpu, or run where there are some",
        status,
    )
    finding = f"torch for CUDA {cuda}" if cuda else "torch is built without it"
    yield line(
        "CUDA",
        finding,
        not cuda and "install one with it (TORCH_INDEX_URL, see requirements/install.sh)",
        status,
    )
    oldest_driver = DRIVERS.get(cuda or 13, 580)
    is_old = not machine.driver or int(machine.driver.split(".")[0]) < oldest_driver
    hint = f"CUDA {cuda or 13} wants {oldest_driver} or newer; update it"
    yield line("NVIDIA driver", machine.driver or "none loaded", is_old and hint, status)
    if machine.packages["sglang"] and (
        config is None or config.rollout.rollout_backend == "sglang"
    ):
        yield line(
            "SGLang's tools",
            "ninja, a C++ compiler, nvcc",
            "; ".join(machine.missing_tools),
            status,
        )
        why = "libcuda comes with the driver, libcudart with torch's CUDA 13 wheels"
        problem = missing_libraries and f"the loader finds no {', '.join(missing_libraries)}; {why}"
        yield line("memory saver", f"{HOOK} under the engine's environment", problem, status)
    for setting, why in HARMFUL.items():
        name, _, value = setting.partition("=")
        if value.lower() in machine.environment.get(name, "").lower():
            yield line("environment", setting, f"{why}; unset it", "warn")


def _host(machine: Machine, config: Config | None) -> Iterator[Finding]:
    """Yield findings about shared memory, ports, and the cluster to join."""
    # Ray's choice is 30 % of the memory.
    store_bytes = int(0.3 * machine.total_memory)
    finding = f"/dev/shm has {machine.shared_memory / GIB:.1f} GiB free, the object store takes {store_bytes / GIB:.1f}"
    problem = (
        f"Ray would put it on disk; start the container with --shm-size={-(-store_bytes // GIB)}g"
    )
    yield line("shared memory", finding, machine.shared_memory < store_bytes and problem, "warn")
    hint = (
        "widen net.ipv4.ip_local_port_range"
        if machine.ports
        else "none can be bound; look at the network"
    )
    status = "warn" if machine.ports else "fail"
    yield line("ports", f"{machine.ports} to hand out", machine.ports < 2000 and hint, status)
    if machine.cluster:
        cluster_hint = "start it with ray_utils/start_ray.sh, unset RAY_ADDRESS, or set cluster.ray_address=null"
        problem = not machine.cluster_answers and f"nothing answers; {cluster_hint}"
        yield line("cluster", f"Ray at {machine.cluster}", problem)


def _network(machine: Machine, config: Config | None) -> Iterator[Finding]:
    """Yield findings about the transport between machines, for a run on GPUs of several.

    NCCL takes TCP without a word where it can't use InfiniBand or RoCE.
    """
    if config is None or config.cluster.num_nodes == 1 or not _on_gpus(machine, config):
        return
    environment, adapters = machine.environment, ", ".join(machine.adapters)
    if environment.get("NCCL_NET"):
        yield line("network", f"NCCL_NET={environment['NCCL_NET']} chooses the transport")
    elif not adapters:
        interface = environment.get("NCCL_SOCKET_IFNAME", "an interface of NCCL's choice")
        yield line("network", f"TCP by {interface}: no InfiniBand or RoCE adapter")
    elif environment.get("NCCL_IB_DISABLE", "0") != "0":
        yield line("network", f"TCP beside {adapters}, by NCCL_IB_DISABLE")
    else:
        problem = (
            "NCCL can't open them and takes TCP; a container needs --device=/dev/infiniband, and the packages "
            "libibverbs1 and ibverbs-providers"
        )
        finding = f"InfiniBand or RoCE by {environment.get('NCCL_IB_HCA', adapters)}"
        yield line("network", finding, not machine.has_verbs and problem, "warn")
        is_limited = machine.memlock < MEMLOCK_BYTES
        finding = f"{_size(machine.memlock)} a process" if is_limited else "enough for adapters"
        problem = "NCCL registers buffers with the adapter; set ulimit -l unlimited, in a container --ulimit memlock=-1"
        yield line("locked memory", finding, is_limited and problem, "warn")


#: The checks of any machine, with or without a config.
CHECKS = [_versions, _gpus, _host, _network]


def _on_gpus(machine: Machine, config: Config | None) -> bool:
    """Return whether a run would be on GPUs."""
    device = config.cluster.device if config else "auto"
    return device == "cuda" or (device == "auto" and bool(machine.gpus))


def _of_processes(machine: Machine, config: Config, weights: bool) -> Iterator[Finding]:
    """Yield findings that depend on the number of processes, and with `weights` on the model."""
    cuda = config.cluster.device == "cuda" or bool(machine.gpus)
    nodes, slots = config.cluster.num_nodes, max(1, len(machine.gpus) if cuda else machine.cores)
    try:
        if not cuda and not machine.cluster:  # a private cluster on CPUs has as many slots as named
            slots = max(slots, slots_named(config))
        placement = placement_of(config, (slots,) * nodes)
    except ConfigError as error:
        status = "warn" if machine.cluster else "fail"
        yield line("slots", f"{slots * nodes} with cluster.num_nodes {nodes}", error, status)
        return
    ranks, engines = -(-len(placement.actor) // nodes), -(-len(placement.rollout) // nodes)
    finding = f"{machine.cores} for {ranks + engines} actors"
    yield line(
        "cores",
        finding,
        ranks + engines > machine.cores and "actors take turns; take more cores or fewer slots",
        "warn",
    )
    if weights:
        yield from _of_weights(machine, config, ranks, engines)


def _of_weights(machine: Machine, config: Config, ranks: int, engines: int) -> Iterator[Finding]:
    """Yield findings that depend on the model, with `ranks` and `engines` on each machine."""
    from rlinf_vl.models.loading import DTYPES
    from rlinf_vl.models.lora import AdapterError
    from rlinf_vl.tools.check.certificates import not_proven

    nodes = config.cluster.num_nodes
    try:
        model = load_part("model-without-weights")(config)
    except AdapterError as error:
        yield line("adapters", str(config.actor.model.lora.target_modules), error)
        return
    except (ConfigError, ValueError) as error:
        yield line("model", config.rollout.model.model_path, error, "warn")
        return
    model_type = model.family.model_type
    path = "sglang" if config.rollout.rollout_backend == "sglang" else ""
    if reason := not_proven(model_type, path):
        yield line("model", f"{config.rollout.model.model_path}, {model_type}", reason, "warn")
    if model.family.decode_state(model.shape).row_shapes and _on_gpus(machine, config):
        fla_version = machine.packages.get("fla-core")
        hint = "PyTorch's operations take its place, slowly; `python -m pip install 'fla-core>=0.6'` installs it"
        finding = f"fla-core {fla_version}" if fla_version else "fla-core is not installed"
        yield line("gated delta nets", finding, not fla_version and hint, "warn")
    weights, runner = model.weights, config.runner
    # A rank reads its own rows into host memory, an engine the whole model.
    is_hybrid = config.actor.fsdp_config.strategy == "hsdp"
    share = weights.shard(ranks if is_hybrid else ranks * nodes)
    loading_bytes = (
        ranks * model.stored * (weights.total if weights.quantized else share)
        + engines * DTYPES[config.rollout.model.precision].itemsize * weights.total
    )
    finding = (
        f"{machine.total_memory / GIB:.1f} GiB; loading takes {loading_bytes / GIB:.1f} "
        f"(actor ranks {ranks}, engines {engines})"
    )
    problem = (
        loading_bytes > 0.7 * machine.total_memory and "take fewer slots a machine, or more memory"
    )
    # In float32: the weight and AdamW's two moments.
    checkpoint_bytes = 12 * weights.trained
    if not config.actor.model.is_lora:
        checkpoint_bytes += model.stored * (weights.total - weights.trained)
    if runner.async_save and checkpoint_bytes / nodes > 0.5 * machine.total_memory:
        finding += f"; the copy of a checkpoint that is written while training goes on, {checkpoint_bytes / nodes / GIB:.1f}"
        problem = problem or "set runner.async_save=false"
    yield line("memory", finding, problem, "warn")
    yield _disk(machine, config, checkpoint_bytes)
    hint = (
        machine.cache_disk < 2 * weights.total and "set RLINF_VL_CACHE and HF_HOME to a larger disk"
    )
    yield line("cache", f"{_size(machine.cache_disk)} free for the cache", hint, "warn")
    if model.family.vision_tower:
        side = model.family.token_side(model.shape.vision_config.to_dict())
        yield _image_tokens(config, side)


def _disk(machine: Machine, config: Config, checkpoint_bytes: float) -> Finding:
    """Return the finding about the disk of runs and their checkpoints."""
    runner, free = config.runner, _size(machine.run_disk)
    # A new checkpoint is complete before the oldest is deleted.
    n_checkpoints = max(1, runner.keep_last) + runner.keep_best + 1
    finding = f"{free} free for runs, where {n_checkpoints} checkpoints of {_size(checkpoint_bytes)} lie at once"
    hint = (
        "make room, set runner.checkpoint_dir to a larger disk or a URL, or lower runner.keep_last"
    )
    status = "fail" if machine.run_disk < checkpoint_bytes else "warn"
    if "://" in (runner.checkpoint_dir or ""):
        finding, hint = f"{free} free for runs; checkpoints go to {runner.checkpoint_dir}", ""
    is_short = machine.run_disk < n_checkpoints * checkpoint_bytes
    return line("disk", finding, is_short and hint, status)


def _most_checkpoint_bytes(model_path: str) -> float:
    """Return an upper bound of a checkpoint's bytes, for a run that begins with this model.

    All of its weights may be trained. The bound is infinite for a model that isn't on this machine
    as a folder of safetensors.
    """
    if model_path in TOYS:
        return GIB
    folder = Path(model_path)
    stored_bytes = (
        sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else 0
    )
    # A weight takes 12 bytes of a checkpoint, and at least half a byte where it is stored.
    return 2 * 12 * stored_bytes or math.inf


def _image_tokens(config: Config, side: int) -> Finding:
    """Return the finding about tokens of an image: each has side² pixels."""
    data = config.data
    processor_file = Path(config.rollout.model.model_path) / "preprocessor_config.json"
    checkpoint_bound = (
        json.loads(processor_file.read_text()).get("size", {}).get("longest_edge")
        if processor_file.is_file()
        else None
    )
    if not data.image_keys or not (pixels := data.image_max_pixels or checkpoint_bound):
        finding = (
            "data.image_max_pixels is null: the checkpoint's own bound holds"
            if data.image_keys
            else "no images"
        )
        return line("image tokens", finding)
    tokens = pixels // side**2
    finding = f"at most {tokens} an image ({side} × {side} pixels each), of data.max_prompt_length {data.max_prompt_length}"
    hint = "rows with large images are left out; lower data.image_max_pixels"
    return line("image tokens", finding, tokens >= data.max_prompt_length and hint, "warn")


def _join(config: Config) -> Finding:
    """Join the cluster that the run would join, and return the finding about its nodes."""
    import ray

    from rlinf_vl.runtime.launch import ray_cluster

    needed_nodes = config.cluster.num_nodes
    try:
        with ray_cluster(config):
            nodes = sum(node["Alive"] for node in ray.nodes())
            resources = ", ".join(
                f"{ray.cluster_resources().get(kind, 0):g} {kind}s" for kind in ("CPU", "GPU")
            )
    # Ray raises these where the cluster has another version of Ray or Python, for instance.
    except (RuntimeError, ConnectionError, ValueError) as error:
        return line("cluster", "can't be joined", str(error).strip().splitlines()[-1])
    hint = (
        nodes < needed_nodes
        and "start the others with ray_utils/start_ray.sh, or lower cluster.num_nodes"
    )
    return line(
        "cluster", f"machines {nodes} with {resources}, cluster.num_nodes {needed_nodes}", hint
    )


def _size(n: float) -> str:
    """Return bytes as text, such as 64 KiB, 9 MiB or 12.5 GiB."""
    if n >= GIB:
        return f"{n / GIB:.3g} GiB"
    return f"{n / 2**20:.0f} MiB" if n >= 2**20 else f"{n / 2**10:.0f} KiB"
