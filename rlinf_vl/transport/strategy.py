"""The ways that weights can travel, behind one interface, and the choice between them.

A sync is three steps, the same for every way: each actor rank *offers* (all ranks together), which makes labels of the
buckets that every rollout worker is given; while the workers *take* what the labels name, the ranks *deliver*; when all
workers have it, the ranks *release* what they kept for them.

| way | an offer is | delivery is | taken by |
|---|---|---|---|
| object_store | buckets in Ray's object store | – | reading them |
| broadcast | names and shapes | a broadcast from rank 0 in a group with the engines (NCCL; gloo on the CPU) | the engine itself |
| shared_memory | handles of memory on the same GPU (on the CPU: of the same node) | – (on the CPU, filling it) | opening them |
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import ray
import torch

from rlinf_vl.transport.buckets import BUCKET_BYTES, pack

#: Gathers the weights on a device ("cpu", "cuda"): (name, whole value in the engine's dtype). Collective over the ranks.
Gather = Callable[[str], Iterator[tuple[str, torch.Tensor]]]


class Sender(Protocol):
    """On every actor rank."""

    def offer(self, check: bool) -> list[Any]:
        """This rank's labels. Collective. `check`: with fingerprints, that the receivers compare with what they get."""
        ...

    def deliver(self) -> None:
        """Send what was offered, while the receivers take it. Collective."""

    def release(self) -> None:
        """All receivers have the weights: memory that only they needed may go."""

    def spare(self) -> list[ray.ObjectRef]:
        """The weights sent last, as buckets in the object store: for a worker that takes the place of one that died. Of
        the ranks together; one after training has gone on still gets what the others have."""
        ...


class ObjectStoreSender:
    """Buckets in Ray's object store: everywhere, across nodes, and whatever process dies or comes new."""

    def __init__(self, gather: Gather, rank: int, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._gather, self._rank, self._bucket_bytes = gather, rank, bucket_bytes
        self._sent: list[ray.ObjectRef] = []

    def offer(self, check: bool) -> list[ray.ObjectRef]:
        weights = self._gather("cpu")
        self._sent = []
        if self._rank == 0:
            self._sent = [ray.put(bucket) for bucket in pack(weights, self._bucket_bytes, check)]
        for _ in weights:  # every rank takes part in gathering
            pass
        return self._sent

    def deliver(self) -> None:
        """The object store does."""

    def release(self) -> None:
        """They stay, as what is spare; the next offer lets them go."""

    def spare(self) -> list[ray.ObjectRef]:
        return self._sent


def resolve_weight_sync(weight_sync: str, device: str, collocated: bool, beside_actors: bool) -> str:
    """`rollout.weight_sync` with `auto` resolved.

    Args:
        collocated: whether any engine shares a slot with an actor rank.
        beside_actors: whether every engine does, so that an actor rank is on its GPU, or on its node.

    Raises:
        ValueError: a way that can't work there.
    """
    can = {"shared_memory": beside_actors, "broadcast": device == "cuda" and not collocated, "object_store": True}
    if weight_sync == "auto":
        return next(strategy for strategy, works in can.items() if works)
    if device == "cuda" and not can[weight_sync]:
        reason = {
            "broadcast": "NCCL joins no two processes on one GPU, and actor and rollout share some",
            "shared_memory": "CUDA IPC needs an actor rank on the GPU of every engine",
        }[weight_sync]
        raise ValueError(
            f"rollout.weight_sync: {weight_sync} does not go with this cluster.component_placement: {reason}; set auto"
        )
    return weight_sync
