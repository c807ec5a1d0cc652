"""Share weights in memory with processes at the same place; only handles travel.

A place is a GPU (CUDA IPC), on the CPU a node (`node_memory`). One rank at each place offers. The
weights pass through a few buckets (`staging`): the workers read one while the next is being
written.
"""

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayError

from rlinf_vl.weights.buckets import BUCKET_BYTES
from rlinf_vl.weights.place import places_of
from rlinf_vl.weights.sender import Sender
from rlinf_vl.weights.staging import BUFFERS, TIMEOUT, StagedBucket, Staging, at, opened
from rlinf_vl.weights.strategy import Site, Strategy

log = logging.getLogger(__name__)

#: On the CPU, bytes of a bucket: few enough to be in a processor's cache when workers read it.
SHARED_BYTES = 8 * 2**20


@dataclass
class SharedMemorySender(Sender):
    """The sender of shared memory: the first rank at each place offers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        (self._place,) = places_of(self.device, 1)
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
                places, pid = ray.get(answer, timeout=TIMEOUT)
            except RayError as error:
                log.warning(
                    "a rollout worker is not waited for in this weight sync: %s",
                    type(error).__name__,
                )
                continue
            if self._place in places:
                readers.add(pid)
        return readers


class SharedMemoryStrategy(Strategy):
    """The strategy `shared_memory`."""

    name = "shared_memory"
    sender = SharedMemorySender
    forwards_labels = True

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

    async def fetch(
        self, labels: Sequence[Any], places: Callable[[], Sequence[str]]
    ) -> Sequence[Any]:
        return [label for place in dict.fromkeys(places()) for label in at(place, labels)]

    def received(self, labels: Sequence[Any], device: str) -> Generator[dict[str, torch.Tensor]]:
        return opened(labels)
