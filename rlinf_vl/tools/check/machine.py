"""Facts about this machine that decide whether a run can start on it."""

import ctypes
import math
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from rlinf_vl.config.schema import Config
from rlinf_vl.data.cache import cache_root
from rlinf_vl.engines.sglang.machine import cuda_environment, missing_tools
from rlinf_vl.runtime.cluster import cluster_to_join, reachable
from rlinf_vl.runtime.gpus import gpu_memory
from rlinf_vl.tools.check.packages import (
    STAMP,
    installed_version,
    moved_packages,
    torchvision_command,
)

#: Versions that the tests have run with, on CPUs. Others may work.
TESTED: dict[str, tuple[str, ...]] = {
    "python": ("3.11",),
    "torch": ("2.13.0", "2.14.1"),
    "transformers": ("5.19.0", "5.23.0"),
    "ray": ("2.60.0",),
    "sglang": ("0.5.23",),
    "torch_memory_saver": ("0.0.10",),
    "fla-core": ("0.6.0",),
    "verifiers": ("0.1.14", "0.3.1"),
    "openenv": ("0.10.0",),
    "miniwob": ("1.1.0",),
}
#: Library that is preloaded into SGLang's scheduler where it gives its memory back.
HOOK = "torch_memory_saver_hook_mode_preload_cu13.abi3.so"
#: The folders of the adapters that the kernel knows, and of the devices by which a process opens them.
ADAPTERS, VERBS = Path("/sys/class/infiniband"), Path("/dev/infiniband")


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts about a machine. Memory and disk are in bytes, free unless a name says otherwise."""

    python: str
    packages: dict[str, str | None]
    cuda_major: int | None  # of the CUDA that torch was built with
    driver: str | None
    gpus: tuple[int, ...]  # memory of each
    missing_tools: tuple[str, ...]
    #: Libraries that the loader does not find for `HOOK` in the engine's environment.
    missing_libraries: tuple[str, ...]
    total_memory: int
    cores: int
    shared_memory: int
    run_disk: int  # of the disk that runs are written to
    cache_disk: int
    ports: int  # in the range that the system hands out; 0 where none can be bound
    environment: dict[str, str]
    cluster: str = ""  # address of the Ray cluster that a run would join; "": a private one
    cluster_answers: bool = True
    moved: tuple[str, ...] = ()  # packages with another version than the environment was made with
    restore: str = ""  # the command that puts them back
    adapters: tuple[str, ...] = ()  # of InfiniBand or RoCE, as the kernel lists them
    has_verbs: bool = False  # whether this process can open them
    memlock: float = math.inf  # bytes that a process may lock


def look(config: Config | None = None) -> Machine:
    """Return the facts of this machine, as a run of `config` would find them.

    It takes about a second beside the import of torch.
    """
    import torch

    stamp = Path(sys.prefix) / STAMP
    address = None
    if config and config.cluster.backend == "ray":
        address = cluster_to_join(config.cluster.ray_address, dict(os.environ))[0]
    sglang = config is None or config.rollout.rollout_backend == "sglang"
    driver, cuda = Path("/proc/driver/nvidia/version"), torch.version.cuda
    version_match = (
        re.search(r"\b\d{3,}\.[\d.]+\b", driver.read_text()) if driver.exists() else None
    )
    return Machine(
        python=".".join(map(str, sys.version_info[:3])),
        packages={name: installed_version(name) for name in TESTED if name != "python"},
        cuda_major=int(cuda.split(".")[0]) if cuda else None,
        driver=version_match[0] if version_match else None,
        gpus=gpu_memory() or (),
        missing_tools=tuple(missing_tools()) if sglang else (),
        missing_libraries=_missing_libraries() if sglang else (),
        total_memory=psutil.virtual_memory().total,
        cores=len(os.sched_getaffinity(0)),
        shared_memory=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0,
        run_disk=_free(_checkpoint_disk(config) if config else Path(".")),
        cache_disk=_free(cache_root()),
        ports=_ports(),
        environment=dict(os.environ),
        cluster=address or "",
        cluster_answers=address is None or reachable(address, timeout=5),
        moved=tuple(map(str, moved_packages(stamp))),
        adapters=tuple(sorted(path.name for path in ADAPTERS.glob("*"))),
        has_verbs=_has_verbs(),
        memlock=_memlock(),
        restore=f"bash requirements/install.sh --venv {sys.prefix}"
        if stamp.is_file()
        else torchvision_command(),
    )


def _checkpoint_disk(config: Config) -> Path:
    """Return the folder on whose disk checkpoints are written.

    Where they go to a store, it is that of the run's other files.
    """
    checkpoint_dir = config.runner.checkpoint_dir
    return Path(
        checkpoint_dir
        if checkpoint_dir and "://" not in checkpoint_dir
        else config.runner.output_dir
    )


def _missing_libraries() -> tuple[str, ...]:
    """Return the libraries that `ldd` misses for `HOOK` in the engine's environment.

    If `HOOK` itself is not installed, return its name.
    """
    library = next((path for folder in sys.path if (path := Path(folder) / HOOK).is_file()), None)
    if library is None:
        return (HOOK,)
    if shutil.which("ldd") is None:
        return ()
    environment = os.environ | cuda_environment(shared_gpu=True)
    output = subprocess.run(
        ["ldd", library], capture_output=True, text=True, env=environment
    ).stdout
    return tuple(re.findall(r"(\S+) => not found", output))


def _free(path: Path) -> int:
    """Return the free bytes of the disk that the path is, or would be, on."""
    path = path.expanduser().absolute()
    return shutil.disk_usage(
        next(folder for folder in (path, *path.parents) if folder.exists())
    ).free


def _has_verbs() -> bool:
    """Return whether a process can open adapters of InfiniBand or RoCE, as NCCL does."""
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return False
    return any(VERBS.glob("uverbs*"))


def _memlock() -> float:
    """Return the bytes that a process may lock."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return math.inf if limit == resource.RLIM_INFINITY else limit


def _ports() -> int:
    """Return how many ports the system can hand out; 0 where none can be bound."""
    range_file = Path("/proc/sys/net/ipv4/ip_local_port_range")
    try:
        with socket.socket() as s:
            s.bind(("", 0))
    except OSError:
        return 0
    low, high = 32768, 60999  # Linux's default
    if os.access(range_file, os.R_OK):
        low, high = map(int, range_file.read_text().split())
    return high - low + 1
