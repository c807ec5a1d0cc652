"""Copies of host arrays to the device that computes, without waiting for it."""

import numpy as np
import torch


def on_device(array: np.ndarray | torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return `array` as a tensor on `device`; on a CPU it shares the array's memory.

    A copy to a GPU from pageable memory waits for all work queued before it. From pinned memory it
    is queued like a kernel; PyTorch frees the pinned block after the copy.
    """
    tensor = array if isinstance(array, torch.Tensor) else torch.from_numpy(array)
    if torch.device(device).type == "cuda" and tensor.is_cpu:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
