"""Send only changes of weights: the values whose bits differ from the last sync, and their places.

With the learning rates of reinforcement learning an optimizer step moves most weights by less than
half of a bfloat16's last digit, so that a few percent of the engines' weights change at all
(arXiv:2509.19128, arXiv:2602.03839). Each rank compares its own shard with what it sent last, which
it keeps in host memory: no rank gathers a weight, and traffic grows with the number of changes.

Values are written over those in the engine, never added: weights are equal bit for bit, and
applying a delta twice does no harm. A delta names the version that it changes; an engine that has
another refuses it.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlinf_vl.types import Reference
from rlinf_vl.weights.buckets import WeightsDiffer
from rlinf_vl.weights.changes import Delta, patches
from rlinf_vl.weights.object_store import ObjectStoreSender, ObjectStoreStrategy
from rlinf_vl.weights.patch import Patch
from rlinf_vl.weights.sender import Offer, Sender, Snapshot, put
from rlinf_vl.weights.strategy import LoadingEngine


@dataclass
class DeltaSender(ObjectStoreSender):
    """Puts the changes of each rank's shard into the object store.

    The first sync is that of the object store, whole and with fingerprints. Changes are those
    since `Sender.copy`.
    """

    def make_offer(self, version: int, check: bool) -> Offer:
        base = self.snapshot_version  # before the object store's offer, which sets it
        full_offer = super().make_offer(version, check) if check else None
        self._stored = [] if full_offer is None else self._stored
        labels: list[Reference] = []
        sent_bytes = full_bytes = 0
        for number, bucket in enumerate(self.copy.buckets()):
            if full_offer is None:
                # None in the first sync, or if the bucket has other weights than before: then
                # every value is sent.
                old = self.copy.kept(number, bucket)
                delta = Delta.between(
                    None if old is None else old.to(self.device, non_blocking=True),
                    bucket.values,
                    number=number,
                    base=None if old is None else base,
                    dtype=bucket.dtype,
                    pieces=bucket.pieces,
                )
                sent_bytes += delta.nbytes
                full_bytes += bucket.values.nbytes
                labels.append(put(delta))
            self.copy.keep(number, bucket)
        self.copy.wait()
        self.snapshot_version = version
        return full_offer or Offer(labels, sent_bytes, full_bytes)

    def snapshot(self) -> Snapshot | None:
        # The buckets of the first sync are dropped by the second one.
        return Sender.snapshot(self)


class DeltaStrategy(ObjectStoreStrategy):
    """The strategy `delta`."""

    name = "delta"
    sender = DeltaSender
    forwards_labels = True
    sends_changes = True
    survives_lost_ranks = False

    def received(
        self, labels: Sequence[Any], device: str
    ) -> Generator[Mapping[str, torch.Tensor | Patch]]:
        # The first sync has whole buckets.
        is_delta = bool(labels) and isinstance(labels[0], Delta)
        return patches(labels, device) if is_delta else super().received(labels, device)

    def load(self, engine: LoadingEngine, labels: Sequence[Any], version: int, device: str) -> None:
        # Changes applied to other weights than those they were computed from would corrupt them.
        for label in labels:
            if isinstance(label, Delta) and label.base not in (None, engine.version):
                raise WeightsDiffer(
                    f"weights of version {version} as changes of version {label.base}, but the "
                    f"engine has version {engine.version}"
                )
        super().load(engine, labels, version, device)
