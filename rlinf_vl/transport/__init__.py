"""How weights travel from the actor to the engines."""

from rlinf_vl.transport.buckets import Bucket, WeightsDiffer, pack, unpack
from rlinf_vl.transport.strategy import Sender, resolve_weight_sync

__all__ = ["Bucket", "Sender", "WeightsDiffer", "pack", "resolve_weight_sync", "unpack"]
