"""The places of a packed row's tokens in its gated delta nets.

The convolution needs the first and last tokens of each segment, the recurrence the chunks of all
segments. Both are laid out once per row, from its boundaries, for all layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from rlinf_vl.models.transfer import on_device

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Inputs:
    """The places of n · (W - 1) inputs of a convolution.

    Input `slots[i]` is row `rows[i]` of the packed row; input `tail_slots[i]` is row `tail_rows[i]`
    of the tails before its segments.
    """

    shape: tuple[int, int]
    slots: torch.Tensor
    rows: torch.Tensor
    tail_slots: torch.Tensor
    tail_rows: torch.Tensor

    @classmethod
    def from_sources(cls, sources: np.ndarray, tokens: int, device: torch.device | str) -> "Inputs":
        """Split int [n, W - 1] into rows of the packed row and rows of the tails.

        Numbers below `tokens` are rows of the packed row; number `tokens` is the first row of the
        tails.
        """
        source_rows = sources.ravel()
        slots, tail_slots = (
            np.flatnonzero(source_rows < tokens),
            np.flatnonzero(source_rows >= tokens),
        )
        return cls(
            sources.shape,
            slots=on_device(slots, device),
            rows=on_device(source_rows[slots], device),
            tail_slots=on_device(tail_slots, device),
            tail_rows=on_device(source_rows[tail_slots] - tokens, device),
        )

    def take(self, x: torch.Tensor, tails: torch.Tensor | None) -> torch.Tensor:
        """Return the inputs [n, W - 1, C] from x [T, C] and tails [S, W - 1, C]; None: zeros."""
        out = x.new_zeros(self.shape[0] * self.shape[1], x.shape[1]).index_copy_(
            0, self.slots, x[self.rows]
        )
        if tails is not None:
            out[self.tail_slots] = tails.to(x.dtype).flatten(0, 1)[self.tail_rows]
        return out.view(*self.shape, -1)


@dataclass(frozen=True, slots=True)
class Edges:
    """The edges of segments, for a convolution of W taps.

    Attributes:
        first_tokens: int64 [E], the first W - 1 tokens of each segment, or fewer.
        inputs_before: the W - 1 inputs before each of those.
        tails: the last W - 1 inputs of each segment.
    """

    first_tokens: torch.Tensor
    inputs_before: Inputs
    tails: Inputs


@dataclass(frozen=True, slots=True)
class Level:
    """The segments of one depth, which continue segments of earlier levels.

    Attributes:
        segments: their places in the order of levels.
        parents: int64, the places of the segments that they continue; None in the first level.
        steps: step n has the n-th chunk of each segment that has so many; those with the most
            chunks come first.
    """

    segments: slice
    parents: torch.Tensor | None
    steps: tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Chunks:
    """The segments of a row cut into K chunks of `size` tokens, the last chunk of each padded.

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
    """The segments of one level as a packed row of their own.

    Attributes:
        tokens: int64, its tokens' numbers in the whole row.
        cu_seqlens: int64, its boundaries, on the device.
        cu_seqlens_cpu: int64, the same on the CPU.
        level: its segments; `steps` is empty.
    """

    tokens: torch.Tensor
    cu_seqlens: torch.Tensor
    cu_seqlens_cpu: torch.Tensor
    level: Level


