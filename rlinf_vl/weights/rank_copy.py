"""A rank's copy of its own part of the weights that were sent last.

Training goes on after a sync, so that the model can't be asked for them any more. All ranks
together keep the weights once, in the engines' dtype.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rlinf_vl.weights.changes import Delta
from rlinf_vl.weights.patch import INTEGERS
from rlinf_vl.weights.shard import ShardPart


class PartBucket(NamedTuple):
    """This rank's part of some weights; buckets are the same on all ranks.

    Attributes:
        dtype: as in torch.
        pieces: those of a `Delta`.
        values: the bits, as integers [n], on the rank's device or in host memory.
    """

    dtype: str
    pieces: tuple[tuple[str, tuple[int, ...], int, int], ...]
    values: torch.Tensor


@dataclass
class RankCopy:
    """The copy, by bucket, page-locked beside a GPU and in the same memory in every sync.

    Attributes:
        parts: gives this rank's part of each weight. Collective.
        device: of the rank.
        bucket_bytes: size of the buckets, over all ranks.
    """

    parts: Callable[[], Iterable[ShardPart]]
    device: str
    bucket_bytes: int

    def __post_init__(self) -> None:
        self._copied_buckets: list[PartBucket] = []

    @property
    def nbytes(self) -> int:
        return sum(bucket.values.nbytes for bucket in self._copied_buckets)

    def buckets(self) -> Iterator[PartBucket]:
        """Yield the buckets of the current weights. Collective; every rank must come to the end."""
        bucket, bucket_bytes = list[ShardPart](), 0
        for part in self.parts():
            _, shape, _, value = part
            weight_bytes = math.prod(shape) * value.element_size()
            if bucket and (
                bucket_bytes + weight_bytes > self.bucket_bytes or bucket[0][3].dtype != value.dtype
            ):
                yield _joined(bucket)
                bucket, bucket_bytes = [], 0
            bucket.append(part)
            bucket_bytes += weight_bytes
        if bucket:
            yield _joined(bucket)

    def kept(self, number: int, bucket: PartBucket) -> torch.Tensor | None:
        """Return the copied values of bucket number `number`, in host memory.

        None if it was not copied yet, or had other weights.
        """
        is_kept = (
            number < len(self._copied_buckets) and self._copied_buckets[number][:2] == bucket[:2]
        )
        return self._copied_buckets[number].values if is_kept else None

    def keep(self, number: int, bucket: PartBucket) -> None:
        """Copy a bucket over the copy before. `wait` returns when it is done."""
        memory = self.kept(number, bucket)
        if self.device == "cpu":  # the bucket's own memory
            memory = bucket.values
        elif memory is None:
            memory = torch.empty(bucket.values.shape, dtype=bucket.values.dtype, pin_memory=True)
        is_new = self.kept(number, bucket) is None
        # Buckets behind one that is new are other ones, too.
        self._copied_buckets[number : None if is_new else number + 1] = [
            bucket._replace(values=memory)
        ]
        if self.device == "cuda":
            memory.copy_(bucket.values, non_blocking=True)

    def keep_all(self) -> None:
        """Copy the current weights. Collective."""
        for number, bucket in enumerate(self.buckets()):
            self.keep(number, bucket)
        self.wait()

    def wait(self) -> None:
        """Return when all copies are in host memory."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def deltas(self) -> Iterator[Delta]:
        """Yield the copy as changes that have every value, one for each bucket."""
        for number, (dtype, pieces, values) in enumerate(self._copied_buckets):
            yield Delta.between(None, values, number=number, base=None, dtype=dtype, pieces=pieces)


def _joined(bucket: Sequence[ShardPart]) -> PartBucket:
    """Return these parts end to end."""
    pieces = tuple((name, tuple(shape), start, len(value)) for name, shape, start, value in bucket)
    flat = torch.cat([value for *_, value in bucket])
    integers = flat.view(INTEGERS[flat.element_size()])
    return PartBucket(str(flat.dtype).removeprefix("torch."), pieces, integers)
