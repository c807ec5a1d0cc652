"""Keys and values kept between the turns of an episode. Nothing but speed depends on them."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from rlinf_vl.types import Request


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """What is kept of K tokens."""

    ids: np.ndarray = field(repr=False)  # int32 [K]
    images: tuple[str, ...]  # hashes of the images among them
    #: Keys and values [L, 2, ·, H_kv, D] that make up the K tokens; the prompt of a group is one part, which its sessions share.
    parts: tuple[torch.Tensor, ...] = field(repr=False)

    @classmethod
    def of(cls, request: Request, sampled: Sequence[int], parts: tuple[torch.Tensor, ...]) -> "Kept":
        """What is kept of a prompt and the tokens sampled behind it."""
        ids = np.concatenate([request.ids, np.asarray(sampled, np.int32)])
        return cls(ids, tuple(image.hash for image in request.images), parts)

    def begins(self, request: Request) -> bool:
        """Whether the request goes on from these tokens and images."""
        hashes = tuple(image.hash for image in request.images[: len(self.images)])
        n = len(self.ids)
        return n < len(request.ids) and hashes == self.images and np.array_equal(self.ids, request.ids[:n])


class Sessions:
    """What is kept of each session that has begun, least recently used first. Thread-safe.

    Attributes:
        bytes: of all parts; one that several sessions share counts once.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._kept: OrderedDict[str, Kept | None] = OrderedDict()
        self._users: Counter[torch.Tensor] = Counter()  # tensors are equal to themselves alone as keys
        self._lock = threading.Lock()

    def begin(self, names: Iterable[str]) -> None:
        with self._lock:
            for name in names:
                self._kept.setdefault(name, None)

    def end(self, names: Iterable[str]) -> None:
        with self._lock:
            for name in names:
                self._drop(name)
                self._kept.pop(name, None)

    def clear(self) -> None:
        """Drop what is kept of all sessions; they go on."""
        self.shrink(0)

    def find(self, name: str, request: Request) -> Kept | None:
        """What the request can go on from."""
        with self._lock:
            kept = self._kept.get(name)
        return kept if kept is not None and kept.begins(request) else None

    def put(self, name: str, kept: Kept) -> None:
        """Keep this of a session, unless it has ended."""
        with self._lock:
            if name in self._kept:
                self._drop(name)
                for part in kept.parts:
                    self.bytes += part.nbytes * (part not in self._users)
                    self._users[part] += 1
                self._kept[name] = kept
                self._kept.move_to_end(name)

    def shrink(self, max_bytes: int) -> None:
        """Drop what was not used for longest until no more than `max_bytes` are kept."""
        with self._lock:
            for name in list(self._kept):
                if self.bytes <= max_bytes:
                    break
                self._drop(name)

    def _drop(self, name: str) -> None:
        kept = self._kept.get(name)
        if kept is None:
            return
        self._kept[name] = None
        for part in kept.parts:
            self._users[part] -= 1
            if not self._users[part]:
                del self._users[part]
                self.bytes -= part.nbytes
