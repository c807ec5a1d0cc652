"""The strategies of `rollout.weight_sync`: the choice among them, their senders and receivers.

`sender` explains the steps of a sync.
"""

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch

from rlinf_vl.transport import shared_memory
from rlinf_vl.transport.broadcast import BroadcastSender
from rlinf_vl.transport.buckets import unpack
from rlinf_vl.transport.delta import Delta, DeltaSender, Patch, patches
from rlinf_vl.transport.sender import ObjectStoreSender, Sender

SENDERS: dict[str, type[Sender]] = {
    "object_store": ObjectStoreSender,
    "delta": DeltaSender,
    "broadcast": BroadcastSender,
    "shared_memory": shared_memory.SharedMemorySender,
}

#: Strategies whose labels are references to objects in Ray's object store.
STORED = ("object_store", "delta")


def resolve_weight_sync(
    weight_sync: str, device: str, collocated: bool, beside_actors: bool
) -> str:
    """Return `rollout.weight_sync` with `auto` resolved.

    Args:
        collocated: whether any engine shares a slot with an actor rank.
        beside_actors: whether every engine does, so that an actor rank is on its GPU, or its node.

    Raises:
        ValueError: the strategy can't work there.
    """
    broadcast = device == "cuda" and not collocated
    # In order of preference: `auto` is the first that works.
    availability = {
        "shared_memory": beside_actors,
        "broadcast": broadcast,
        "delta": True,
        "object_store": True,
    }
    if weight_sync == "auto":
        return next(strategy for strategy, works in availability.items() if works)
    if device == "cuda" and not availability[weight_sync]:
        reason = {
            "broadcast": "NCCL joins no two processes on one GPU, and actor and rollout share some",
            "shared_memory": "CUDA IPC needs an actor rank on the GPU of every engine",
        }[weight_sync]
        raise ValueError(
            f"rollout.weight_sync: {weight_sync} does not go with this "
            f"cluster.component_placement: {reason}; set auto"
        )
    return weight_sync


def received(
    strategy: str, labels: Sequence[Any], device: str
) -> Generator[Mapping[str, torch.Tensor | Patch]]:
    """Yield the weights of each label, or their changes, as views to be copied.

    Labels are the stored objects with delta and object_store, handles with shared_memory.

    Args:
        device: the device on which changes are unpacked.

    Raises:
        WeightsDiffer: the received weights have another fingerprint than their label.
    """
    if labels and isinstance(labels[0], Delta):
        yield from patches(labels, device)
        return
    weights = shared_memory.opened(labels) if strategy == "shared_memory" else map(unpack, labels)
    for label, bucket in zip(labels, weights, strict=True):
        label.verify(bucket, "as received")
        yield bucket
