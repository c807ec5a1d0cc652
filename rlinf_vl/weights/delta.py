"""Send only changes of weights: the values whose bits differ from the last sync, and their places.

With the learning rates of reinforcement learning an optimizer step moves most weights by less than
half of a bfloat16's last digit, so that a few percent of the engines' weights change at all
(arXiv:2509.19128, arXiv:2602.03839). Each rank compares its own shard with what it sent last, which
it keeps in host memory: no rank gathers a weight, and traffic grows with the number of changes.

Values are written over those in the engine, never added: weights are equal bit for bit, and
applying a delta twice does no harm. A delta names the version that it changes; an engine that has
another refuses it.
"""

import math
import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch

from rlinf_vl.types import Reference
from rlinf_vl.weights.buckets import WeightsDiffer
from rlinf_vl.weights.object_store import ObjectStoreSender, ObjectStoreStrategy
from rlinf_vl.weights.patch import INTEGERS, Patch
from rlinf_vl.weights.sender import Offer, Snapshot, put
from rlinf_vl.weights.shard import ShardPart
from rlinf_vl.weights.strategy import LoadingEngine

#: Positions within blocks of 2^bits values: bits → (dtype of a position, dtype of the number in a
#: block).
_BLOCKS = {8: (np.uint8, np.uint16), 16: (np.uint16, np.uint32)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """One rank's part of a bucket, as an object in the store.

    Attributes:
        number: of the bucket, which has the same weights on every rank.
        base: the version that it changes; None where it has every value.
        pieces: (name, shape of the weight, index of the first element, elements), end to end.
        encoding: how `positions` gives the elements of `values`: "whole" (all), "mask" (a bit
            each), or, for blocks of 2^8 or 2^16 elements, their positions in the block, with
            the number in each block in `counts`.
        values: the bits, as integers.
    """

    number: int
    base: int | None
    dtype: str
    pieces: tuple[tuple[str, tuple[int, ...], int, int], ...]
    encoding: str | int
    counts: np.ndarray = field(repr=False)
    positions: np.ndarray = field(repr=False)
    values: np.ndarray = field(repr=False)

    @classmethod
    def between(cls, old: torch.Tensor | None, new: torch.Tensor, **fields) -> "Delta":
        """Encode the changes from `old` to `new` in the fewest bytes.

        Both are integers [n] on one device; without `old`, every value is one.
        """
        empty, n, value_bytes = np.empty(0, np.uint8), len(new), new.element_size()
        changed = None if old is None else (old != new).nonzero().squeeze(1)
        bytes_by_encoding: dict[str | int, int] = {"whole": n * value_bytes}
        if changed is not None:
            bytes_by_encoding["mask"] = -(-n // 8) + len(changed) * value_bytes
            for bits, (position, count) in _BLOCKS.items():
                entry_bytes = np.dtype(position).itemsize + value_bytes
                bytes_by_encoding[bits] = (
                    len(changed) * entry_bytes + -(-n // 2**bits) * np.dtype(count).itemsize
                )
        encoding = min(bytes_by_encoding, key=bytes_by_encoding.__getitem__)
        if changed is None or encoding == "whole":
            return cls(
                encoding="whole", counts=empty, positions=empty, values=new.cpu().numpy(), **fields
            )
        values = new[changed].cpu().numpy()
        if isinstance(encoding, str):
            mask = np.zeros(n, bool)
            mask[changed.cpu().numpy()] = True
            return cls(
                encoding=encoding,
                counts=empty,
                positions=np.packbits(mask),
                values=values,
                **fields,
            )
        position, count = _BLOCKS[encoding]
        counts = (
            torch.bincount(changed >> encoding, minlength=-(-n // 2**encoding))
            .cpu()
            .numpy()
            .astype(count)
        )
        positions = (changed & (2**encoding - 1)).to(torch.int32).cpu().numpy().astype(position)
        return cls(encoding=encoding, counts=counts, positions=positions, values=values, **fields)

    @property
    def nbytes(self) -> int:
        return self.counts.nbytes + self.positions.nbytes + self.values.nbytes

    def parts(
        self, device: str
    ) -> Iterator[tuple[str, torch.Size, torch.Tensor | slice, torch.Tensor]]:
        """Yield the changes of each piece that has any.

        Each is (name, shape of the weight, indices, values [k]); indices are int64 [k], or a slice
        of the flat weight.
        """
        values = _on(self.values, device)
        ends = np.cumsum([elements for *_, elements in self.pieces])
        changed = self._changed(device)
        cuts = (
            ends
            if changed is None
            else torch.searchsorted(changed, torch.from_numpy(ends).to(device)).tolist()
        )
        begin = offset = 0
        for (name, shape, start, elements), cut in zip(self.pieces, cuts, strict=True):
            if cut > begin:
                indices = (
                    slice(start, start + elements)
                    if changed is None
                    else changed[begin:cut] + (start - offset)
                )
                yield name, torch.Size(shape), indices, values[begin:cut]
            begin, offset = cut, offset + elements

    def _changed(self, device: str) -> torch.Tensor | None:
        """Return the indices of the changed elements, int64 [k], rising; None: all of them."""
        if self.encoding == "whole":
            return None
        if isinstance(self.encoding, str):
            return torch.from_numpy(np.flatnonzero(np.unpackbits(self.positions))).to(device)
        blocks = torch.arange(len(self.counts), device=device) << self.encoding
        repeats = _on(self.counts.astype(np.int64), device)
        return blocks.repeat_interleave(repeats) + _on(self.positions.astype(np.int32), device)


def patches(deltas: Iterable[Delta], device: str) -> Generator[dict[str, Patch]]:
    """Yield the changes by weight, a bucket at a time, from the deltas of all ranks.

    If nothing changes, one weight is patched with no values: an engine may learn of a version only
    by being written.
    """
    in_order = sorted(deltas, key=lambda delta: delta.number)
    has_changes = False
    for _, bucket in groupby(in_order, key=lambda delta: delta.number):
        by_weight: dict[str, Patch] = {}
        for delta in bucket:
            dtype = getattr(torch, delta.dtype)
            for name, shape, indices, values in delta.parts(device):
                by_weight.setdefault(name, Patch(dtype, shape)).parts.append((indices, values))
        if by_weight:
            has_changes = True
            yield by_weight
    if not has_changes:
        name, shape, *_ = in_order[0].pieces[0]
        yield {name: Patch(getattr(torch, in_order[0].dtype), torch.Size(shape))}


@dataclass
class DeltaSender(ObjectStoreSender):
    """Puts the changes of each rank's shard into the object store.

    The first sync is that of the object store, whole and with fingerprints. Each rank keeps the
    values of its part of each bucket as sent last.
    """

    def __post_init__(self) -> None:
        self._pieces: list[tuple] = []
        self._last: list[torch.Tensor] = []  # integers [n] in host memory, of each bucket

    def make_offer(self, version: int, check: bool) -> Offer:
        base = self.snapshot_version  # before the object store's offer, which sets it
        full_offer = super().make_offer(version, check) if check else None
        self._stored = [] if full_offer is None else self._stored
        labels: list[Reference] = []
        sent_bytes = full_bytes = 0
        for number, (dtype, pieces, new) in enumerate(self._buckets()):
            # False in the first sync, or if the bucket has other weights than before: then every
            # value is sent.
            is_known = number < len(self._last) and self._pieces[number] == (dtype, pieces)
            if full_offer is None:
                old = self._last[number].to(self.device, non_blocking=True) if is_known else None
                delta = Delta.between(
                    old,
                    new,
                    number=number,
                    base=base if is_known else None,
                    dtype=dtype,
                    pieces=pieces,
                )
                sent_bytes, full_bytes = sent_bytes + delta.nbytes, full_bytes + new.nbytes
                labels.append(put(delta))
            self._remember(number, is_known, (dtype, pieces), new)
        if self.device == "cuda":
            torch.cuda.synchronize()  # copied to the host
        self.snapshot_version = version
        return full_offer or Offer(labels, sent_bytes, full_bytes)

    def snapshot(self) -> Snapshot | None:
        snapshot = super().snapshot()
        return snapshot and replace(snapshot, read=patches)

    def snapshot_buckets(self) -> list[Reference]:
        buckets: list[Reference] = []
        for number, ((dtype, pieces), last) in enumerate(
            zip(self._pieces, self._last, strict=True)
        ):
            delta = Delta.between(None, last, number=number, base=None, dtype=dtype, pieces=pieces)
            buckets.append(put(delta))
        return buckets

    def _buckets(self) -> Iterator[tuple[str, tuple, torch.Tensor]]:
        """Yield dtype, pieces and integers [n] of this rank's part of each bucket. Collective.

        Buckets are the same on all ranks.
        """
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

    def _remember(self, number: int, is_known: bool, pieces: tuple, new: torch.Tensor) -> None:
        """Keep the values sent for a bucket, on a GPU always in the same page-locked memory."""
        if self.device == "cpu":
            self._last[number:] = [new, *self._last[number + 1 :]] if is_known else [new]
        else:
            if not is_known:
                self._last[number:] = [torch.empty(new.shape, dtype=new.dtype, pin_memory=True)]
            self._last[number].copy_(new, non_blocking=True)
        if not is_known:
            self._pieces[number:] = [pieces]


def _joined(bucket: Sequence[ShardPart]) -> tuple[str, tuple, torch.Tensor]:
    """Return dtype, pieces and integers [n] of these parts end to end."""
    pieces = tuple((name, tuple(shape), start, len(value)) for name, shape, start, value in bucket)
    flat = torch.cat([value for *_, value in bucket])
    return str(flat.dtype).removeprefix("torch."), pieces, flat.view(INTEGERS[flat.element_size()])


def _on(array: np.ndarray, device: str) -> torch.Tensor:
    """Return the array on the device, on the CPU without a copy."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array).to(device)


class DeltaStrategy(ObjectStoreStrategy):
    """The strategy `delta`."""

    name = "delta"
    sender = DeltaSender
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
