"""Weights as flat byte buffers: what goes through Ray's object store is one numpy array per bucket, read zero-copy."""

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

#: Bytes after which a bucket is sent.
BUCKET_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some weights end to end. `entries`: (name, dtype name as in torch, shape) in order; `data`: uint8 [bytes]."""

    entries: tuple[tuple[str, str, tuple[int, ...]], ...]
    data: np.ndarray = field(repr=False)


def pack(weights: Iterable[tuple[str, torch.Tensor]], max_bytes: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Fill buckets with CPU tensors in order. A bucket exceeds `max_bytes` only where one weight alone does."""
    held: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, value in weights:
        if held and size + value.nbytes > max_bytes:
            yield _bucket(held)
            held, size = [], 0
        held.append((name, value))
        size += value.nbytes
    if held:
        yield _bucket(held)


def _bucket(held: list[tuple[str, torch.Tensor]]) -> Bucket:
    data = np.empty(sum(value.nbytes for _, value in held), np.uint8)
    entries, offset = [], 0
    for name, value in held:
        flat = value.contiguous().view(-1).view(torch.uint8).numpy() if value.numel() else np.empty(0, np.uint8)
        data[offset : offset + len(flat)] = flat
        offset += len(flat)
        entries.append((name, str(value.dtype).removeprefix("torch."), tuple(value.shape)))
    return Bucket(tuple(entries), data)


def unpack(bucket: Bucket) -> dict[str, torch.Tensor]:
    """The weights of a bucket as views of its buffer; read-only in spirit: copy before writing."""
    out, offset = {}, 0
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        flat = torch.from_numpy(bucket.data)
    for name, dtype, shape in bucket.entries:
        torch_dtype = getattr(torch, dtype)
        size = int(np.prod(shape, dtype=np.int64)) * torch_dtype.itemsize
        piece = flat[offset : offset + size]
        aligned = piece if offset % torch_dtype.itemsize == 0 else piece.clone()
        out[name] = aligned.view(torch_dtype).view(shape)
        offset += size
    return out
