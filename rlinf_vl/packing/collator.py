"""Trajectories → one packed row (`MicroBatch`).

A row is a forest of segments in depth-first order. What sequences share is a segment that stands once, and each branch a
segment that continues it: level one is a group's prefix, below it are the longer prefixes that sequences of one trajectory
share. With `share_prompts` off, and for a group with one trajectory in the row, prompt and response are one segment.

Invariants: trajectories stay whole, with their images; each distinct image is encoded once; positions are computed per
sequence before packing; the placeholder count of every sequence is that of its images.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from rlinf_vl.models.families import Family
from rlinf_vl.types import Grid, Group, ImageRef, MicroBatch, TokenSequence


@dataclass(frozen=True, slots=True)
class Member:
    """One trajectory of a group, and its advantage."""

    group: Group
    index: int
    advantage: float


@dataclass(frozen=True, slots=True)
class Collator:
    """Makes packed rows for one model.

    Attributes:
        pixels: image → float32 [t·h·w, d] patches; None leaves them out, for a trainer that has features by hash.
        pad_id: id of the filler tokens.
        pad_to: tokens every row is padded to (`actor.model.variable_seq_lengths` false); None pads nothing.
        share_prompts: whether the trajectories of one group share its prompt.
    """

    family: Family
    image_token_id: int
    merge_size: int
    pixels: Callable[[ImageRef], np.ndarray] | None
    pad_id: int
    pad_to: int | None = None
    share_prompts: bool = True

    def __call__(self, members: Sequence[Member], *, run_vision: bool) -> MicroBatch:
        """Pack `members` in order. With none, the row is two filler tokens without loss, which keeps a rank in step."""
        row = _Row()
        for _, run in groupby(range(len(members)), key=lambda i: members[i].group.id if self.share_prompts else i):
            owners = list(run)
            self._add(row, [members[i] for i in owners], owners)
        self._pad(row)
        pixel_values = None
        if self.pixels is not None and row.images:
            pixel_values = np.concatenate([self.pixels(image) for image in row.images.values()])
        sampled = [(placed, np.flatnonzero(placed.sequence.loss_mask)) for placed in row.placed]
        logprobs = [placed.sequence.logprobs[t] for placed, t in sampled if placed.sequence.logprobs is not None]
        names = row.placed[0].sequence.columns if row.placed else ()
        features = np.concatenate(row.features)
        owners = np.repeat(np.array(row.owners, np.int64), [len(t) for _, t in sampled])
        return MicroBatch(
            ids=np.concatenate(row.ids),
            positions=np.concatenate(row.positions, axis=1),
            cu_seqlens=np.cumsum([0, *map(len, row.ids)]),
            prefix=np.asarray(row.prefix),
            predict=_concatenate([placed.rows[t - 1] for placed, t in sampled], np.int64),
            targets=_concatenate([placed.ids[t] for placed, t in sampled], np.int64),
            trajectories=owners,
            advantages=np.array([member.advantage for member in members], np.float32)[owners],
            rollout_logprobs=_concatenate(logprobs, np.float32) if len(logprobs) == len(sampled) else None,
            columns={n: np.concatenate([placed.sequence.columns[n][t] for placed, t in sampled]) for n in names},
            images=tuple(row.images),
            pixel_values=pixel_values,
            grids=np.array(row.grids, np.int64).reshape(-1, 3),
            image_positions=np.flatnonzero(features >= 0),
            image_features=features[features >= 0],
            run_vision=run_vision,
        )

    def _add(self, row: "_Row", members: Sequence[Member], owners: Sequence[int]) -> None:
        """Trajectories of one group, of which the row holds what they share once; `owners` are their numbers in the row."""
        group = members[0].group
        own = [[self._placed(row, s) for s in group.trajectories[member.index].sequences] for member in members]
        together = [placed for sequences in own for placed in sequences]
        start, parent = 0, -1
        if len(members) > 1 and group.prefix_length:
            start, parent = group.prefix_length, row.add_shared(together, 0, group.prefix_length, -1)
        for owner, sequences in zip(owners, own, strict=True):
            self._branch(row, sequences, start, parent)
            row.owners += [owner] * len(sequences)
        row.placed += together

    def _branch(self, row: "_Row", sequences: Sequence["_Placed"], start: int, parent: int) -> None:
        """What follows token `start` of sequences that share everything before it, which ends with segment `parent`."""
        waiting = [placed for placed in sequences if len(placed.ids) > start]
        while waiting:
            first = waiting[0].sequence
            ends = [first.shared_length(placed.sequence, self.image_token_id) for placed in waiting]
            together = [placed for placed, end in zip(waiting, ends, strict=True) if end > start]
            waiting = [placed for placed, end in zip(waiting, ends, strict=True) if end <= start]
            end = min(end for end in ends if end > start)
            segment = row.add_shared(together, start, end, parent)
            self._branch(row, together, end, segment)

    def _placed(self, row: "_Row", sequence: TokenSequence) -> "_Placed":
        """A sequence whose images are in the row, and whose tokens are not yet."""
        ids, grids = (
            sequence.ids.astype(np.int64),
            np.array([grid for _, grid in sequence.images], np.int64).reshape(-1, 3),
        )
        positions = self.family.positions(ids, self.image_token_id, grids, self.merge_size)
        shown = []
        for (image, grid), patches in zip(sequence.images, grids.prod(axis=1).tolist(), strict=True):
            tokens = patches // self.merge_size**2
            if image.hash not in row.images:
                row.images[image.hash] = image
                row.grids.append(grid)
                row.first_feature[image.hash] = row.n_features
                row.n_features += tokens
            shown.append(row.first_feature[image.hash] + np.arange(tokens))
        features = np.full(len(ids), -1)
        features[ids == self.image_token_id] = _concatenate(shown, np.int64)
        return _Placed(sequence, ids, positions, features, np.full(len(ids), -1))

    def _pad(self, row: "_Row") -> None:
        """Append a segment of filler where the row is empty or its length is fixed."""
        filler = (self.pad_to or 0) - row.tokens if row.ids else max(self.pad_to or 0, 2)
        assert self.pad_to is None or filler >= 0, f"{row.tokens} tokens exceed the row's {self.pad_to}"
        if filler > 0:
            row.add(np.full(filler, self.pad_id), np.tile(np.arange(filler), (4, 1)), np.full(filler, -1), parent=-1)


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
    """A row in the making: one entry per segment in `ids`, `positions`, `features` and `prefix`, per sequence in `placed` and
    `owners` (its trajectory's number), per distinct image in the others."""

    tokens: int = 0
    ids: list[np.ndarray] = field(default_factory=list)
    positions: list[np.ndarray] = field(default_factory=list)
    features: list[np.ndarray] = field(default_factory=list)
    prefix: list[int] = field(default_factory=list)
    placed: list[_Placed] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    images: dict[str, ImageRef] = field(default_factory=dict)
    grids: list[Grid] = field(default_factory=list)
    first_feature: dict[str, int] = field(default_factory=dict)
    n_features: int = 0

    def add(self, ids: np.ndarray, positions: np.ndarray, features: np.ndarray, parent: int) -> int:
        """Append a segment that continues segment `parent`; returns its number."""
        self.ids.append(ids)
        self.positions.append(positions)
        self.features.append(features)
        self.prefix.append(parent)
        self.tokens += len(ids)
        return len(self.prefix) - 1

    def add_shared(self, sequences: Sequence[_Placed], start: int, end: int, parent: int) -> int:
        """Append tokens `start` … `end`, which these sequences share, as a segment; returns its number."""
        for placed in sequences:
            placed.rows[start:end] = np.arange(self.tokens, self.tokens + end - start)
        first = sequences[0]
        return self.add(first.ids[start:end], first.positions[:, start:end], first.features[start:end], parent)


def _concatenate(parts: list[np.ndarray], dtype) -> np.ndarray:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)
