"""The place of a process: its GPU, or on the CPU its node. Only processes of one place share memory."""

import ray
import torch


def place_of(device: str) -> str:
    """Return the place of this process: a process opens memory of its own place only.

    `device`: "cpu" or "cuda".
    """
    if device == "cuda":
        return f"GPU {torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    return f"node {ray.get_runtime_context().get_node_id()}"
