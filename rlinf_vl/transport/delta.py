"""Weights by what changed: the values whose bits differ from those of the sync before, and where they are.

With the learning rates of reinforcement learning an optimizer step moves most weights by less than half of a bfloat16's last
digit, so that a few percent of what engines have changes at all (arXiv:2509.19128, arXiv:2602.03839). Each rank compares its own
shard with what it sent last, which it keeps in host memory: no rank gathers a weight, and what travels grows with what changed.

Values are written over those in the engine, never added: weights are equal bit for bit, and taking a delta twice does no harm.
A delta says from which version on it leads; an engine that has another refuses it.
"""

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import ray
import torch
import torch.distributed as dist

from rlinf_vl.transport.sender import ObjectStoreSender, Offer

#: Of a weight: name, shape, index of the first of these elements in it, elements [n] on their device.
Part = tuple[str, torch.Size, int, torch.Tensor]
#: Integers as wide as a value, so that bits are compared: -0 is not 0, and NaN is NaN.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Positions within blocks of 2^bits values: bits → (their dtype, dtype of the number in each block).
_BLOCKS = {8: (np.uint8, np.uint16), 16: (np.uint16, np.uint32)}


def local_part(name: str, value: torch.Tensor) -> Part:
    """This rank's part of a weight: each element is in the part of exactly one rank. FSDP2 cuts dimension 0."""
    # Imported here: whoever receives needs none of it, nor the second that it takes.
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(value, DTensor):
        return name, value.shape, 0, value.reshape(-1)[: value.numel() if dist.get_rank() == 0 else 0]
    mesh, placements = value.device_mesh, value.placements
    _, (first, *_) = compute_local_shape_and_global_offset(value.shape, mesh, placements)
    copies = (
        where
        for where, placement in zip(mesh.get_coordinate() or (), placements, strict=True)
        if placement.is_replicate()
    )
    local = value.to_local().reshape(-1)
    return name, value.shape, first * math.prod(value.shape[1:]), local[: 0 if any(copies) else len(local)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """One rank's part of a bucket, as an object in the store.

    Attributes:
        number: of the bucket, which has the same weights on every rank.
        base: the version that it changes; None where it has every value.
        pieces: (name, shape of the weight, index of the first element, elements), end to end.
        encoding: how `positions` says which elements `values` has: "whole" (all), "mask" (a bit each), or, for blocks of 2^8 or 2^16
            elements, the number in each block (`counts`) and their places in it.
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
        """What changed from `old` to `new`, integers [n] on one device, in the encoding that takes the fewest bytes."""
        none, n, size = np.empty(0, np.uint8), len(new), new.element_size()
        where = None if old is None else (old != new).nonzero().squeeze(1)
        costs: dict[str | int, int] = {"whole": n * size}
        if where is not None:
            costs["mask"] = -(-n // 8) + len(where) * size
            for bits, (position, count) in _BLOCKS.items():
                own = np.dtype(position).itemsize + size
                costs[bits] = len(where) * own + -(-n // 2**bits) * np.dtype(count).itemsize
        encoding = min(costs, key=costs.__getitem__)
        if where is None or encoding == "whole":
            return cls(encoding="whole", counts=none, positions=none, values=new.cpu().numpy(), **fields)
        values = new[where].cpu().numpy()
        if isinstance(encoding, str):
            mask = np.zeros(n, bool)
            mask[where.cpu().numpy()] = True
            return cls(encoding=encoding, counts=none, positions=np.packbits(mask), values=values, **fields)
        position, count = _BLOCKS[encoding]
        counts = torch.bincount(where >> encoding, minlength=-(-n // 2**encoding)).cpu().numpy().astype(count)
        positions = (where & (2**encoding - 1)).to(torch.int32).cpu().numpy().astype(position)
        return cls(encoding=encoding, counts=counts, positions=positions, values=values, **fields)

    @property
    def nbytes(self) -> int:
        return self.counts.nbytes + self.positions.nbytes + self.values.nbytes

    def parts(self, device: str) -> Iterator[tuple[str, torch.Size, torch.Tensor | slice, torch.Tensor]]:
        """Of each piece with changes: name, shape of the weight, where (int64 [k], or a slice of the flat weight), values [k]."""
        values = _on(self.values, device)
        ends = np.cumsum([elements for *_, elements in self.pieces])
        where = self._where(device)
        cuts = ends if where is None else torch.searchsorted(where, torch.from_numpy(ends).to(device)).tolist()
        begin = offset = 0
        for (name, shape, start, elements), cut in zip(self.pieces, cuts, strict=True):
            if cut > begin:
                own = slice(start, start + elements) if where is None else where[begin:cut] + (start - offset)
                yield name, torch.Size(shape), own, values[begin:cut]
            begin, offset = cut, offset + elements

    def _where(self, device: str) -> torch.Tensor | None:
        """int64 [k], rising; None: everywhere."""
        if self.encoding == "whole":
            return None
        if isinstance(self.encoding, str):
            return torch.from_numpy(np.flatnonzero(np.unpackbits(self.positions))).to(device)
        blocks = torch.arange(len(self.counts), device=device) << self.encoding
        repeats = _on(self.counts.astype(np.int64), device)
        return blocks.repeat_interleave(repeats) + _on(self.positions.astype(np.int32), device)


@dataclass(frozen=True, slots=True)
class Patch:
    """What changes of one weight. `parts`: (where in the flat weight, values as integers)."""

    dtype: torch.dtype
    shape: torch.Size
    parts: list[tuple[torch.Tensor | slice, torch.Tensor]] = field(default_factory=list)

    def apply(self, weight: torch.Tensor) -> None:
        """Write the values into `weight`, contiguous, of this shape and dtype."""
        assert weight.dtype == self.dtype, f"values of {self.dtype} for a weight of {weight.dtype}"
        flat = weight.detach().view(-1).view(_INTEGERS[weight.element_size()])
        for where, values in self.parts:
            flat[where] = values

    def masked(self, device: str) -> torch.Tensor:
        """The values in a weight that is NaN elsewhere."""
        out = torch.full(self.shape, torch.nan, dtype=self.dtype, device=device)
        self.apply(out)
        return out


def patches(deltas: Iterable[Delta], device: str) -> Iterator[dict[str, Patch]]:
    """What changes, by weight, a bucket at a time, from the deltas of all ranks. If nothing does, one weight stays as it is: an
    engine may learn of a version by being written only."""
    in_order = sorted(deltas, key=lambda delta: delta.number)
    some = False
    for _, bucket in groupby(in_order, key=lambda delta: delta.number):
        found: dict[str, Patch] = {}
        for delta in bucket:
            dtype = getattr(torch, delta.dtype)
            for name, shape, where, values in delta.parts(device):
                found.setdefault(name, Patch(dtype, shape)).parts.append((where, values))
        if found:
            some = True
            yield found
    if not some:
        name, shape, *_ = in_order[0].pieces[0]
        yield {name: Patch(getattr(torch, in_order[0].dtype), torch.Size(shape))}


@dataclass
class DeltaSender(ObjectStoreSender):
    """Every rank puts what changed of its shard into the object store. The first sync is that of the object store, whole and with
    fingerprints. `sent`: this rank's part of each bucket as sent last."""

    def __post_init__(self) -> None:
        self._pieces: list[tuple] = []
        self._last: list[torch.Tensor] = []  # integers [n] in host memory, of each bucket

    def make_offer(self, version: int, check: bool) -> Offer:
        base = self.snapshot_version  # before the object store's offer, which sets it
        whole = super().make_offer(version, check) if check else None
        self._stored = [] if whole is None else self._stored
        labels, sent, size = list[ray.ObjectRef](), 0, 0
        for number, (dtype, pieces, new) in enumerate(self._buckets()):
            known = number < len(self._last) and self._pieces[number] == (dtype, pieces)
            if whole is None:
                old = self._last[number].to(self.device, non_blocking=True) if known else None
                fields = {"number": number, "base": base if known else None, "dtype": dtype, "pieces": pieces}
                delta = Delta.between(old, new, **fields)
                sent, size = sent + delta.nbytes, size + new.nbytes
                labels.append(ray.put(delta))
            self._remember(number, known, (dtype, pieces), new)
        if self.device == "cuda":
            torch.cuda.synchronize()  # copied to the host
        self.snapshot_version = version
        return whole or Offer(labels, sent, size)

    def snapshot_buckets(self) -> list[ray.ObjectRef]:
        fields = ({"number": i, "base": None, "dtype": d, "pieces": p} for i, (d, p) in enumerate(self._pieces))
        return [ray.put(Delta.between(None, last, **f)) for f, last in zip(fields, self._last, strict=True)]

    def _buckets(self) -> Iterator[tuple[str, tuple, torch.Tensor]]:
        """dtype, pieces and integers [n] of this rank's part of each bucket; buckets are the same on all ranks. Collective."""
        bucket, size = list[Part](), 0
        for part in self.parts():
            _, shape, _, value = part
            whole = math.prod(shape) * value.element_size()
            if bucket and (size + whole > self.bucket_bytes or bucket[0][3].dtype != value.dtype):
                yield _joined(bucket)
                bucket, size = [], 0
            bucket.append(part)
            size += whole
        if bucket:
            yield _joined(bucket)

    def _remember(self, number: int, known: bool, pieces: tuple, new: torch.Tensor) -> None:
        """On a GPU in page-locked memory, the same every time."""
        if self.device == "cpu":
            self._last[number:] = [new, *self._last[number + 1 :]] if known else [new]
        else:
            if not known:
                self._last[number:] = [torch.empty(new.shape, dtype=new.dtype, pin_memory=True)]
            self._last[number].copy_(new, non_blocking=True)
        if not known:
            self._pieces[number:] = [pieces]


def _joined(bucket: Sequence[Part]) -> tuple[str, tuple, torch.Tensor]:
    pieces = tuple((name, tuple(shape), start, len(value)) for name, shape, start, value in bucket)
    flat = torch.cat([value for *_, value in bucket])
    return str(flat.dtype).removeprefix("torch."), pieces, flat.view(_INTEGERS[flat.element_size()])


def _on(array: np.ndarray, device: str) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array).to(device)
