"""Read the GPUs of this machine without taking memory of them."""

import ctypes
import os

from rlinf_vl.config import Config
from rlinf_vl.runtime.cluster import cluster_to_join


def is_private(config: Config) -> bool:
    """Return whether the run starts Ray on this machine alone, and so has this machine's GPUs."""
    return (
        config.cluster.num_nodes == 1
        and cluster_to_join(config.cluster.ray_address, dict(os.environ))[0] is None
    )


def gpu_memory() -> tuple[int, ...] | None:
    """Return the bytes of each GPU that Ray would find on this machine.

    They are NVML's, within CUDA_VISIBLE_DEVICES: torch would take memory of each GPU to find them,
    for as long as this process lives. None where there may be GPUs that NVML does not know (ROCm).
    """
    if os.path.exists("/dev/kfd"):
        return None
    return tuple(total for total, _ in _memory())


def used_gpu_memory() -> tuple[int, ...]:
    """Return the bytes of each GPU of `gpu_memory` that are used, by whichever process."""
    return tuple(used for _, used in _memory())


def _memory() -> list[tuple[int, int]]:
    """Return (total, used) bytes of each GPU."""
    count, handle = ctypes.c_uint(0), ctypes.c_void_p()
    memory = (ctypes.c_ulonglong * 3)()  # total, free, used
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return []
    except OSError:
        return []
    n_gpus, visible = count.value, os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        n_gpus = min(
            n_gpus, sum(name.strip() not in ("", "-1", "NoDevFiles") for name in visible.split(","))
        )
    sizes = []
    for i in range(n_gpus):
        nvml.nvmlDeviceGetHandleByIndex_v2(i, ctypes.byref(handle))
        nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        sizes.append((memory[0], memory[2]))
    return sizes
