"""The GPUs of this machine, asked without taking memory of them."""

import ctypes
import os

from rlinf_vl.config import Config
from rlinf_vl.runtime.cluster import cluster_to_join


def is_private(config: Config) -> bool:
    """Whether the run starts Ray on this machine alone, so that what is here is what it will have."""
    return config.cluster.num_nodes == 1 and cluster_to_join(config.cluster.ray_address, dict(os.environ))[0] is None


def gpu_memory() -> tuple[int, ...] | None:
    """Bytes of each GPU that Ray would find on this machine: NVML's, within CUDA_VISIBLE_DEVICES. None where there may be others'
    (ROCm). torch would take memory of each GPU to tell, for as long as this process lives."""
    if os.path.exists("/dev/kfd"):
        return None
    count, handle, memory = ctypes.c_uint(0), ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()  # total, free, used
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return ()
    except OSError:
        return ()
    there, visible = count.value, os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        there = min(there, sum(one.strip() not in ("", "-1", "NoDevFiles") for one in visible.split(",")))
    sizes = []
    for i in range(there):
        nvml.nvmlDeviceGetHandleByIndex_v2(i, ctypes.byref(handle))
        nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        sizes.append(memory[0])
    return tuple(sizes)
