"""The base of all senders of weights: one rank's end of a sync.

A sync is three steps, the same for every strategy: the ranks *offer*, all together, and make the
labels of the buckets, which every rollout worker is given; while the workers receive what the
labels name, the ranks *deliver*; when all workers have the weights, the ranks *release* the memory
that only this needed. The controller queues all of it at once.

| strategy | an offer is | delivery is | received by |
|---|---|---|---|
| object_store | buckets in Ray's object store | – | reading them |
| delta | changes of each rank's shard, in the object store | – | writing them over (`delta`) |
| broadcast | names and shapes | a broadcast of rank 0 (NCCL; gloo on the CPU) | the engine itself |
| shared_memory | handles of memory at the same place | filling it | opening them |

A place is a GPU, or on the CPU a node (`shared_memory`).
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rlinf_vl.types import Reference
from rlinf_vl.weights.buckets import Label, group_by_size, read_buckets
from rlinf_vl.weights.changes import patches
from rlinf_vl.weights.patch import Patch
from rlinf_vl.weights.rank_copy import RankCopy


def put(value: Any) -> Reference:
    """Put a value into Ray's object store."""
    import ray  # a run without Ray imports this module, too

    return ray.put(value)


@dataclass(frozen=True, slots=True)
class Offer:
    """One rank's part of a sync.

    Attributes:
        labels: of its buckets.
        sent_bytes: bytes that an engine takes of this rank.
        full_bytes: bytes that it would take if nothing were left out.
        seconds: time that the rank took to make the offer.
    """

    labels: Sequence[Any]
    sent_bytes: int = 0
    full_bytes: int = 0
    seconds: float = 0.0

    @staticmethod
    def metrics(offers: Sequence["Offer"], load_seconds: Sequence[float]) -> dict[str, float]:
        """Return the metrics of a sync.

        `offers`: of all ranks; `load_seconds`: for which each engine was being written.
        """
        sent_bytes = sum(offer.sent_bytes for offer in offers)
        full_bytes = sum(offer.full_bytes for offer in offers)
        return {
            "sync/bytes": sent_bytes,
            "sync/bytes_share": sent_bytes / max(1, full_bytes),
            "sync/offer_seconds": max(offer.seconds for offer in offers),
            "sync/load_seconds": max(load_seconds, default=0.0),
        }


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All weights in the object store, for a worker that starts.

    Attributes:
        buckets: references to objects in the store.
        read: yields the weights of these objects, for a device.
    """

    version: int
    buckets: Sequence[Reference]
    read: Callable[[Sequence[Any], str], Iterable[Mapping[str, torch.Tensor | Patch]]] = (
        read_buckets
    )

    @staticmethod
    def merged(parts: Sequence["Snapshot | None"]) -> "Snapshot | None":
        """Join the parts of all ranks; None if a rank has none, or their versions differ."""
        present = [part for part in parts if part is not None]
        if len(present) < len(parts) or len({part.version for part in present}) != 1:
            return None
        return replace(present[0], buckets=[bucket for part in present for bucket in part.buckets])


@dataclass
class Sender:
    """One rank's end of a strategy. Making it is collective.

    Attributes:
        gather: gives the weights on a device ("cpu", "cuda"), whole and in the engine's dtype.
            Collective over the ranks; on the device "meta", which has shapes only, any rank alone
            may ask.
        parts: gives this rank's part of each (`shard.ShardPart`), in the engine's
            dtype. Collective.
        copy: this rank's part of the weights sent last, in host memory.
        offered_version: version of the weights offered last.
        snapshot_version: version of the weights that `snapshot` gives, None while it has none.
    """

    gather: Callable[[str], Iterable[tuple[str, torch.Tensor]]]
    parts: Callable[[], Iterable[tuple[str, torch.Size, int, torch.Tensor]]]
    rank: int
    world_size: int
    device: str
    bucket_bytes: int
    copy: RankCopy = field(init=False)
    offered_version: int | None = field(default=None, init=False)
    snapshot_version: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.copy = RankCopy(self.parts, self.device, self.bucket_bytes)

    def offer(self, version: int, check: bool) -> Offer:
        """Make this rank's part of the sync that brings this version. Collective.

        `check`: with fingerprints, for the receivers to compare.
        """
        start = time.perf_counter()
        self.offered_version = version
        offer = self.make_offer(version, check)
        return replace(offer, seconds=time.perf_counter() - start)

    def make_offer(self, version: int, check: bool) -> Offer:
        """Make the offer of `offer`, but for its seconds."""
        labels = self.make_labels(check)
        return self.full_offer(labels, sum(label.nbytes for label in labels))

    def make_labels(self, check: bool) -> Sequence[Label]:
        """Return the labels of this rank's buckets."""
        # Names and shapes need no gathering, and fingerprints need values.
        weights = self.gather(self.device if check else "meta")
        return [Label.of(bucket, check) for bucket in group_by_size(weights, self.bucket_bytes)]

    def full_offer(self, labels: Sequence[Any], nbytes: int) -> Offer:
        """Return an offer of all weights.

        Its bytes count on rank 0 only: other ranks offer the same weights, to other engines.
        """
        nbytes = nbytes if self.rank == 0 else 0
        return Offer(labels, nbytes, nbytes)

    def deliver(self, readers: Sequence[Reference] = ()) -> None:
        """Send the offered weights, while the workers receive them. Collective.

        `readers`: the results of each worker's `reads_at`, for a strategy that waits for them.
        """

    def release(self) -> None:
        """Drop memory that only the receivers needed; all of them have the weights."""

    def keep_sent(self) -> None:
        """Copy this rank's part of the offered weights, for workers that start. Collective.

        A sender calls it at the end of `deliver`.
        """
        self.copy.keep_all()
        self.snapshot_version = self.offered_version

    def snapshot(self) -> Snapshot | None:
        """Return this rank's part of the weights sent last, for a worker that starts.

        They are buckets in the object store: the worker gets the weights of the other workers, even
        if training has gone on since. None before the first sync.
        """
        if self.snapshot_version is None:
            return None
        buckets = [put(delta) for delta in self.copy.deltas()]
        return Snapshot(self.snapshot_version, buckets, patches)

    def buckets(self) -> Iterator[tuple[int, Label, list[tuple[str, torch.Tensor]]]]:
        """Yield number, label and weights of each bucket.

        Collective: every rank must come to the end.
        """
        for i, bucket in enumerate(group_by_size(self.gather(self.device), self.bucket_bytes)):
            yield i, Label.of(bucket), bucket
