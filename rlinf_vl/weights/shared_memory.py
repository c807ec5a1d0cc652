"""Share weights in memory with processes at the same place; only handles travel.

A place is a GPU (CUDA IPC), on the CPU a node (`node_memory`). One rank at each place offers. The
weights pass through a few buckets (`staging`): the workers read one while the next is being
written.
"""

import logging
import os
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayError

from rlinf_vl.weights.buckets import BUCKET_BYTES, Label
from rlinf_vl.weights.node_memory import forget_others, mapped
from rlinf_vl.weights.place import place_of
from rlinf_vl.weights.sender import Sender
from rlinf_vl.weights.staging import BUFFERS, StagedBucket, Staging, read_staged
from rlinf_vl.weights.strategy import Site, Strategy

log = logging.getLogger(__name__)

#: Seconds that a worker waits for the next bucket.
TIMEOUT = 600
#: On the CPU, bytes of a bucket: few enough to be in a processor's cache when workers read it.
SHARED_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle(Label):
    """The label of a bucket in the memory of a node.

    Attributes:
        place: the node.
        where: name and path of the memory, and the bucket's offset in it.
        sync: number of the sync: the bucket is written when the number after it has
            reached this one.
    """

    place: str
    where: Any = field(repr=False)
    sync: int = 0


def at(place: str, handles: Sequence[Handle | StagedBucket]) -> list[Handle | StagedBucket]:
    """Return the handles that can be opened at `place`.

    Raises:
        ValueError: none can.
    """
    handles_here = [handle for handle in handles if handle.place == place]
    if not handles_here:
        sender_places = ", ".join(sorted({handle.place for handle in handles}))
        raise ValueError(
            "rollout.weight_sync: shared_memory, but no actor rank is at the place of this "
            f"rollout worker, {place} (actor ranks: {sender_places}); set broadcast or object_store"
        )
    return handles_here


def opened(handles: Sequence[Handle | StagedBucket]) -> Generator[dict[str, torch.Tensor]]:
    """Yield the weights of each handle, as views of the sender's memory.

    Copy them before asking for the next.

    Raises:
        TimeoutError: weights that were offered do not come.
        WeightsDiffer: the weights have another fingerprint than their handle.
    """
    staged = [handle for handle in handles if isinstance(handle, StagedBucket)]
    on_node = [handle for handle in handles if isinstance(handle, Handle)]
    forget_others({bucket.board[0] for bucket in staged} | {handle.where[0] for handle in on_node})
    yield from read_staged(staged, os.getpid())
    for handle in on_node:
        weights = handle.views(_open(handle))
        handle.verify(weights, "as received")
        yield weights


def _open(handle: Handle) -> torch.Tensor:
    """Return the bytes of a bucket, uint8 [nbytes], once they are written."""
    name, path, offset = handle.where
    size, until = handle.nbytes, time.monotonic() + TIMEOUT
    memory = mapped(name, path)
    while memory.number_at(offset + size) < handle.sync:
        if time.monotonic() > until:
            raise TimeoutError(f"weights that were offered did not come in {TIMEOUT} s")
        time.sleep(1e-4)
    return memory.flat[offset : offset + size]


@dataclass
class SharedMemorySender(Sender):
    """The sender of shared memory: the first rank at each place offers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._place = place_of(self.device)
        self._staging = Staging(self.device)
        if self.device == "cpu":
            self.bucket_bytes = min(self.bucket_bytes, SHARED_BYTES)
        places: list[str] = [""] * self.world_size
        dist.all_gather_object(places, self._place)
        self._offers = self._place not in places[: self.rank]

    def make_labels(self, check: bool) -> Sequence[StagedBucket]:
        labels = super().make_labels(check)
        return self._staging.announce(labels, self._place) if self._offers else []

    def deliver(self, readers: Sequence[ray.ObjectRef] = ()) -> None:
        readers_here = self._readers_here(readers)
        for _, _, bucket in self.buckets():
            if self._offers:
                self._staging.fill(bucket, readers_here)
        if self._offers:
            self._staging.finish(readers_here)
        self.keep_sent()

    def release(self) -> None:
        self._staging.release()

    def _readers_here(self, answers: Sequence[ray.ObjectRef]) -> set[int]:
        """Return the process ids of the workers that read at this place.

        `answers`: the results of their `reads_at`.
        """
        readers = set[int]()
        for answer in answers if self._offers else ():
            try:
                place, pid = ray.get(answer, timeout=TIMEOUT)
            except RayError as error:
                log.warning(
                    "a rollout worker is not waited for in this weight sync: %s",
                    type(error).__name__,
                )
                continue
            if place == self._place:
                readers.add(pid)
        return readers


class SharedMemoryStrategy(Strategy):
    """The strategy `shared_memory`."""

    name = "shared_memory"
    sender = SharedMemorySender

    def obstacle(self, site: Site) -> str:
        if site.device == "cuda" and not site.beside_actors:
            return "CUDA IPC needs an actor rank on the GPU of every engine"
        return ""

    def suits(self, site: Site) -> bool:
        return site.beside_actors

    def sender_peak_bytes(self, largest_weight_bytes: int) -> int:
        # A bucket is made while two are read, each as large as the largest weight.
        return BUCKET_BYTES + BUFFERS * max(BUCKET_BYTES, largest_weight_bytes)

    def waits_for_readers(self, device: str) -> bool:
        return True

    async def fetch(self, labels: Sequence[Any], device: str) -> Sequence[Any]:
        return at(place_of(device), labels)

    def received(self, labels: Sequence[Any], device: str) -> Generator[dict[str, torch.Tensor]]:
        return opened(labels)