class DeltaLayout:
    """The layout of a row of T tokens, whose segments may continue earlier ones.

    Each part of it is made when the first layer needs it, and kept for the others.
    """

    def __init__(
        self,
        cu_seqlens: np.ndarray,
        prefix: np.ndarray | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Group the segments by depth.

        Args:
            cu_seqlens: int [S + 1], segment boundaries.
            prefix: int [S], the earlier segment that each segment continues, -1 for none; None if
                no segment continues another.
            device: the device of the tensors.
        """
        n = len(cu_seqlens) - 1
        self.starts, self.lengths, self.device = cu_seqlens[:-1], np.diff(cu_seqlens), device
        self.prefix = np.full(n, -1) if prefix is None else prefix
        depths = np.zeros(n, int)
        for segment, parent in enumerate(self.prefix.tolist()):
            depths[segment] = depths[parent] + 1 if parent >= 0 else 0
        self.levels = [
            np.flatnonzero(depths == depth) for depth in range(depths.max(initial=-1) + 1)
        ]
        self._results: dict[tuple, object] = {}

    def _once(self, key: tuple, make: Callable[[], Result]) -> Result:
        """Return the result of `make`, from an earlier call with this key where there is one."""
        # A functools.cache would tie the layout to itself, and its tensors would outlive the step.
        if key not in self._results:
            self._results[key] = make()
        return self._results[key]  # pyright: ignore[reportReturnType]

    def edges(self, width: int) -> Edges:
        """Return the edges for a convolution of `width` taps."""
        return self._once(("edges", width), lambda: self._edges(width))

    def chunks(self, size: int) -> Chunks:
        """Return the chunks of `size` tokens."""
        return self._once(("chunks", size), lambda: self._chunks(size))

    def by_head(self, size: int, heads: int, parts: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (index, inverse) that bring rows of tokens into chunks by head.

        The index, int64 [parts · K · heads · size], names for each row of [parts, K, heads, size,
        d] its row of x [T, parts, heads, d]. The inverse is int64 [T · parts · heads].
        """
        return self._once(
            ("by_head", size, heads, parts), lambda: self._by_head(size, heads, parts)
        )

    def runs(self) -> tuple[tuple[Run, ...], torch.Tensor, torch.Tensor]:
        """Return (runs, token places, segment places): levels as packed rows of their own.

        Token places, int64 [T], tell where each token of the row is in the concatenation of the
        runs; segment places, int64 [S], the same of segments.
        """
        return self._once(("runs",), self._runs)

    def best_size(self) -> int:
        """Return 16 or 32, the faster size of chunks for these segments.

        Chunks of 16 tokens cost a fifth more than chunks of 32, and less where they avoid more
        padding.
        """
        padded = {size: int((-(-self.lengths // size)).sum()) * size for size in (16, 32)}
        return 16 if 1.2 * padded[16] < padded[32] else 32

    def _edges(self, width: int) -> Edges:
        n, tokens, n_earlier = len(self.lengths), int(self.lengths.sum()), width - 1
        # Sources are numbered: 0 … T-1 are tokens, then come the tails before each segment. A
        # segment that continues another has that one's tail before it instead.
        inputs_before = tokens + np.arange(n * n_earlier).reshape(n, n_earlier)
        tails = np.empty_like(inputs_before)
        for depth, level in enumerate(self.levels):
            if depth:
                inputs_before[level] = tails[self.prefix[level]]
            source = np.arange(n_earlier) + self.lengths[level, None] - n_earlier
            # A segment shorter than the taps ends with inputs from before it.
            inherited = np.take_along_axis(
                inputs_before[level], np.clip(source + n_earlier, 0, n_earlier - 1), 1
            )
            tails[level] = np.where(source < 0, inherited, self.starts[level, None] + source)
        n_first = np.minimum(self.lengths, n_earlier)
        segment_of, offsets = np.repeat(np.arange(n), n_first), _ranges(n_first)
        first = self.starts[segment_of] + offsets
        source = offsets[:, None] + np.arange(n_earlier)
        inherited = np.take_along_axis(
            inputs_before[segment_of], np.minimum(source, n_earlier - 1), 1
        )
        sources = np.where(
            source < n_earlier, inherited, first[:, None] + np.arange(n_earlier) - n_earlier
        )
        return Edges(
            on_device(first, self.device),
            Inputs.from_sources(sources, tokens, self.device),
            Inputs.from_sources(tails, tokens, self.device),
        )

    def _chunks(self, size: int) -> Chunks:
        counts = -(-self.lengths // size)
        members = [level[np.argsort(-counts[level], kind="stable")] for level in self.levels]
        order, rank = self._order(members)
        levels, n_chunks, n_segments = [], 0, 0
        # chunk_numbers[segment, n] is the number of the segment's n-th chunk.
        chunk_numbers = np.zeros((len(counts), counts.max(initial=0)), int)
        for level in members:
            # Chunks are numbered step by step, so that each step is one slice of all chunks.
            n_in_step = (counts[level] > np.arange(counts[level].max(initial=0))[:, None]).sum(1)
            first = n_chunks + np.cumsum(n_in_step) - n_in_step
            chunk_numbers[level, : len(n_in_step)] = first + np.arange(len(level))[:, None]
            steps = tuple(
                slice(a, a + n) for a, n in zip(first.tolist(), n_in_step.tolist(), strict=True)
            )
            levels.append(
                Level(
                    slice(n_segments, n_segments + len(level)),
                    self._parents(level, rank, n_segments),
                    steps,
                )
            )
            n_chunks, n_segments = n_chunks + int(n_in_step.sum()), n_segments + len(level)
        offsets = _ranges(self.lengths)
        places = (
            chunk_numbers[np.repeat(np.arange(len(counts)), self.lengths), offsets // size] * size
            + offsets % size
        )
        tokens, padding = np.zeros(n_chunks * size, int), np.ones(n_chunks * size, bool)
        tokens[places], padding[places] = np.arange(len(places)), False
        return Chunks(
            size,
            tuple(levels),
            tokens=on_device(tokens, self.device),
            places=on_device(places, self.device),
            padding=on_device(padding.reshape(-1, 1, size), self.device),
            order=on_device(order, self.device),
            rank=on_device(rank, self.device),
        )

    def _by_head(self, size: int, heads: int, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
        chunks = self.chunks(size)
        head, part = (torch.arange(n, device=self.device)[:, None] for n in (heads, parts))
        tokens = (chunks.tokens.view(-1, 1, size) * parts + part.view(-1, 1, 1, 1)) * heads + head
        places = (chunks.places // size * heads * size + chunks.places % size).view(
            -1, 1, 1
        ) + head[:, 0] * size
        return tokens.flatten(), (places + part * (len(chunks.tokens) * heads)).flatten()

    def _runs(self) -> tuple[tuple[Run, ...], torch.Tensor, torch.Tensor]:
        _, rank = self._order(self.levels)
        runs, tokens, n_segments = [], [], 0
        for level in self.levels:
            lengths = self.lengths[level]
            assert lengths.all(), "segments without tokens"
            tokens.append(np.repeat(self.starts[level], lengths) + _ranges(lengths))
            cu_seqlens = np.cumsum([0, *lengths])
            run_level = Level(
                slice(n_segments, n_segments + len(level)),
                self._parents(level, rank, n_segments),
                (),
            )
            device_tokens, device_bounds = (
                on_device(tokens[-1], self.device),
                on_device(cu_seqlens, self.device),
            )
            runs.append(Run(device_tokens, device_bounds, torch.from_numpy(cu_seqlens), run_level))
            n_segments += len(level)
        token_places = np.argsort(np.concatenate(tokens))
        return tuple(runs), on_device(token_places, self.device), on_device(rank, self.device)

    def _order(self, levels: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return (the segments in the order of levels, the place of each segment in it)."""
        order = np.concatenate(levels)
        return order, np.argsort(order)

    def _parents(self, level: np.ndarray, rank: np.ndarray, n_earlier: int) -> torch.Tensor | None:
        """Return the places of a level's parents in the order of levels; the first has none."""
        return on_device(rank[self.prefix[level]], self.device) if n_earlier else None


def _ranges(lengths: np.ndarray) -> np.ndarray:
    """Return 0 … n-1 for each length n, end to end."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
