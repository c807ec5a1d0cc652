"""Changes of weights, as one rank sends them: values, and their places in the weights."""

import warnings
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch

from rlinf_vl.weights.patch import Patch

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
        bytes_by_encoding: dict[str | int, int] = {"whole": n * value_bytes}
        is_changed = None if old is None else old != new
        if is_changed is not None:
            # The number of changes says which encoding is the smallest. Their places are found
            # only where they are sent: in float32 nearly all values change.
            n_changed = int(is_changed.count_nonzero())
            bytes_by_encoding["mask"] = -(-n // 8) + n_changed * value_bytes
            for bits, (position, count) in _BLOCKS.items():
                entry_bytes = np.dtype(position).itemsize + value_bytes
                bytes_by_encoding[bits] = (
                    n_changed * entry_bytes + -(-n // 2**bits) * np.dtype(count).itemsize
                )
        encoding = min(bytes_by_encoding, key=bytes_by_encoding.__getitem__)
        if is_changed is None or encoding == "whole":
            return cls(
                encoding="whole", counts=empty, positions=empty, values=new.cpu().numpy(), **fields
            )
        changed = is_changed.nonzero().squeeze(1)
        values = new[changed].cpu().numpy()
        if isinstance(encoding, str):
            return cls(
                encoding=encoding,
                counts=empty,
                positions=np.packbits(is_changed.cpu().numpy()),
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


def _on(array: np.ndarray, device: str) -> torch.Tensor:
    """Return the array on the device, on the CPU without a copy."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array).to(device)
