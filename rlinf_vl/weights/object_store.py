"""Send whole weights through Ray's object store.

It works across nodes, and whatever process dies or is new.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from rlinf_vl.types import Reference
from rlinf_vl.weights.buckets import pack
from rlinf_vl.weights.sender import Offer, Sender, Snapshot, put
from rlinf_vl.weights.strategy import Strategy


class ObjectStoreSender(Sender):
    """The sender of whole buckets: rank 0 stores them."""

    _stored: list[Reference]

    def make_offer(self, version: int, check: bool) -> Offer:
        weights, size = iter(self.gather("cpu")), 0
        # The buckets of the last sync are freed before new ones take memory.
        self._stored = []
        if self.rank == 0:
            for bucket in pack(weights, self.bucket_bytes, check):
                size += bucket.nbytes
                self._stored.append(put(bucket))
        for _ in weights:  # gathering is collective, and this ends it on the other ranks
            pass
        self.snapshot_version = version
        return self.full_offer(self._stored, size)

    def snapshot(self) -> Snapshot | None:
        # The buckets are in the store as long as they are the last ones.
        if self.snapshot_version is None:
            return None
        return Snapshot(self.snapshot_version, self._stored)


class ObjectStoreStrategy(Strategy):
    """The strategy `object_store`, which works everywhere."""

    name = "object_store"
    sender = ObjectStoreSender
    through_store = True
    survives_lost_ranks = True

    async def fetch(
        self, labels: Sequence[Any], places: Callable[[], Sequence[str]]
    ) -> Sequence[Any]:
        return await asyncio.gather(*labels)  # buckets, as views of the object store
