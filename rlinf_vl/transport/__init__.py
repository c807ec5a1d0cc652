"""How weights travel from the actor to the engines."""

from rlinf_vl.transport.buckets import Bucket, WeightsDiffer, pack, unpack
from rlinf_vl.transport.strategy import Sender, choose

__all__ = ["Bucket", "Sender", "WeightsDiffer", "choose", "pack", "unpack"]
