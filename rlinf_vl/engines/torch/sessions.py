"""Keys, values and states kept between the turns of an episode. Nothing but speed depends on them."""

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
    #: What recurrent layers have behind exactly these tokens (`DecodeCache.state`); () where there are no such layers.
    states: tuple[torch.Tensor, ...] = field(default=(), repr=False)
    routes: np.ndarray | None = field(default=None, repr=False)  # [K, L·k], where the engine reports them

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return *self.parts, *self.states

    @classmethod
    def of(
        cls,
        request: Request,
        sampled: Sequence[int],
        parts: tuple[torch.Tensor, ...],
        states: tuple[torch.Tensor, ...] = (),
        routes: np.ndarray | None = None,
    ) -> "Kept":
        """What is kept of a prompt and the tokens sampled behind it."""
        ids = np.concatenate([request.ids, np.asarray(sampled, np.int32)])
        return cls(ids, tuple(image.hash for image in request.images), parts, states, routes)

    def begun(self, request: Request, image_token_id: int) -> "Kept | None":
        """What of this the request begins with, images whole: all of it, or what stands before the first difference, as where an
        answer lost its thoughts in the history. At least one token of the request is left to compute. None: nothing. With states
        it is all or nothing, as they can't be cut."""
        n = min(len(self.ids), len(request.ids) - 1)
        shown = tuple(image.hash for image in request.images[: len(self.images)])
        if n == len(self.ids) and shown == self.images and np.array_equal(self.ids, request.ids[:n]):
            return self if n else None
        differing = np.flatnonzero(self.ids[:n] != request.ids[:n])
        n = int(differing[0]) if len(differing) else n
        placeholders = np.flatnonzero(request.ids == image_token_id)
        patches = np.cumsum([0, *request.image_grids.prod(axis=1)])
        starts = placeholders[len(placeholders) * patches[:-1] // patches[-1]] if request.images else placeholders
        pairs = zip(request.images, self.images, strict=False)
        other = next((i for i, (image, kept) in enumerate(pairs) if image.hash != kept), None)
        n = n if other is None else min(n, int(starts[other]))
        if n == len(self.ids) or n == 0:
            return self if n else None
        if self.states:
            return None
        parts, left = [], n
        for part in self.parts:
            parts += [part if part.shape[2] <= left else part[:, :, :left].clone()] if left > 0 else []
            left -= part.shape[2]
        routes = None if self.routes is None else self.routes[:n]
        return Kept(self.ids[:n], self.images[: int((starts < n).sum())], tuple(parts), routes=routes)


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

    def find(self, name: str, request: Request, image_token_id: int) -> Kept | None:
        """What the request can go on from."""
        with self._lock:
            kept = self._kept.get(name)
        return None if kept is None else kept.begun(request, image_token_id)

    def put(self, name: str, kept: Kept) -> None:
        """Keep this of a session, unless it has ended."""
        with self._lock:
            if name in self._kept:
                self._drop(name)
                for part in kept.tensors:
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
        for part in kept.tensors:
            self._users[part] -= 1
            if not self._users[part]:
                del self._users[part]
                self.bytes -= part.nbytes
