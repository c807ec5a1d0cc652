"""What every actor rank has to send weights with, and the strategy that works everywhere: Ray's object store.

A sync is three steps, the same for every strategy: the ranks *offer*, all together, and make the labels of the buckets, which
every rollout worker is given; while the workers receive what the labels name, the ranks *deliver*; when all workers have the
weights, the ranks *release* the memory that only this needed.

| strategy | an offer is | delivery is | received by |
|---|---|---|---|
| object_store | buckets in Ray's object store | – | reading them |
| broadcast | names and shapes | a broadcast from rank 0 in a group with the engines (NCCL; gloo on the CPU) | the engine itself |
| shared_memory | handles of memory on the same GPU (on the CPU: of the same node) | – (on the CPU, filling it) | opening them |
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import ray
import torch

from rlinf_vl.transport.buckets import Label, group_by_size, pack


@dataclass
class Sender:
    """One rank's end of a strategy. Making it is collective.

    Attributes:
        gather: gives the weights on a device ("cpu", "cuda"), whole and in the engine's dtype. Collective over the ranks; on
            the device "meta", which has shapes only, any rank alone may ask.
        sent: a copy in host memory of what was sent last, by bucket: training goes on, so the model can't be asked for it.
    """

    gather: Callable[[str], Iterable[tuple[str, torch.Tensor]]]
    rank: int
    world_size: int
    device: str
    bucket_bytes: int
    sent: list[tuple[Label, torch.Tensor]] = field(default_factory=list, init=False)

    def offer(self, check: bool) -> list[Any]:
        """This rank's labels. Collective. `check`: with fingerprints, for the receivers to compare."""
        weights = self.gather(self.device if check else "meta")
        return [Label.of(bucket, check) for bucket in group_by_size(weights, self.bucket_bytes)]

    def deliver(self) -> None:
        """Send what was offered, while the workers receive it. Collective."""

    def release(self) -> None:
        """Drop memory that only the receivers needed; all of them have the weights."""

    def spare(self) -> list[ray.ObjectRef]:
        """The weights sent last, as buckets in the object store, for a worker that replaces a dead one: it gets what the others
        have, even if training has gone on since."""
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

    def offer(self, check: bool) -> list[ray.ObjectRef]:
        weights = iter(self.gather("cpu"))
        self._stored = []  # the last ones go before new ones come
        if self.rank == 0:
            self._stored = [ray.put(bucket) for bucket in pack(weights, self.bucket_bytes, check)]
        for _ in weights:  # every rank takes part in gathering
            pass
        return self._stored

    def spare(self) -> list[ray.ObjectRef]:
        return self._stored
