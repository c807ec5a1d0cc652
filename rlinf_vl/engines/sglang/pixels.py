"""Pixels for SGLang's scheduler: written once for each image, and referred to by messages.

SGLang sends a request of n samples in n + 1 messages, each with the image patches of all of them,
and every turn of an episode names all images so far: hundreds of megabytes for a group. Here
patches lie in a few anonymous files in memory, which have no names that could outlive this process.
A message carries a path under /proc, and the scheduler maps the file when it reads the message.

The scheduler imports this module, so it imports little.
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
    """The patches of one image, float32 [P, d], in a file. Pickling it saves the place in the file;
    unpickling returns an ordinary tensor."""

    path: str
    offset: int
    shape: tuple[int, int]

    def __reduce__(self) -> tuple:
        return map_patches, (self.path, self.offset, self.shape)


def map_patches(path: str, offset: int, shape: tuple[int, int]) -> torch.Tensor:
    """Map the patches at `offset` of the file: float32 [P, d]. Pages are read when they are used.

    Raises FileNotFoundError if the file is closed.
    """
    n = shape[0] * shape[1]
    with open(path, "rb") as file:
        pages = mmap.mmap(
            file.fileno(), n * torch.float32.itemsize, offset=offset, access=mmap.ACCESS_COPY
        )
    return torch.frombuffer(pages, dtype=torch.float32, count=n).reshape(shape)


@dataclass(eq=False, slots=True)
class _File:
    """A file with images one behind the other. It is closed as a whole, when no request holds any
    of them."""

    file: BufferedWriter
    end: int = 0
    holds: int = 0
    places: dict[str, MappedPatches] = field(default_factory=dict)  # by image hash


class PixelFiles:
    """The patches of images, by content hash. Images held by requests stay, and the newest others
    within a bound of bytes.

    Any thread may call any method. Patches are made by the threads that hold them, each image's by
    one of them.
    """

    def __init__(
        self, pixels: Callable[[ImageRef], np.ndarray], max_bytes: int = 2**29, files: int = 8
    ) -> None:
        """Make an empty store.

        Args:
            pixels: returns the patches of an image: float32 [P, d].
            max_bytes: size above which old files without held images are dropped.
            files: number of files to spread them over, because a file is dropped as a whole.
        """
        self.max_bytes = max_bytes
        self._pixels = pixels
        self._parts = files
        self._files: list[_File] = []  # oldest first
        self._making: dict[
            str, threading.Event
        ] = {}  # images whose patches a thread makes, by hash
        self._lock = threading.Lock()  # of both of these, and of `holds`
        self._writing = threading.Lock()  # taken before `_lock`

    def hold(self, images: Sequence[ImageRef]) -> list[MappedPatches]:
        """Return the place of each image's patches. They stay there until `release` is called.

        Call it once messages that refer to them have been read.

        Raises:
            OSError: memory or open files have run out. Errors of `pixels` pass, too; then nothing
                is held.
        """
        mapped: list[MappedPatches] = []
        try:
            for image in images:
                mapped.append(self._hold(image))
        except BaseException:
            self.release(images[: len(mapped)])
            raise
        return mapped

    def release(self, images: Sequence[ImageRef]) -> None:
        """Release images, each as often as it was held."""
        with self._lock:
            for image in images:
                if file := self._file_of(image):
                    file.holds -= 1

    def close(self) -> None:
        """Close all files. Memory that the scheduler has mapped stays with it."""
        with self._lock:
            while self._files:
                self._files.pop().file.close()

    def _hold(self, image: ImageRef) -> MappedPatches:
        """Hold one image, and make its patches unless they are there or another thread makes
        them."""
        while True:
            with self._lock:
                if file := self._file_of(image):
                    file.holds += 1
                    return file.places[image.hash]
                made_elsewhere = self._making.get(image.hash)
                if made_elsewhere is None:
                    self._making[image.hash] = threading.Event()
            if made_elsewhere is None:
                break
            made_elsewhere.wait()
        try:
            patches = self._pixels(image)
            with self._writing:
                file = self._write(image, patches)
            return file.places[image.hash]
        finally:
            with self._lock:
                self._making.pop(image.hash).set()

    def _file_of(self, image: ImageRef) -> _File | None:
        return next((file for file in self._files if image.hash in file.places), None)

    def _write(self, image: ImageRef, patches: np.ndarray) -> _File:
        """Write an image's patches and hold them. One thread at a time."""
        assert patches.dtype == np.float32 and patches.ndim == 2, (patches.dtype, patches.shape)
        # Drop the oldest files without held images until the new image fits.
        for old in self._files[:-1]:
            if sum(f.end for f in self._files) + patches.nbytes <= self.max_bytes:
                break
            with self._lock:
                if old.holds:
                    continue
                self._files.remove(old)
            old.file.close()
        if not self._files or self._files[-1].end + patches.nbytes > self.max_bytes // self._parts:
            new = _File(open(os.memfd_create("rlinf_vl pixels"), "wb"))  # noqa: SIM115  # closed by its owner
            with self._lock:
                self._files.append(new)
        file = self._files[-1]
        # A mapping must begin at a multiple of the allocation granularity.
        offset = -(-file.end // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        file.file.seek(offset)
        file.file.write(np.ascontiguousarray(patches).data)
        file.file.flush()
        file.end = offset + patches.nbytes
        path = f"/proc/{os.getpid()}/fd/{file.file.fileno()}"
        place = MappedPatches(path, offset, (patches.shape[0], patches.shape[1]))
        with self._lock:
            file.places[image.hash] = place
            file.holds += 1
        return file
