"""A cache of keys, values and states between the turns of an episode.

It saves time only: results are the same without it.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from rlinf_vl.types import Request, TokenIds


@dataclass(frozen=True, slots=True, eq=False)
class CachedPrefix:
    """The cached keys, values, states and columns of the first K tokens of a sequence."""

    ids: np.ndarray = field(repr=False)  # int32 [K]
    images: tuple[str, ...]  # hashes of the images among them
    #: Keys and values [L, 2, ·, H_kv, D] of consecutive runs of tokens, K in all. The prompt of a
    #: group is one part, which the sessions of its samples share.
    parts: tuple[torch.Tensor, ...] = field(repr=False)
    #: States of recurrent layers after exactly these tokens (`DecodeCache.state`); () without such
    #: layers.
    states: tuple[torch.Tensor, ...] = field(default=(), repr=False)
    columns: dict[str, np.ndarray] = field(default_factory=dict, repr=False)  # [K, …]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors whose memory this entry holds."""
        return *self.parts, *self.states

    @classmethod
    def from_request(
        cls,
        request: Request,
        sampled: Sequence[int],
        parts: tuple[torch.Tensor, ...],
        states: tuple[torch.Tensor, ...] = (),
        columns: dict[str, np.ndarray] | None = None,
    ) -> "CachedPrefix":
        """Return the cache entry of a prompt followed by sampled tokens."""
        ids = np.concatenate([request.ids, np.asarray(sampled, np.int32)])
        return cls(ids, tuple(image.hash for image in request.images), parts, states, columns or {})

    def reusable_for(self, request: Request, placeholder_ids: TokenIds) -> "CachedPrefix | None":
        """Return the longest part of this entry that the request begins with, or None.

        The part ends before the first difference, for example where the history of an episode
        leaves out the thoughts of an answer. It never ends inside an image, and it leaves at least
        one token of the request to compute. An entry with recurrent states is used as a whole or
        not at all, because a state can't be shortened.
        """
        n = min(len(self.ids), len(request.ids) - 1)
        request_images = tuple(image.hash for image in request.images[: len(self.images)])
        if (
            n == len(self.ids)
            and request_images == self.images
            and np.array_equal(self.ids, request.ids[:n])
        ):
            return self if n else None
        differing = np.flatnonzero(self.ids[:n] != request.ids[:n])
        n = int(differing[0]) if len(differing) else n
        # Placeholders lie in image order, as many per image as it has merged patches, so the share
        # of patches before an image is the share of placeholders before it.
        placeholders = np.flatnonzero(np.isin(request.ids, placeholder_ids))
        patches = np.cumsum([0, *request.image_grids.prod(axis=1)])
        starts = (
            placeholders[len(placeholders) * patches[:-1] // patches[-1]]
            if request.images
            else placeholders
        )
        pairs = zip(request.images, self.images, strict=False)
        first_changed_image = next(
            (i for i, (image, cached_hash) in enumerate(pairs) if image.hash != cached_hash), None
        )
        n = n if first_changed_image is None else min(n, int(starts[first_changed_image]))
        if n == len(self.ids) or n == 0:
            return self if n else None
        if self.states:
            return None
        parts, remaining = [], n
        for part in self.parts:
            # A part that is cut is copied, as a view would hold the memory of the whole part.
            parts += (
                [part if part.shape[2] <= remaining else part[:, :, :remaining].clone()]
                if remaining > 0
                else []
            )
            remaining -= part.shape[2]
        columns = {name: column[:n] for name, column in self.columns.items()}
        return CachedPrefix(
            self.ids[:n], self.images[: int((starts < n).sum())], tuple(parts), columns=columns
        )


class PrefixCache:
    """The cache entries of the sessions that have begun, least recently used first. Thread-safe.

    Attributes:
        bytes: size of all parts; a part that several sessions share counts once.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._entries: OrderedDict[str, CachedPrefix | None] = OrderedDict()
        # Entries that refer to each tensor. As a key a tensor is equal to itself only.
        self._users: Counter[torch.Tensor] = Counter()
        self._lock = threading.Lock()

    def begin(self, names: Iterable[str]) -> None:
        """Let entries of these sessions be stored from now on."""
        with self._lock:
            for name in names:
                self._entries.setdefault(name, None)

    def end(self, names: Iterable[str]) -> None:
        """Drop the entries of these sessions and store no more."""
        with self._lock:
            for name in names:
                self._drop(name)
                self._entries.pop(name, None)

    def clear(self) -> None:
        """Drop all entries. The sessions stay open."""
        self.shrink(0)

    def find(self, name: str, request: Request, placeholder_ids: TokenIds) -> CachedPrefix | None:
        """Return the part of a session's entry that the request begins with, or None."""
        with self._lock:
            entry = self._entries.get(name)
        return None if entry is None else entry.reusable_for(request, placeholder_ids)

    def put(self, name: str, entry: CachedPrefix) -> None:
        """Replace the entry of a session, unless it has ended."""
        with self._lock:
            if name in self._entries:
                self._drop(name)
                for part in entry.tensors:
                    self.bytes += part.nbytes * (part not in self._users)
                    self._users[part] += 1
                self._entries[name] = entry
                self._entries.move_to_end(name)

    def shrink(self, max_bytes: int) -> None:
        """Drop the least recently used entries until at most `max_bytes` remain."""
        with self._lock:
            for name in list(self._entries):
                if self.bytes <= max_bytes:
                    break
                self._drop(name)

    def _drop(self, name: str) -> None:
        entry = self._entries.get(name)
        if entry is None:
            return
        self._entries[name] = None
        for part in entry.tensors:
            self._users[part] -= 1
            if not self._users[part]:
                del self._users[part]
                self.bytes -= part.nbytes
