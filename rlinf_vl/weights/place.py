"""The places of a process: its GPUs, or on the CPU its node. Only processes of one place share memory."""

import torch


def places_of(device: str, n_gpus: int) -> tuple[str, ...]:
    """Return the place of each of this process's first `n_gpus` GPUs; on the CPU that of its node.

    A process opens memory of its own places only. `device`: "cpu" or "cuda".
    """
    if device == "cuda":
        # Reading a GPU's properties takes no memory of it.
        return tuple(f"GPU {torch.cuda.get_device_properties(gpu).uuid}" for gpu in range(n_gpus))
    import ray  # SGLang's processes import this room without it

    return (f"node {ray.get_runtime_context().get_node_id()}",)
