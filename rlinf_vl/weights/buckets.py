"""Pack weights into buckets of bytes, and check that they arrived.

A bucket is some weights as bytes; a label describes them. Broadcasts and shared memory carry the
bytes end to end. Through Ray's object store each weight is an array of its own, written there once
and read in place.
"""

import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

#: Bytes after which a bucket is sent.
BUCKET_BYTES = 256 * 2**20
#: Words of eight bytes that `fingerprint` reads at a time: on a CPU few enough to stay in its cache,
#: on a GPU so many that the launches of its kernels take less time than reading them (32 MiB).
FINGERPRINT_WORDS = {"cpu": 2**16, "cuda": 2**22}

#: (name, dtype name as in torch, shape) of a weight.
Entry = tuple[str, str, tuple[int, ...]]


class WeightsDiffer(RuntimeError):
    """The weights that arrived, or that an engine has, are not those that were sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """The contents of a bucket, in order.

    Attributes:
        entries: name, dtype and shape of each weight.
        fingerprint: of the weights; None where the receiver need not compare it.
    """

    entries: tuple[Entry, ...]
    fingerprint: int | None = None

    @classmethod
    def of(cls, weights: Iterable[tuple[str, torch.Tensor]], check: bool = False) -> "Label":
        """Describe these weights; with their fingerprint if `check`."""
        weights = list(weights)
        entries = tuple(
            (name, str(value.dtype).removeprefix("torch."), tuple(value.shape))
            for name, value in weights
        )
        return Label(
            entries=entries,
            fingerprint=fingerprint(value for _, value in weights) if check else None,
        )

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.entries]

    @property
    def nbytes(self) -> int:
        return sum(_nbytes(entry) for entry in self.entries)

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the weights as views of their bytes, uint8 [nbytes]. Copy before writing."""
        weights, offset = {}, 0
        for name, dtype, shape in self.entries:
            nbytes, torch_dtype = _nbytes((name, dtype, shape)), getattr(torch, dtype)
            piece = flat[offset : offset + nbytes]
            # torch views bytes as a wider dtype only where they begin at a multiple of its size.
            aligned = piece if offset % torch_dtype.itemsize == 0 else piece.clone()
            weights[name] = aligned.view(torch_dtype).view(shape)
            offset += nbytes
        return weights

    def verify(self, weights: Mapping[str, torch.Tensor], where: str) -> None:
        """Raise `WeightsDiffer` if there is a fingerprint and `weights` have another."""
        if self.fingerprint is not None:
            self.compare(fingerprint(weights[name] for name in self.names), where)

    def compare(self, actual: int, where: str) -> None:
        """Raise `WeightsDiffer` if there is a fingerprint and it is not `actual`."""
        if self.fingerprint not in (None, actual):
            raise WeightsDiffer(
                f"weights {self.names[0]} … {self.names[-1]} ({len(self.entries)} of them) {where} "
                f"are not those the trainer sent: fingerprint {actual:016x}, not "
                f"{self.fingerprint:016x}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket(Label):
    """Weights for the object store.

    Attributes:
        data: uint8 [bytes] of each weight, which may be the weight's own memory.
    """

    data: tuple[np.ndarray, ...] = field(repr=False)


def group_by_size(
    weights: Iterable[tuple[str, torch.Tensor]], max_bytes: int = BUCKET_BYTES
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yield the weights in order, in groups of at most `max_bytes`.

    A group exceeds `max_bytes` only if one weight alone does.
    """
    group: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, value in weights:
        if group and size + value.nbytes > max_bytes:
            yield group
            group, size = [], 0
        group.append((name, value))
        size += value.nbytes
    if group:
        yield group


def flatten(
    weights: Sequence[tuple[str, torch.Tensor]], out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the weights end to end as uint8 [bytes], on their device or written into `out`."""
    if out is None:
        out = torch.empty(
            sum(value.nbytes for _, value in weights),
            dtype=torch.uint8,
            device=weights[0][1].device,
        )
    offset = 0
    for _, value in weights:
        out[offset : offset + value.nbytes] = value.contiguous().view(-1).view(torch.uint8)
        offset += value.nbytes
    return out


def pack(
    weights: Iterable[tuple[str, torch.Tensor]], max_bytes: int = BUCKET_BYTES, check: bool = False
) -> Iterator[Bucket]:
    """Yield buckets of CPU tensors, not copied if contiguous; with fingerprints if `check`."""
    for group in group_by_size(weights, max_bytes):
        label = Label.of(group, check)
        data = tuple(
            value.detach().contiguous().view(-1).view(torch.uint8).numpy() for _, value in group
        )
        yield Bucket(entries=label.entries, fingerprint=label.fingerprint, data=data)


def unpack(bucket: Bucket) -> dict[str, torch.Tensor]:
    """Return the weights of a bucket as views of its bytes. Copy before writing."""
    with warnings.catch_warnings():
        # Arrays in the object store are read-only, and nobody writes to these tensors.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        pieces = [torch.from_numpy(piece) for piece in bucket.data]
    return {
        name: piece.view(getattr(torch, dtype)).view(shape)
        for (name, dtype, shape), piece in zip(bucket.entries, pieces, strict=True)
    }


def read_buckets(buckets: Iterable[Bucket], device: str) -> Generator[dict[str, torch.Tensor]]:
    """Yield the weights of each bucket as `unpack` does, on the CPU whatever the device.

    Raises:
        WeightsDiffer: they have another fingerprint than the bucket's.
    """
    for bucket in buckets:
        weights = unpack(bucket)
        bucket.verify(weights, "as received")
        yield weights


def fingerprint(tensors: Iterable[torch.Tensor]) -> int:
    """Return 64 bits that depend on every bit of the tensors and their order, alike on all devices.

    A change within eight bytes at a multiple of eight always changes it, any other all but surely.
    """
    totals: list[torch.Tensor] = []
    sizes: list[int] = []
    for tensor in tensors:
        value = tensor.detach().contiguous().view(-1)
        totals.append(_weighted_sum(_words(value.view(torch.uint8))))
        sizes.append(value.nbytes)
    if not totals:
        return 0
    # One copy to the host for all tensors: a copy for each would wait for the GPU each time.
    on_host = torch.stack([total.to(totals[0].device) for total in totals]).tolist()
    digest = 0
    for total, nbytes in zip(on_host, sizes, strict=True):
        digest = (digest * 0x9E3779B97F4A7C15 + total + nbytes) % 2**64
    return digest


def _weighted_sum(words: torch.Tensor) -> torch.Tensor:
    """Return Σ word · (2 index + 1) of int64 [n], modulo 2^64.

    Overflow wraps alike on every device, and sums of integers do not depend on their order. Odd
    factors are invertible modulo 2^64, so no change of one word is lost.
    """
    size = FINGERPRINT_WORDS.get(words.device.type, FINGERPRINT_WORDS["cpu"])
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    odd_weights = 2 * torch.arange(min(len(words), size), device=words.device) + 1
    for start in range(0, len(words), size):
        chunk = words[start : start + size]
        total += (chunk * odd_weights[: len(chunk)]).sum() + 2 * start * chunk.sum()
    return total


def _words(raw: torch.Tensor) -> torch.Tensor:
    """View uint8 [n] as int64, copied where needed: the last word is filled with zeros."""
    if len(raw) % 8 or raw.storage_offset() % 8:
        padded = raw.new_zeros(-(-len(raw) // 8) * 8)
        padded[: len(raw)] = raw
        raw = padded
    return raw.view(torch.int64)


def _nbytes(entry: Entry) -> int:
    _, dtype, shape = entry
    return int(np.prod(shape, dtype=np.int64)) * getattr(torch, dtype).itemsize
