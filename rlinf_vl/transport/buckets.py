"""Weights as bytes, and the check that they arrived.

Everything that sends weights sends buckets: some weights as bytes, with a list of what they are. In a broadcast and in
shared memory they lie end to end; through Ray's object store each is an array of its own, copied there once and read in
place.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

#: Bytes after which a bucket is sent.
BUCKET_BYTES = 256 * 2**20

#: (name, dtype name as in torch, shape) of a weight.
Entry = tuple[str, str, tuple[int, ...]]

#: Words of eight bytes that `fingerprint` looks at together: few enough to stay in a processor's cache.
FINGERPRINT_WORDS = 2**16


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some weights. `entries`: what they are; `data`: uint8 [bytes] of each, which may be the weight's own memory."""

    entries: tuple[Entry, ...]
    data: tuple[np.ndarray, ...] = field(repr=False)
    fingerprint: int | None = None
    """`fingerprint` of the weights, where the receiver is to check it."""


class Labelled(Protocol):
    """What is known of a bucket, however its bytes travel."""

    @property
    def entries(self) -> tuple[Entry, ...]:
        """(name, dtype, shape) of each weight in it."""
        ...

    @property
    def fingerprint(self) -> int | None:
        """`fingerprint` of the weights, where the receiver is to check it."""
        ...


class WeightsDiffer(RuntimeError):
    """Weights that arrived, or that an engine holds, are not those that were sent."""


