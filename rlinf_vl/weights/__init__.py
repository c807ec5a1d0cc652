"""How weights travel from the actor to the engines."""

from rlinf_vl.weights.buckets import Bucket, pack, unpack

__all__ = ["Bucket", "pack", "unpack"]
