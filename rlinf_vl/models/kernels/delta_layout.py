"""Where the tokens of a packed row are for its gated delta nets: the first and last of each segment for the convolution, the
chunks of all segments for the recurrence. Made once per row from its boundaries, for all layers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from rlinf_vl.models.transfer import on_device

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Inputs:
    """Where n · (W - 1) inputs of a convolution are: number `slots[i]` is row `rows[i]` of the packed row, number `tail_slots[i]` is
    row `tail_rows[i]` of the tails before its segments."""

    shape: tuple[int, int]
    slots: torch.Tensor
    rows: torch.Tensor
    tail_slots: torch.Tensor
    tail_rows: torch.Tensor

    @classmethod
    def of(cls, sources: np.ndarray, tokens: int, device: torch.device | str) -> "Inputs":
        """Of int [n, W - 1], in which `tokens` is the first row of the tails."""
        flat = sources.ravel()
        slots, tail_slots = np.flatnonzero(flat < tokens), np.flatnonzero(flat >= tokens)
        found = slots, flat[slots], tail_slots, flat[tail_slots] - tokens
        return cls(sources.shape, *(on_device(x, device) for x in found))

    def take(self, x: torch.Tensor, tails: torch.Tensor | None) -> torch.Tensor:
        """[n, W - 1, C] of x [T, C] and tails [S, W - 1, C]; None: zeros."""
        out = x.new_zeros(self.shape[0] * self.shape[1], x.shape[1]).index_copy_(0, self.slots, x[self.rows])
        if tails is not None:
            out[self.tail_slots] = tails.to(x.dtype).flatten(0, 1)[self.tail_rows]
        return out.view(*self.shape, -1)


@dataclass(frozen=True, slots=True)
class Edges:
    """What a convolution of W taps needs to know of segments: their `first` tokens (W - 1 or fewer each), int64 [E], the inputs
    `before` each of those, and the last W - 1 inputs of each segment, its `tails`."""

    first: torch.Tensor
    before: Inputs
    tails: Inputs


@dataclass(frozen=True, slots=True)
class Level:
    """Segments that continue segments of earlier levels.

    Attributes:
        segments: where they stand in the order of levels.
        parents: which segments they continue, int64 in that order; None in the first level.
        steps: the n-th chunk of each segment that has so many; those with the most chunks come first.
    """

    segments: slice
    parents: torch.Tensor | None
    steps: tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Chunks:
    """A row's segments cut into K chunks of `size` tokens, the last chunk of each padded.

    Attributes:
        tokens: int64 [K · size], the token of each place; of padding, any.
        places: int64 [T], the place of each token.
        padding: bool [K, 1, size].
        order: int64 [S], the segments in the order of levels.
        rank: int64 [S], the place of each segment in that order.
    """

    size: int
    levels: tuple[Level, ...]
    tokens: torch.Tensor
    places: torch.Tensor
    padding: torch.Tensor
    order: torch.Tensor
    rank: torch.Tensor


@dataclass(frozen=True, slots=True)
class Run:
    """The segments of one level as a packed row of their own: its tokens in the whole row, int64, its boundaries, int64 on the
    device and on the CPU, and its `Level`."""

    tokens: torch.Tensor
    cu_seqlens: torch.Tensor
    cu_seqlens_cpu: torch.Tensor
    level: Level


class DeltaLayout:
    """Segments of a row of T tokens, which may continue earlier ones. What a layer needs is made when the first one asks."""

    def __init__(
        self, cu_seqlens: np.ndarray, prefix: np.ndarray | None = None, device: torch.device | str = "cpu"
    ) -> None:
        """cu_seqlens int [S + 1]; prefix int [S], the earlier segment that each continues, -1 for none; None: none does."""
        n = len(cu_seqlens) - 1
        self.starts, self.lengths, self.device = cu_seqlens[:-1], np.diff(cu_seqlens), device
        self.prefix = np.full(n, -1) if prefix is None else prefix
        depths = np.zeros(n, int)
        for segment, parent in enumerate(self.prefix.tolist()):
            depths[segment] = depths[parent] + 1 if parent >= 0 else 0
        self.levels = [np.flatnonzero(depths == depth) for depth in range(depths.max(initial=-1) + 1)]
        self._made: dict[tuple, object] = {}

    def _once(self, make: Callable[..., Made], *key: int) -> Made:
        if (make.__name__, *key) not in self._made:
            self._made[make.__name__, *key] = make(*key)
        return self._made[make.__name__, *key]  # pyright: ignore[reportReturnType]

    def edges(self, width: int) -> Edges:
        """For a convolution of `width` taps."""
        return self._once(self._edges, width)

    def chunks(self, size: int) -> Chunks:
        """Of `size` tokens."""
        return self._once(self._chunks, size)

    def by_head(self, size: int, heads: int, parts: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """(int64 [parts · K · heads · size], int64 [T · parts · heads]): which rows of x [T, parts, heads, d] those of
        [parts, K, heads, size, d] are in chunks of `size`, and the inverse."""
        return self._once(self._by_head, size, heads, parts)

    def runs(self) -> tuple[tuple[Run, ...], torch.Tensor, torch.Tensor]:
        """Levels as rows of their own, where each token of the row is among theirs, int64 [T], and each segment, int64 [S]."""
        return self._once(self._runs)

    def best_size(self) -> int:
        """Chunks of 16 tokens cost a fifth more than chunks of 32, and less where they leave out more padding."""
        padded = {size: int((-(-self.lengths // size)).sum()) * size for size in (16, 32)}
        return 16 if 1.2 * padded[16] < padded[32] else 32

    def _edges(self, width: int) -> Edges:
        n, tokens, back = len(self.lengths), int(self.lengths.sum()), width - 1
        # Tokens are numbered 0 … T-1, then come the tails before each segment that continues none.
        before = tokens + np.arange(n * back).reshape(n, back)
        tails = np.empty_like(before)
        for depth, level in enumerate(self.levels):
            if depth:
                before[level] = tails[self.prefix[level]]
            at = np.arange(back) + self.lengths[level, None] - back
            older = np.take_along_axis(before[level], np.clip(at + back, 0, back - 1), 1)
            tails[level] = np.where(at < 0, older, self.starts[level, None] + at)
        near = np.minimum(self.lengths, back)
        of, offsets = np.repeat(np.arange(n), near), _ranges(near)
        first = self.starts[of] + offsets
        at = offsets[:, None] + np.arange(back)
        older = np.take_along_axis(before[of], np.minimum(at, back - 1), 1)
        sources = np.where(at < back, older, first[:, None] + np.arange(back) - back)
        return Edges(
            on_device(first, self.device),
            Inputs.of(sources, tokens, self.device),
            Inputs.of(tails, tokens, self.device),
        )

    def _chunks(self, size: int) -> Chunks:
        counts = -(-self.lengths // size)
        members = [level[np.argsort(-counts[level], kind="stable")] for level in self.levels]
        order, rank = self._order(members)
        levels, number, done = [], 0, 0
        numbers = np.zeros((len(counts), counts.max(initial=0)), int)  # of each segment's chunks
        for level in members:
            alive = (counts[level] > np.arange(counts[level].max(initial=0))[:, None]).sum(1)
            first = number + np.cumsum(alive) - alive
            numbers[level, : len(alive)] = first + np.arange(len(level))[:, None]
            steps = tuple(slice(a, a + n) for a, n in zip(first.tolist(), alive.tolist(), strict=True))
            levels.append(Level(slice(done, done + len(level)), self._parents(level, rank, done), steps))
            number, done = number + int(alive.sum()), done + len(level)
        offsets = _ranges(self.lengths)
        places = numbers[np.repeat(np.arange(len(counts)), self.lengths), offsets // size] * size + offsets % size
        tokens, padding = np.zeros(number * size, int), np.ones(number * size, bool)
        tokens[places], padding[places] = np.arange(len(places)), False
        arrays = tokens, places, padding.reshape(-1, 1, size), order, rank
        return Chunks(size, tuple(levels), *(on_device(x, self.device) for x in arrays))

    def _by_head(self, size: int, heads: int, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
        chunks = self.chunks(size)
        head, part = (torch.arange(n, device=self.device)[:, None] for n in (heads, parts))
        tokens = (chunks.tokens.view(-1, 1, size) * parts + part.view(-1, 1, 1, 1)) * heads + head
        places = (chunks.places // size * heads * size + chunks.places % size).view(-1, 1, 1) + head[:, 0] * size
        return tokens.flatten(), (places + part * (len(chunks.tokens) * heads)).flatten()

    def _runs(self) -> tuple[tuple[Run, ...], torch.Tensor, torch.Tensor]:
        _, rank = self._order(self.levels)
        runs, tokens, done = [], [], 0
        for level in self.levels:
            lengths = self.lengths[level]
            assert lengths.all(), "segments without tokens"
            tokens.append(np.repeat(self.starts[level], lengths) + _ranges(lengths))
            cu_seqlens = np.cumsum([0, *lengths])
            place = Level(slice(done, done + len(level)), self._parents(level, rank, done), ())
            at, bounds = on_device(tokens[-1], self.device), on_device(cu_seqlens, self.device)
            runs.append(Run(at, bounds, torch.from_numpy(cu_seqlens), place))
            done += len(level)
        places = np.argsort(np.concatenate(tokens))
        return tuple(runs), on_device(places, self.device), on_device(rank, self.device)

    def _order(self, levels: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """(the segments of all levels, the place of each in it)."""
        order = np.concatenate(levels)
        return order, np.argsort(order)

    def _parents(self, level: np.ndarray, rank: np.ndarray, done: int) -> torch.Tensor | None:
        return on_device(rank[self.prefix[level]], self.device) if done else None


def _ranges(lengths: np.ndarray) -> np.ndarray:
    """0 … n-1 for each length n, end to end."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