def group_by_size(
    weights: Iterable[tuple[str, torch.Tensor]], max_bytes: int = BUCKET_BYTES
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Weights in order, a bucket's worth at a time. A bucket exceeds `max_bytes` only where one weight alone does."""
    held: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, value in weights:
        if held and size + value.nbytes > max_bytes:
            yield held
            held, size = [], 0
        held.append((name, value))
        size += value.nbytes
    if held:
        yield held


def entries_of(weights: Iterable[tuple[str, torch.Tensor]]) -> tuple[Entry, ...]:
    """(name, dtype, shape) of each, in order."""
    return tuple((name, str(value.dtype).removeprefix("torch."), tuple(value.shape)) for name, value in weights)


def nbytes(entries: Iterable[Entry]) -> int:
    """Bytes of a bucket with these entries."""
    return sum(_nbytes(entry) for entry in entries)


def flatten(weights: Sequence[tuple[str, torch.Tensor]], out: torch.Tensor | None = None) -> torch.Tensor:
    """Weights end to end as uint8 [bytes], on their device or written into `out`."""
    if out is None:
        out = torch.empty(sum(value.nbytes for _, value in weights), dtype=torch.uint8, device=weights[0][1].device)
    offset = 0
    for _, value in weights:
        if value.numel():
            out[offset : offset + value.nbytes] = value.contiguous().view(-1).view(torch.uint8)
        offset += value.nbytes
    return out


def views(entries: Iterable[Entry], flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """The weights of a bucket as views of its bytes; read-only in spirit: copy before writing."""
    out, offset = {}, 0
    for entry in entries:
        name, dtype, shape = entry
        torch_dtype = getattr(torch, dtype)
        piece = flat[offset : offset + _nbytes(entry)]
        aligned = piece if offset % torch_dtype.itemsize == 0 else piece.clone()
        out[name] = aligned.view(torch_dtype).view(shape)
        offset += len(piece)
    return out


def pack(
    weights: Iterable[tuple[str, torch.Tensor]], max_bytes: int = BUCKET_BYTES, check: bool = False
) -> Iterator[Bucket]:
    """Buckets of CPU tensors, not copied where they are contiguous; with their fingerprints if `check`."""
    for held in group_by_size(weights, max_bytes):
        mark = fingerprint(value for _, value in held) if check else None
        data = (value.detach().contiguous().view(-1) for _, value in held)
        yield Bucket(entries_of(held), tuple(_raw(value).numpy() for value in data), mark)


def unpack(bucket: Bucket) -> dict[str, torch.Tensor]:
    """The weights of a bucket as views of its bytes; read-only in spirit: copy before writing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        pieces = [torch.from_numpy(piece) for piece in bucket.data]
    return {
        name: piece.view(getattr(torch, dtype)).view(shape)
        for (name, dtype, shape), piece in zip(bucket.entries, pieces, strict=True)
    }


class SentWeights:
    """The weights sent last, for a worker that takes the place of a dead one: training goes on, so the model can't be asked.

    They lie in host memory, page-locked beside a GPU: a copy into pageable memory takes ten times as long. It is the same
    memory in every sync, because locking it takes longer than either.
    """

    def __init__(self, device: str) -> None:
        self._pinned = device == "cuda"
        self._held: list[tuple[tuple[Entry, ...], torch.Tensor]] = []

    def room(self, place: int, entries: tuple[Entry, ...]) -> torch.Tensor:
        """uint8 [bytes] to be filled with the bucket that is sent at this place, 0 first, in its order; what lay there goes."""
        if place == len(self._held) or self._held[place][0] != entries:
            flat = torch.empty(nbytes(entries), dtype=torch.uint8, pin_memory=self._pinned)
            self._held[place:] = [(entries, flat)]
        return self._held[place][1]

    def buckets(self, max_bytes: int) -> Iterator[Bucket]:
        """As `pack` makes them, of what was filled last."""
        for entries, flat in self._held:
            yield from pack(views(entries, flat).items(), max_bytes)


def fingerprint(tensors: Iterable[torch.Tensor]) -> int:
    """64 bits of what tensors hold, bit for bit and in order; the same on every device.

    A change confined to eight bytes that stand together at a multiple of eight is always seen, any other all but surely.
    """
    out = 0
    for tensor in tensors:
        value = tensor.detach().contiguous().view(-1)
        words = _words(value)
        total = torch.zeros((), dtype=torch.int64, device=words.device)
        odd = 2 * torch.arange(min(len(words), FINGERPRINT_WORDS), device=words.device) + 1
        for start in range(0, len(words), FINGERPRINT_WORDS):  # Σ word · (2 place + 1); int64 wraps, alike everywhere
            some = words[start : start + FINGERPRINT_WORDS]
            total += (some * odd[: len(some)]).sum() + 2 * start * some.sum()
        out = (out * 0x9E3779B97F4A7C15 + int(total) + value.nbytes) % 2**64
    return out


def _raw(value: torch.Tensor) -> torch.Tensor:
    """The bytes of a flat tensor, uint8 [bytes]."""
    return value.view(torch.uint8) if value.numel() else value.new_zeros(0, dtype=torch.uint8)


def _words(value: torch.Tensor) -> torch.Tensor:
    """The bytes of a flat tensor as int64, zeros behind them to make the last one whole."""
    raw = _raw(value)
    if len(raw) % 8 or raw.storage_offset() % 8:
        whole = raw.new_zeros(-(-len(raw) // 8) * 8)
        whole[: len(raw)] = raw
        raw = whole
    return raw.view(torch.int64)


def verify(bucket: Labelled, weights: dict[str, torch.Tensor], where: str) -> None:
    """WeightsDiffer if `weights` are not what the bucket's fingerprint is of; nothing if it has none."""
    if bucket.fingerprint is None:
        return
    found = fingerprint(weights[name] for name, _, _ in bucket.entries)
    if found != bucket.fingerprint:
        raise WeightsDiffer(mismatch(bucket, found, where))


def mismatch(bucket: Labelled, found: int, where: str) -> str:
    """Says which weights differ."""
    first, last = bucket.entries[0][0], bucket.entries[-1][0]
    return (
        f"weights {first} … {last} ({len(bucket.entries)} of them) {where} are not those the trainer sent: fingerprint"
        f" {found:016x}, not {bucket.fingerprint:016x}"
    )


def _nbytes(entry: Entry) -> int:
    _, dtype, shape = entry
    return int(np.prod(shape, dtype=np.int64)) * getattr(torch, dtype).itemsize
