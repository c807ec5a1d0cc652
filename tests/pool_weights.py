"""Weights for a pool of rollout workers without ranks."""

from collections.abc import Iterable

import ray
import torch

from rlinf_vl.rollout.pool.pool import RolloutPool
from rlinf_vl.weights.buckets import pack
from rlinf_vl.weights.object_store import ObjectStoreStrategy
from rlinf_vl.weights.sender import Offer, Snapshot


def load_weights(
    pool: RolloutPool, weights: Iterable[tuple[str, torch.Tensor]], version: int
) -> None:
    """Load weights into every live worker, and into those that start later."""
    buckets = [ray.put(bucket) for bucket in pack(weights)]
    offers = [ray.put(Offer(buckets))]
    pending = pool.take_weights(
        ObjectStoreStrategy(), offers, version, lambda: Snapshot(version, buckets)
    )
    pool.settle(pending)
