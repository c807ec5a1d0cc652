"""Pixels on their way to SGLang's scheduler: written once a request, and named, not carried, by its messages.

SGLang sends a request of n samples in n + 1 messages, each with the image patches of all of them: hundreds of megabytes
for a group. Here the patches of a request lie in one anonymous file in memory, which has no name that could outlive
this process; a message carries its path under /proc, and the scheduler maps it when it reads the message.

Imported by the scheduler, so it imports little.
"""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class MappedPatches:
    """Patches of one image [P, d], float32, in a file. Pickled, it is where they lie; loaded, it is an ordinary tensor."""

    path: str
    offset: int
    shape: tuple[int, int]

    def __reduce__(self) -> tuple:
        return map_patches, (self.path, self.offset, self.shape)


def map_patches(path: str, offset: int, shape: tuple[int, int]) -> torch.Tensor:
    """float32 [P, d] that lies at `offset` of the file; pages are read when they are used. FileNotFoundError: it is closed."""
    n = shape[0] * shape[1]
    with open(path, "rb") as file:
        pages = mmap.mmap(file.fileno(), n * torch.float32.itemsize, offset=offset, access=mmap.ACCESS_COPY)
    return torch.frombuffer(pages, dtype=torch.float32, count=n).reshape(shape)


class PixelFile:
    """The patches of one request's images, for as long as messages that name them may be read; then `close` it."""

    def __init__(self, patches: Sequence[np.ndarray]) -> None:
        """Write float32 [P, d] of each image. OSError: memory or open files have run out."""
        self._file = open(os.memfd_create("rlinf_vl pixels"), "wb")  # noqa: SIM115  # closed also when it is dropped
        path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        self.images: list[MappedPatches] = []
        """Where each image's patches lie."""
        end = 0
        for image in patches:
            assert image.dtype == np.float32 and image.ndim == 2, (image.dtype, image.shape)
            offset = -(-end // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
            self._file.seek(offset)
            self._file.write(np.ascontiguousarray(image).data)
            end = offset + image.nbytes
            self.images.append(MappedPatches(path, offset, (image.shape[0], image.shape[1])))
        self._file.flush()

    def close(self) -> None:
        """Let the memory go, once nobody maps it."""
        self._file.close()
