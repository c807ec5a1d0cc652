"""`doctor`: what this machine has, what a config would need, and what to do about the difference.

`look` gathers facts about the machine and changes nothing; `check` judges them, and can be given another machine's facts.
`train` calls both in its own process before it starts Ray: what they import it needs anyway, a second later.
"""

import argparse
import ctypes
import importlib.metadata
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from rlinf_vl.config import Config
from rlinf_vl.config.load import parse_config
from rlinf_vl.config.placement import placement_of, slots_named
from rlinf_vl.config.validate import validate_config
from rlinf_vl.data.cache import cache_root
from rlinf_vl.errors import ConfigError
from rlinf_vl.preflight.inputs import gpu_count, packages_missing, problems_here
from rlinf_vl.runtime.cluster import cluster_to_join, reachable

GIB = 2**30
#: Versions that the tests have run with, on CPUs. Others may work.
TESTED: dict[str, tuple[str, ...]] = {
    "python": ("3.11",),
    "torch": ("2.13.0", "2.14.1"),
    "transformers": ("5.19.0", "5.23.0"),
    "ray": ("2.60.0",),
    "sglang": ("0.5.23",),
    "torch_memory_saver": ("0.0.10",),
}
#: The oldest NVIDIA driver for each major version of CUDA.
DRIVERS = {13: 580, 12: 525}
#: Library that SGLang's scheduler is started under where it gives its memory back.
HOOK = "torch_memory_saver_hook_mode_preload_cu13.abi3.so"
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


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts about a machine. Memory and disk in bytes, free where a name does not say otherwise."""

    python: str
    packages: dict[str, str | None]
    #: Of the CUDA that torch was built with; None for a torch without.
    cuda_major: int | None
    driver: str | None
    #: Memory of each.
    gpus: tuple[int, ...]
    missing_tools: tuple[str, ...]
    #: What the loader misses for `HOOK` under the engine's environment.
    missing_libraries: tuple[str, ...]
    total_memory: int
    cores: int
    shared_memory: int
    #: Where runs are written, and where the cache is.
    run_disk: int
    cache_disk: int
    #: In the range that the system hands out; 0 where none can be bound.
    ports: int
    environment: dict[str, str]
    #: Address of the Ray cluster that a run would join ("": a private one), and whether something answers there.
    cluster: str = ""
    cluster_answers: bool = True


@dataclass(frozen=True, slots=True)
class Line:
    """A finding: `status` ok, warn or fail; where it is not ok, `said` has the way out."""

    status: str
    subject: str
    said: str


class Findings(list[Line]):
    """Lines as they are found."""

    def add(self, subject: str, said: str, problem: object = "", status: str = "fail") -> None:
        """`said`, which is ok but for a `problem` (anything false is none) of this status."""
        self.append(Line(status, subject, f"{said}: {problem}") if problem else Line("ok", subject, said))


def look(config: Config | None = None) -> Machine:
    """The facts of this machine, as a run of `config` would meet them. About a second beside the import of torch."""
    import torch

    from rlinf_vl.engines.sglang.cuda import missing_tools

    address = cluster_to_join(config.cluster.ray_address, dict(os.environ))[0] if config else None
    sglang = config is None or config.rollout.rollout_backend == "sglang"
    return Machine(
        python=".".join(map(str, sys.version_info[:3])),
        packages={name: _version(name) for name in TESTED if name != "python"},
        cuda_major=int(torch.version.cuda.split(".")[0]) if torch.version.cuda else None,
        driver=_driver(),
        gpus=_gpu_memory(),
        missing_tools=tuple(missing_tools()) if sglang else (),
        missing_libraries=_missing_libraries() if sglang else (),
        total_memory=psutil.virtual_memory().total,
        cores=len(os.sched_getaffinity(0)),
        shared_memory=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0,
        run_disk=_free(Path(config.runner.output_dir if config else ".")),
        cache_disk=_free(cache_root()),
        ports=_ports(),
        environment=dict(os.environ),
        cluster=address or "",
        cluster_answers=address is None or reachable(address, timeout=5),
    )


def check(machine: Machine, config: Config | None = None) -> Findings:
    """What is to be said of the machine, for `config` if there is one; of GPUs where the config, or the machine, has them."""
    device = config.cluster.device if config else "auto"
    sglang = config.rollout.rollout_backend == "sglang" if config else machine.packages["sglang"] is not None
    found = Findings()
    _versions(found, machine, sglang)
    if device == "cuda" or (device == "auto" and machine.gpus):
        _gpus(found, machine, sglang)
    else:
        found.add("GPUs", f"{len(machine.gpus)}, none needed")
    _host(found, machine, config.cluster.object_store_memory if config else None)
    if config:
        _wanted(found, machine, config, device == "cuda" or bool(machine.gpus))
    return found


def refuse(config: Config) -> None:
    """Raise ConfigError with every line of `check` on this machine that fails."""
    failed = [f"{line.subject}: {line.said}" for line in check(look(config), config) if line.status == "fail"]
    if failed:
        raise ConfigError(*failed)


def render(lines: list[Line]) -> str:
    """A Markdown table."""
    rows = [("", "what", "found"), ("---", "---", "---"), *((x.status, x.subject, x.said) for x in lines)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main(arguments: argparse.Namespace) -> int:
    """`python -m rlinf_vl doctor [CONFIG]`: exit code 0 unless a line fails, then 1."""
    config = parse_config(arguments.config, arguments.overrides) if arguments.config else None
    machine = look(config)
    found = check(machine, config)
    if config:
        if machine.cluster and machine.cluster_answers:
            _cluster(found, config)
        try:
            validate_config(config, (packages_missing, problems_here))
        except ConfigError as error:
            found += [Line("fail", "config", problem) for problem in error.problems]
    sys.stdout.write(render(found))
    return int(any(line.status == "fail" for line in found))


# --- what is judged ---------------------------------------------------------------------------------------------------


def _versions(found: Findings, machine: Machine, sglang: bool) -> None:
    needed = ["python", "torch", "transformers", "ray", *(["sglang"] if sglang else [])]
    for name, tested in TESTED.items():
        version = machine.python if name == "python" else machine.packages[name]
        if version:
            same = any(re.fullmatch(rf"{re.escape(t)}([.+].*)?", version) for t in tested)
            found.add(name, version, not same and f"not tested; tested: {', '.join(tested)}", "warn")
        elif name in needed:
            flag = " --sglang" if sglang else ""
            found.add(name, "not installed", f"`bash requirements/install.sh{flag}` makes an environment that has it")


def _gpus(found: Findings, machine: Machine, sglang: bool) -> None:
    here = len(machine.gpus)
    # The head of a cluster needs no GPU of its own; what it lacks says nothing about the others.
    status = "warn" if machine.cluster and not here else "fail"
    said = f"{here} of {min(machine.gpus) / GIB:.1f} GiB" if here else "none that the driver shows on this machine"
    found.add("GPUs", said, not here and "set cluster.device=cpu, or run where there are some", status)
    cuda, driver = machine.cuda_major, machine.driver or "none loaded"
    found.add("CUDA", f"torch for CUDA {cuda}" if cuda else "torch is built without it", not cuda and (
        "install one with it (TORCH_INDEX_URL, see requirements/install.sh)"), status)  # fmt: skip
    least = DRIVERS.get(cuda or 13, 580)
    old = not machine.driver or int(machine.driver.split(".")[0]) < least
    found.add("NVIDIA driver", driver, old and f"CUDA {cuda or 13} wants {least} or newer; update it", status)
    if sglang and machine.packages["sglang"]:
        missing = machine.missing_libraries
        found.add("SGLang's tools", "ninja, a C++ compiler, nvcc", "; ".join(machine.missing_tools), status)
        found.add("memory saver", f"{HOOK} under the engine's environment", missing and (
            f"the loader finds no {', '.join(missing)}; libcuda comes with the driver, libcudart with torch's CUDA 13 wheels"
        ), status)  # fmt: skip
    for setting, why in HARMFUL.items():
        name, _, value = setting.partition("=")
        if value.lower() in machine.environment.get(name, "").lower():
            found.add("environment", setting, f"{why}; unset it", "warn")


def _host(found: Findings, machine: Machine, object_store: int | None) -> None:
    wanted = object_store or int(0.3 * machine.total_memory)  # Ray's own choice
    said = f"/dev/shm has {machine.shared_memory / GIB:.1f} GiB free, the object store takes {wanted / GIB:.1f}"
    problem = f"Ray would put it on disk; start the container with --shm-size={-(-wanted // GIB)}g, or lower it"
    found.add("shared memory", said, machine.shared_memory < wanted and problem, "warn")
    few = "none can be bound; look at the network" if not machine.ports else "widen net.ipv4.ip_local_port_range"
    found.add(
        "ports", f"{machine.ports} to hand out", machine.ports < 2000 and few, "warn" if machine.ports else "fail"
    )
    if machine.cluster:
        way_out = (
            "nothing answers; start it with ray_utils/start_ray.sh, unset RAY_ADDRESS, or set cluster.ray_address=null"
        )
        found.add("cluster", f"Ray at {machine.cluster}", not machine.cluster_answers and way_out)


def _wanted(found: Findings, machine: Machine, config: Config, cuda: bool) -> None:
    """What depends on the model and on how many processes there are."""
    from rlinf_vl.models.loading import DTYPES
    from rlinf_vl.preflight.ledger import Model

    nodes, slots = config.cluster.num_nodes, max(1, len(machine.gpus) if cuda else machine.cores)
    try:
        if not cuda and not machine.cluster:  # a private cluster of processes has as many as are asked for
            slots = max(slots, slots_named(config.cluster.component_placement))
        placed = placement_of(config.cluster.component_placement, slots * nodes)
    except ConfigError as error:
        found.add(
            "slots", f"{slots * nodes} with cluster.num_nodes {nodes}", error, "warn" if machine.cluster else "fail"
        )
        return
    ranks, engines = (-(-len(slots) // nodes) for slots in (placed.actor, placed.rollout))
    threads = (ranks + engines) * (config.cluster.cpu_threads or 1)
    said = f"{machine.cores} for {ranks + engines} actors and {threads} of their threads (cluster.cpu_threads)"
    found.add("cores", said, threads > machine.cores and "actors take turns; take more cores or fewer slots", "warn")
    try:
        model = Model(config)
    except (ConfigError, ValueError) as error:
        found.add("model", config.rollout.model.model_path, error, "warn")
        return
    weights, kept = model.weights, max(1, config.runner.keep_last) + 1  # a new one is whole before the oldest goes
    loading = (ranks * 4 + engines * DTYPES[config.rollout.model.precision].itemsize) * weights.total
    said = f"{machine.total_memory / GIB:.1f} GiB; loading takes {loading / GIB:.1f} (actor ranks {ranks}, engines {engines})"
    found.add(
        "memory", said, loading > 0.7 * machine.total_memory and "take fewer slots a machine, or more memory", "warn"
    )
    size = 4 * weights.total + 8 * weights.trained
    said = f"{_size(machine.run_disk)} free for runs, where {kept} checkpoints of {_size(size)} lie at once"
    way_out = "make room, set runner.output_dir to a larger disk, or lower runner.keep_last"
    status = "fail" if machine.run_disk < size else "warn"
    found.add("disk", said, machine.run_disk < kept * size and way_out, status)
    model_size, cached = 2 * weights.total, f"{_size(machine.cache_disk)} free for the cache"
    found.add(
        "cache", cached, machine.cache_disk < model_size and "set RLINF_VL_CACHE and HF_HOME to a larger disk", "warn"
    )
    found.append(_image_tokens(config, model.shape.vision_config))


def _image_tokens(config: Config, vision) -> Line:
    """By arithmetic: a merged token is (patch · merge)² pixels."""
    data, side = config.data, vision.patch_size * vision.spatial_merge_size
    written = Path(config.rollout.model.model_path) / "preprocessor_config.json"
    own = json.loads(written.read_text()).get("size", {}).get("longest_edge") if written.is_file() else None
    if not data.image_keys or not (pixels := data.image_max_pixels or own):
        said = "data.image_max_pixels is null: the checkpoint's own bound holds" if data.image_keys else "no images"
        return Line("ok", "image tokens", said)
    said = f"at most {pixels // side**2} an image ({side} × {side} pixels each), of data.max_prompt_length"
    if pixels // side**2 < data.max_prompt_length:
        return Line("ok", "image tokens", f"{said} {data.max_prompt_length}")
    way_out = "rows with large images are left out; lower data.image_max_pixels"
    return Line("warn", "image tokens", f"{said} {data.max_prompt_length}: {way_out}")


def _cluster(found: Findings, config: Config) -> None:
    """Join the cluster that the run would join, and count."""
    import ray

    from rlinf_vl.runtime.launch import ray_cluster

    wanted = config.cluster.num_nodes
    try:
        with ray_cluster(config):
            nodes = sum(node["Alive"] for node in ray.nodes())
            has = ", ".join(f"{ray.cluster_resources().get(kind, 0):g} {kind}s" for kind in ("CPU", "GPU"))
    except (RuntimeError, ConnectionError, ValueError) as error:  # of another version of Ray or Python, say
        found.add("cluster", "can't be joined", str(error).strip().splitlines()[-1])
    else:
        missing = nodes < wanted and "start the others with ray_utils/start_ray.sh, or lower cluster.num_nodes"
        found.add("cluster", f"machines {nodes} with {has}, cluster.num_nodes {wanted}", missing)


# --- what is looked at ------------------------------------------------------------------------------------------------


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """Version of the NVIDIA driver that the kernel has loaded."""
    loaded = Path("/proc/driver/nvidia/version")
    version = re.search(r"\b\d{3,}\.[\d.]+\b", loaded.read_text()) if loaded.exists() else None
    return version[0] if version else None


def _gpu_memory() -> tuple[int, ...]:
    """By NVML: torch would take memory of each GPU to tell, for as long as this process lives."""
    if not (count := gpu_count()):
        return ()
    nvml, handle, memory = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()
    nvml.nvmlInit_v2()
    sizes = []
    for i in range(count):
        nvml.nvmlDeviceGetHandleByIndex_v2(i, ctypes.byref(handle))
        nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))  # total, free, used
        sizes.append(memory[0])
    return tuple(sizes)


def _missing_libraries() -> tuple[str, ...]:
    """What `ldd` misses for the memory saver's library as the engine's processes would load it, or the library itself."""
    from rlinf_vl.engines.sglang.cuda import cuda_environment

    library = next((path for folder in sys.path if (path := Path(folder) / HOOK).is_file()), None)
    if library is None:
        return (HOOK,)
    if shutil.which("ldd") is None:
        return ()
    environment = os.environ | cuda_environment(shared_gpu=True)
    said = subprocess.run(["ldd", library], capture_output=True, text=True, env=environment).stdout
    return tuple(re.findall(r"(\S+) => not found", said))


def _size(n: float) -> str:
    """Bytes as people write them, such as 9 MiB or 12.5 GiB."""
    return f"{n / GIB:.3g} GiB" if n >= GIB else f"{n / 2**20:.0f} MiB"


def _free(path: Path) -> int:
    """Bytes on the disk that the path is, or would be, on."""
    path = path.expanduser().absolute()
    return shutil.disk_usage(next(folder for folder in (path, *path.parents) if folder.exists())).free


def _ports() -> int:
    written = Path("/proc/sys/net/ipv4/ip_local_port_range")
    try:
        with socket.socket() as s:
            s.bind(("", 0))
    except OSError:
        return 0
    low, high = map(int, written.read_text().split()) if os.access(written, os.R_OK) else (32768, 60999)  # Linux's own
    return high - low + 1
