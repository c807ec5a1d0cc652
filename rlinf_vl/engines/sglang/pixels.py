"""Pixels on their way to SGLang's scheduler: written once an image, and named, not carried, by messages.

SGLang sends a request of n samples in n + 1 messages, each with the image patches of all of them, and every turn of an
episode names all images so far: hundreds of megabytes for a group. Here patches lie in a few anonymous files in memory, which
have no names that could outlive this process; a message carries a path under /proc, and the scheduler maps it when it reads
the message.

Imported by the scheduler, so it imports little.
"""

import mmap
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import BufferedWriter

import numpy as np
import torch

from rlinf_vl.types import ImageRef


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


@dataclass(eq=False, slots=True)
class _File:
    """Images one behind the other. It is closed as a whole, when no request holds any of them."""

    file: BufferedWriter
    end: int = 0
    holds: int = 0
    places: dict[str, MappedPatches] = field(default_factory=dict)  # by image hash


class PixelFiles:
    """Patches of images by content hash. What requests hold stays; beyond it the newest images, within a bound of bytes.

    One thread calls `hold`, any thread `release`.
    """

    def __init__(self, pixels: Callable[[ImageRef], np.ndarray], max_bytes: int = 2**29, files: int = 8) -> None:
        """`pixels`: float32 [P, d] of an image. `max_bytes` are kept, in about so many files: a file goes at once."""
        self.max_bytes = max_bytes
        self._pixels = pixels
        self._parts = files
        self._files: list[_File] = []  # oldest first
        self._lock = threading.Lock()

    def hold(self, images: Sequence[ImageRef]) -> list[MappedPatches]:
        """Where the patches of each image lie, for as long as messages that name them may be read; then `release` the images.

        Raises:
            OSError: memory or open files have run out. Also what `pixels` raises; then nothing is held.
        """
        held: list[MappedPatches] = []
        try:
            for image in images:
                file = self._file_of(image) or self._write(image)
                with self._lock:
                    file.holds += 1
                held.append(file.places[image.hash])
        except BaseException:
            self.release(images[: len(held)])
            raise
        return held

    def release(self, images: Sequence[ImageRef]) -> None:
        """Images that were held, each as often as it was."""
        with self._lock:
            for image in images:
                if file := self._file_of(image):
                    file.holds -= 1

    def close(self) -> None:
        """Let all of it go: what is mapped stays with those who map it."""
        with self._lock:
            while self._files:
                self._files.pop().file.close()

    def _file_of(self, image: ImageRef) -> _File | None:
        return next((file for file in self._files if image.hash in file.places), None)

    def _write(self, image: ImageRef) -> _File:
        patches = self._pixels(image)
        assert patches.dtype == np.float32 and patches.ndim == 2, (patches.dtype, patches.shape)
        for old in [f for f in self._files[:-1] if not f.holds]:
            if sum(f.end for f in self._files) + patches.nbytes <= self.max_bytes:
                break
            with self._lock:
                self._files.remove(old)
            old.file.close()
        if not self._files or self._files[-1].end + patches.nbytes > self.max_bytes // self._parts:
            self._files.append(_File(open(os.memfd_create("rlinf_vl pixels"), "wb")))  # noqa: SIM115  # closed by its owner
        file = self._files[-1]
        offset = -(-file.end // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        file.file.seek(offset)
        file.file.write(np.ascontiguousarray(patches).data)
        file.file.flush()
        file.end = offset + patches.nbytes
        path = f"/proc/{os.getpid()}/fd/{file.file.fileno()}"
        file.places[image.hash] = MappedPatches(path, offset, (patches.shape[0], patches.shape[1]))
        return file
