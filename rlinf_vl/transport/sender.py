"""What every actor rank has to send weights with, and the strategy that works everywhere: Ray's object store.

A sync is three steps, the same for every strategy: the ranks *offer*, all together, and make the labels of the buckets, which
every rollout worker is given; while the workers receive what the labels name, the ranks *deliver*; when all workers have the
weights, the ranks *release* the memory that only this needed. The controller queues all of it at once.

| strategy | an offer is | delivery is | received by |
|---|---|---|---|
| object_store | buckets in Ray's object store | – | reading them |
| delta | what changed of each rank's shard, in Ray's object store | – | reading and writing it over (`delta`) |
| broadcast | names and shapes | a broadcast from rank 0 in a group with the engines (NCCL; gloo on the CPU) | the engine itself |
| shared_memory | handles of memory on the same GPU (on the CPU: the same node) | filling it (on a GPU: `staging`) | opening them |
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
import torch

from rlinf_vl.transport.buckets import Label, group_by_size, pack


@dataclass(frozen=True, slots=True)
class Offer:
    """One rank's part of a sync.

    Attributes:
        labels: of its buckets.
        sent: bytes that an engine takes of this rank; `whole`: as many if nothing were left out.
        seconds: that the rank took to make it.
    """

    labels: Sequence[Any]
    sent: int = 0
    whole: int = 0
    seconds: float = 0.0

    @staticmethod
    def metrics(offers: Sequence["Offer"], load_seconds: Sequence[float]) -> dict[str, float]:
        """Of a sync: the offers of all ranks, and the seconds for which each engine was being written."""
        sent, whole = sum(offer.sent for offer in offers), sum(offer.whole for offer in offers)
        return {
            "sync/bytes": sent,
            "sync/bytes_share": sent / max(1, whole),
            "sync/offer_seconds": max(offer.seconds for offer in offers),
            "sync/load_seconds": max(load_seconds, default=0.0),
        }


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Weights as buckets in the object store, whole, and their version."""

    version: int
    buckets: Sequence[ray.ObjectRef]

    @staticmethod
    def merged(parts: Sequence["Snapshot | None"]) -> "Snapshot | None":
        """Join the parts of all ranks; None where these are of several versions, or a rank has none."""
        present = [part for part in parts if part is not None]
        if len(present) < len(parts) or len({part.version for part in present}) != 1:
            return None
        return Snapshot(present[0].version, [bucket for part in present for bucket in part.buckets])


@dataclass
class Sender:
    """One rank's end of a strategy. Making it is collective.

    Attributes:
        gather: gives the weights on a device ("cpu", "cuda"), whole and in the engine's dtype. Collective over the ranks; on
            the device "meta", which has shapes only, any rank alone may ask.
        parts: gives this rank's part of each (`rlinf_vl.transport.delta.Part`), in the engine's dtype. Collective.
        sent: a copy in host memory of what was sent last, by bucket: training goes on, so the model can't be asked for it.
        offered: version of the weights offered last; `snapshot_version`: of those that `snapshot` gives, None while it has none.
    """

    gather: Callable[[str], Iterable[tuple[str, torch.Tensor]]]
    parts: Callable[[], Iterable[tuple[str, torch.Size, int, torch.Tensor]]]
    rank: int
    world_size: int
    device: str
    bucket_bytes: int
    sent: list[tuple[Label, torch.Tensor]] = field(default_factory=list, init=False)
    offered: int | None = field(default=None, init=False)
    snapshot_version: int | None = field(default=None, init=False)

    def offer(self, version: int, check: bool) -> Offer:
        """This rank's part of the sync that brings this version. Collective. `check`: with fingerprints, for the receivers to
        compare."""
        start = time.perf_counter()
        self.offered = version
        offer = self.make_offer(version, check)
        return replace(offer, seconds=time.perf_counter() - start)

    def make_offer(self, version: int, check: bool) -> Offer:
        labels = self.make_labels(check)
        return self.whole(labels, sum(label.nbytes for label in labels))

    def make_labels(self, check: bool) -> Sequence[Label]:
        weights = self.gather(self.device if check else "meta")
        return [Label.of(bucket, check) for bucket in group_by_size(weights, self.bucket_bytes)]

    def whole(self, labels: Sequence[Any], nbytes: int) -> Offer:
        """An offer of all weights. What any rank but the first offers is the same, for other engines."""
        nbytes = nbytes if self.rank == 0 else 0
        return Offer(labels, nbytes, nbytes)

    def deliver(self, readers: Sequence[ray.ObjectRef] = ()) -> None:
        """Send what was offered, while the workers receive it. Collective. `readers`: what `reads_at` of each worker returns, for a
        strategy that waits for them."""

    def release(self) -> None:
        """Drop memory that only the receivers needed; all of them have the weights."""

    def snapshot(self) -> Snapshot | None:
        """Return this rank's part of the weights sent last, as buckets in the object store, for a worker that starts: it gets what
        the others have, even if training has gone on since. None before the first sync."""
        if self.snapshot_version is None:
            return None
        return Snapshot(self.snapshot_version, self.snapshot_buckets())

    def snapshot_buckets(self) -> list[ray.ObjectRef]:
        """Put this rank's part of the weights sent last into the object store."""
        if self.rank:
            return []
        weights = (weight for label, flat in self.sent for weight in label.views(flat).items())
        return [ray.put(bucket) for bucket in pack(weights, self.bucket_bytes)]

    def buckets(self) -> Iterator[tuple[int, Label, list[tuple[str, torch.Tensor]]]]:
        """The weights by bucket: its number, label and weights. Collective: every rank must come to the end."""
        for i, bucket in enumerate(group_by_size(self.gather(self.device), self.bucket_bytes)):
            yield i, Label.of(bucket), bucket

    def copy_of(self, i: int, label: Label) -> torch.Tensor:
        """uint8 [bytes] in `sent` for the bucket sent as number `i`. It is the same memory in every sync, page-locked beside a
        GPU: a copy into pageable memory takes ten times as long, and locking longer than either."""
        if i == len(self.sent) or self.sent[i][0].entries != label.entries:
            flat = torch.empty(label.nbytes, dtype=torch.uint8, pin_memory=self.device == "cuda")
            self.sent[i:] = [(label, flat)]
        return self.sent[i][1]


class ObjectStoreSender(Sender):
    """Buckets in Ray's object store: across nodes, and whatever process dies or comes new."""

    _stored: list[ray.ObjectRef]

    def make_offer(self, version: int, check: bool) -> Offer:
        weights, size = iter(self.gather("cpu")), 0
        self._stored = []  # the last ones go before new ones come
        if self.rank == 0:
            for bucket in pack(weights, self.bucket_bytes, check):
                size += bucket.nbytes
                self._stored.append(ray.put(bucket))
        for _ in weights:  # every rank takes part in gathering
            pass
        self.snapshot_version = version
        return self.whole(self._stored, size)

    def snapshot_buckets(self) -> list[ray.ObjectRef]:
        return self._stored
