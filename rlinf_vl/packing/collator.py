"""Trajectories → one packed row (`MicroBatch`).

A row is a forest of segments in depth-first order. What sequences share is a segment that stands once, and each branch a
segment that continues it: level one is a group's prefix, below it are the longer prefixes that sequences of one trajectory
share. With `share_prompts` off, and for a group with one trajectory in the row, prompt and response are one segment.

Invariants: trajectories stay whole, with their images; each distinct image is encoded once; positions are computed per
sequence before packing; the placeholder count of every sequence is that of its images.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np

from rlinf_vl.models.families import Family
from rlinf_vl.packing.parts import row_part
from rlinf_vl.types import Group, ImageRef, MicroBatch, TokenSequence, Trajectory


@dataclass(frozen=True, slots=True)
class Member:
    """One trajectory of a group, and the advantage of each of its turns."""

    group: Group
    index: int
    advantages: Sequence[float]

    @property
    def trajectory(self) -> Trajectory:
        return self.group.trajectories[self.index]


@dataclass(frozen=True, slots=True)
class Collator:
    """Makes packed rows for one model.

    Attributes:
        pixels: image → float32 [t·h·w, d] patches; None leaves them out, for a trainer that has features by hash.
        pad_id: id of the filler tokens.
        pad_to: tokens every row is padded to (`actor.model.variable_seq_lengths` false); None pads nothing.
        share_prompts: whether the trajectories of one group share its prompt.
        part: (number, how many): the part of each row that is made, of so many equal ones.
    """

    family: Family
    image_token_id: int
    merge_size: int
    pixels: Callable[[ImageRef], np.ndarray] | None
    pad_id: int
    pad_to: int | None = None
    share_prompts: bool = True
    part: tuple[int, int] = (0, 1)

    def __call__(self, members: Sequence[Member], *, run_vision: bool) -> MicroBatch:
        """Pack `members` in order. With none, the row is two filler tokens without loss, which keeps a rank in step."""
        sequences = [member.trajectory.sequences for member in members]
        shown = {image.hash: (image, grid) for own in sequences for s in own for image, grid in s.images}
        features_before = np.cumsum([0, *(math.prod(grid) // self.merge_size**2 for _, grid in shown.values())])
        first_feature = dict(zip(shown, features_before.tolist(), strict=False))
        placed = [[self._placed(sequence, first_feature) for sequence in own] for own in sequences]
        row = _Row()
        for _, run in groupby(range(len(members)), key=lambda i: members[i].group.id if self.share_prompts else i):
            together = list(run)
            shared, parent = 0, -1
            if len(together) > 1 and (shared := members[together[0]].group.prefix_length):
                parent = row.add([p for i in together for p in placed[i]], 0, shared, -1)
            for i in together:
                self._branch(row, placed[i], shared, parent)
        self._pad(row)
        sampled = [(i, p, np.flatnonzero(p.sequence.loss_mask)) for i, own in enumerate(placed) for p in own]
        logprobs = [p.sequence.logprobs[t] for _, p, t in sampled if p.sequence.logprobs is not None]
        names = sampled[0][1].sequence.columns if sampled else ()
        features = np.concatenate([p.features[start:end] for p, start, end in row.segments])
        owners = np.repeat(np.array([i for i, _, _ in sampled], np.int64), [len(t) for _, _, t in sampled])
        corrupted = np.array([member.trajectory.corrupted for member in members], bool)
        advantages = [np.array(member.advantages, np.float32) for member in members]
        assert all(len(a) == len(m.trajectory.turns) for a, m in zip(advantages, members, strict=True))
        before = np.cumsum([0, *map(len, advantages)])
        turns = _concatenate(
            [n + before[i] for i, m in enumerate(members) for n in m.trajectory.turn_numbers()], np.int64
        )
        batch = MicroBatch(
            ids=np.concatenate([p.ids[start:end] for p, start, end in row.segments]),
            positions=np.concatenate([p.positions[:, start:end] for p, start, end in row.segments], axis=1),
            cu_seqlens=np.cumsum([0, *(end - start for _, start, end in row.segments)]),
            prefix=np.asarray(row.prefix),
            copies=np.asarray(row.copies),
            routes=_routes(row),
            predict=_concatenate([p.rows[t - 1] for _, p, t in sampled], np.int64),
            targets=_concatenate([p.ids[t] for _, p, t in sampled], np.int64),
            trajectories=owners,
            turns=turns,
            advantages=_concatenate(advantages, np.float32)[turns],
            rollout_logprobs=_concatenate(logprobs, np.float32) if len(logprobs) == len(sampled) else None,
            versions=_concatenate([p.sequence.versions[t] for _, p, t in sampled], np.int32),
            columns={name: np.concatenate([p.sequence.columns[name][t] for _, p, t in sampled]) for name in names},
            images=tuple(shown),
            pixel_values=None,
            grids=np.array([grid for _, grid in shown.values()], np.int64).reshape(-1, 3),
            image_positions=np.flatnonzero(features >= 0),
            image_features=features[features >= 0],
            corrupted=corrupted[owners] if corrupted.any() else None,
            run_vision=run_vision,
        )
        if self.part[1] > 1:
            batch = row_part(batch, *self.part, self.merge_size)
        if self.pixels is None or not batch.images:
            return batch
        return replace(batch, pixel_values=np.concatenate([self.pixels(shown[name][0]) for name in batch.images]))

    def _placed(self, sequence: TokenSequence, first_feature: Mapping[str, int]) -> "_Placed":
        """A sequence that is not in the row yet; the features of its images begin at `first_feature`, by hash."""
        ids = sequence.ids.astype(np.int64)
        grids = np.array([grid for _, grid in sequence.images], np.int64).reshape(-1, 3)
        positions = self.family.positions(ids, self.image_token_id, grids, self.merge_size)
        starts = np.array([first_feature[image.hash] for image, _ in sequence.images], np.int64)
        counts = grids.prod(axis=1) // self.merge_size**2
        features = np.full(len(ids), -1)
        # one image's features follow each other: their numbers are its first plus 0, 1, …
        features[ids == self.image_token_id] = np.repeat(starts - np.cumsum(counts) + counts, counts) + np.arange(
            counts.sum()
        )
        return _Placed(sequence, ids, positions, features, np.full(len(ids), -1))

    def _branch(self, row: "_Row", sequences: Sequence["_Placed"], start: int, parent: int) -> None:
        """Add what follows token `start` of sequences that share everything before it, which ends with segment `parent`."""
        waiting = [placed for placed in sequences if len(placed.ids) > start]
        while waiting:
            first = waiting[0].sequence
            ends = [first.shared_length(placed.sequence, self.image_token_id) for placed in waiting]
            together = [placed for placed, end in zip(waiting, ends, strict=True) if end > start]
            waiting = [placed for placed, end in zip(waiting, ends, strict=True) if end <= start]
            end = min(end for end in ends if end > start)
            self._branch(row, together, end, row.add(together, start, end, parent))

    def _pad(self, row: "_Row") -> None:
        """Append a segment of filler where the row is empty or its length is fixed."""
        n = (self.pad_to or 0) - row.tokens if row.segments else max(self.pad_to or 0, 2)
        assert self.pad_to is None or n >= 0, f"{row.tokens} tokens exceed the row's {self.pad_to}"
        if n > 0:
            filler = TokenSequence(np.full(n, self.pad_id), np.zeros(n, bool), None, np.full(n, -1))
            row.add([self._placed(filler, {})], 0, n, -1)
            row.copies[-1] = 0


@dataclass(frozen=True, slots=True)
class _Placed:
    """A sequence on its way into a row: ids int64 [T], positions int64 [4, T], `features` int64 [T] (which row of the images'
    features stands at a placeholder, -1 elsewhere), and `rows` int64 [T], each token's place in the row once it is there."""

    sequence: TokenSequence
    ids: np.ndarray
    positions: np.ndarray
    features: np.ndarray
    rows: np.ndarray


