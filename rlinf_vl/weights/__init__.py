"""How weights travel from the actor to the engines."""

from rlinf_vl.weights.buckets import Bucket, WeightsDiffer, pack, unpack
from rlinf_vl.weights.strategy import Sender, choose

__all__ = ["Bucket", "Sender", "WeightsDiffer", "choose", "pack", "unpack"]
