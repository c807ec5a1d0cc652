"""Host arrays to the device that computes, without waiting for it."""

import numpy as np
import torch


def on_device(array: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """`array` as a tensor on `device`; on a CPU it shares the array's memory.

    A copy from pageable memory to a GPU waits until the GPU has done all that was asked of it before. From pinned memory it
    is queued like a kernel; PyTorch keeps the pinned block until the copy is done.
    """
    tensor = torch.from_numpy(array)
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