@dataclass(slots=True)
class _Row:
    """A row in the making: its segments, each tokens `start` … `end` of a sequence that has them, and which one each continues."""

    tokens: int = 0
    segments: list[tuple[_Placed, int, int]] = field(default_factory=list)
    prefix: list[int] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)

    def add(self, sequences: Sequence[_Placed], start: int, end: int, parent: int) -> int:
        """Append tokens `start` … `end`, which these sequences share, behind segment `parent`; returns the new one's number."""
        for placed in sequences:
            placed.rows[start:end] = np.arange(self.tokens, self.tokens + end - start)
        self.tokens += end - start
        self.segments.append((sequences[0], start, end))
        self.prefix.append(parent)
        self.copies.append(len(sequences))
        return len(self.prefix) - 1


def _routes(row: _Row) -> np.ndarray | None:
    """[T, L·k]; 0 where a sequence has none."""
    known = next((p.sequence.routes for p, _, _ in row.segments if p.sequence.routes is not None), None)
    if known is None:
        return None
    none = np.zeros((row.tokens, known.shape[1]), known.dtype)
    own = [none if p.sequence.routes is None else p.sequence.routes for p, _, _ in row.segments]
    return np.concatenate([routes[start:end] for routes, (_, start, end) in zip(own, row.segments, strict=True)])


def _concatenate(parts: list[np.ndarray], dtype) -> np.ndarray:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)
