"""A rank's part of a weight, of which each element is sent by exactly one rank."""

import math

import torch
import torch.distributed as dist

#: The weight's name and shape, index of the part's first element, and the part's elements [n] on
#: their device.
ShardPart = tuple[str, torch.Size, int, torch.Tensor]


def local_part(name: str, value: torch.Tensor) -> ShardPart:
    """Return this rank's part of a weight; each element is in the part of exactly one rank.

    FSDP2 cuts dimension 0.
    """
    # Imported here: receivers need none of it, nor the second that it takes.
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    # Every rank has this weight whole: rank 0 sends it.
    if not isinstance(value, DTensor):
        return (
            name,
            value.shape,
            0,
            value.reshape(-1)[: value.numel() if dist.get_rank() == 0 else 0],
        )
    mesh, placements = value.device_mesh, value.placements
    _, (first, *_) = compute_local_shape_and_global_offset(value.shape, mesh, placements)
    # Of ranks with the same shard, the one at coordinate 0 of the replicating dimensions sends it.
    replica_coordinates = (
        coordinate
        for coordinate, placement in zip(mesh.get_coordinate() or (), placements, strict=True)
        if placement.is_replicate()
    )
    local = value.to_local().reshape(-1)
    sent_elements = local[: 0 if any(replica_coordinates) else len(local)]
    return name, value.shape, first * math.prod(value.shape[1:]), sent_elements
