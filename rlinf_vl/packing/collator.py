"""Building of one packed row (`MicroBatch`) from trajectories.

A row is a forest of segments in depth-first order. A prefix that sequences share is one segment,
and each branch is a segment that continues it. A root is the prefix of a group; below it are the
longer prefixes that sequences of one trajectory share. With `share_prompts` off, and for a group
with one trajectory in the row, prompt and response are one segment.

Invariants:

- Trajectories stay whole, with their images.
- Each distinct image is encoded once.
- Positions are computed per sequence, before packing.
- Every sequence has as many image placeholders as its images need.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby

import numpy as np

from rlinf_vl.models.family import Family
from rlinf_vl.models.image_tokens import ImageTokens, runs_of_images
from rlinf_vl.packing.parts import row_part
from rlinf_vl.types import (
    Grid,
    Group,
    ImageRef,
    MicroBatch,
    TokenSequence,
    Trajectory,
    TurnAdvantages,
)


@dataclass(frozen=True, slots=True)
class Member:
    """One trajectory of a group, with the advantage of each of its turns, or of each token."""

    group: Group
    index: int
    advantages: TurnAdvantages

    @property
    def trajectory(self) -> Trajectory:
        return self.group.trajectories[self.index]


@dataclass(frozen=True, slots=True)
class Collator:
    """A builder of packed rows for one model.

    Attributes:
        pixels: function from an image to its patches, float32 [t·h·w, d]; None leaves pixels out,
            for a trainer that has image features by hash.
        pad_id: the id of filler tokens.
        pad_to: the tokens to which every row is padded (`actor.model.variable_seq_lengths` false);
            None for no padding.
        share_prompts: whether the trajectories of one group share its prompt.
        part: (k, n) builds only the k-th of n equal parts of each row, k from 0 on.
    """

    family: Family
    image_tokens: ImageTokens
    pixels: Callable[[ImageRef], np.ndarray] | None
    pad_id: int
    pad_to: int | None = None
    share_prompts: bool = True
    part: tuple[int, int] = (0, 1)

    def __call__(self, members: Sequence[Member], *, run_vision: bool) -> MicroBatch:
        """Pack `members` in order.

        Without members, the row is two filler tokens without loss: a rank must take part in every
        step, since its collectives have to match those of the other ranks.
        """
        images = _distinct_images(members)
        grids = np.array([grid for _, grid in images.values()], np.int64).reshape(-1, 3)
        features_before = np.cumsum([0, *self.image_tokens(grids)])
        first_feature = dict(zip(images, features_before.tolist(), strict=False))
        place = partial(self._place, first_feature=first_feature)
        placed = [list(map(place, member.trajectory.sequences)) for member in members]
        row = self._row(members, placed)
        # (trajectory, sequence, indices of its sampled tokens), in the order of the loss's tokens
        sampled = [
            (i, p, np.flatnonzero(p.sequence.loss_mask))
            for i, sequences in enumerate(placed)
            for p in sequences
        ]
        logprobs = [
            p.sequence.logprobs[t] for _, p, t in sampled if p.sequence.logprobs is not None
        ]
        bounds = np.cumsum([0, *(end - start for _, start, end in row.segments)])
        features = np.concatenate([p.features[start:end] for p, start, end in row.segments])
        owners = np.repeat(
            np.array([i for i, _, _ in sampled], np.int64), [len(t) for _, _, t in sampled]
        )
        corrupted = np.array([member.trajectory.corrupted for member in members], bool)
        turns, advantages = _turns(members)
        batch = MicroBatch(
            ids=np.concatenate([p.ids[start:end] for p, start, end in row.segments]),
            positions=np.concatenate(
                [p.positions[:, start:end] for p, start, end in row.segments], axis=1
            ),
            cu_seqlens=bounds,
            prefix=np.asarray(row.prefix),
            copies=np.asarray(row.copies),
            row_columns=_columns([(p.sequence, slice(a, b)) for p, a, b in row.segments]),
            # The hidden state one token earlier predicts a token.
            predict=_concatenate([p.row_index[t - 1] for _, p, t in sampled], np.int64),
            targets=_concatenate([p.ids[t] for _, p, t in sampled], np.int64),
            trajectories=owners,
            turns=turns,
            advantages=advantages,
            rollout_logprobs=_concatenate(logprobs, np.float32)
            if len(logprobs) == len(sampled)
            else None,
            versions=_concatenate([p.sequence.versions[t] for _, p, t in sampled], np.int32),
            columns=_columns([(p.sequence, t) for _, p, t in sampled]),
            images=tuple(images),
            pixel_values=None,
            grids=grids,
            image_positions=np.flatnonzero(features >= 0),
            image_features=features[features >= 0],
            image_runs=runs_of_images(features >= 0, bounds),
            corrupted=corrupted[owners] if corrupted.any() else None,
            run_vision=run_vision,
        )
        if self.part[1] > 1:
            batch = row_part(batch, *self.part, self.image_tokens)
        if self.pixels is None or not batch.images:
            return batch
        return replace(
            batch,
            pixel_values=np.concatenate([self.pixels(images[name][0]) for name in batch.images]),
        )

    def _row(
        self, members: Sequence[Member], placed: Sequence[Sequence["_PlacedSequence"]]
    ) -> "_RowBuilder":
        """Build the row's segments from the members' sequences, and its filler."""
        row = _RowBuilder()
        # A plan lists a group's items side by side, so one pass finds the members of each group.
        for _, run in groupby(
            range(len(members)), key=lambda i: members[i].group.id if self.share_prompts else i
        ):
            group_members = list(run)
            shared, parent = 0, -1
            if len(group_members) > 1 and (shared := members[group_members[0]].group.prefix_length):
                parent = row.add([p for i in group_members for p in placed[i]], 0, shared, -1)
            for i in group_members:
                self._add_branches(row, placed[i], shared, parent)
        self._pad(row)
        return row

    def _place(
        self, sequence: TokenSequence, first_feature: Mapping[str, int]
    ) -> "_PlacedSequence":
        """Compute a sequence's positions and image features, before it is added to a row.

        `first_feature` maps an image's hash to the row's first feature of that image.
        """
        ids = sequence.ids.astype(np.int64)
        grids = np.array([grid for _, grid in sequence.images], np.int64).reshape(-1, 3)
        image_tokens = self.image_tokens.with_times(image for image, _ in sequence.images)
        positions = self.family.positions(ids, grids, image_tokens)
        starts = np.array([first_feature[image.hash] for image, _ in sequence.images], np.int64)
        counts = self.image_tokens(grids)
        features = np.full(len(ids), -1)
        # The features of one image are contiguous: its first, plus 0, 1, …
        features[self.image_tokens.mask(ids)] = np.repeat(
            starts - np.cumsum(counts) + counts, counts
        ) + np.arange(counts.sum())
        return _PlacedSequence(sequence, ids, positions, features, np.full(len(ids), -1))

    def _add_branches(
        self, row: "_RowBuilder", sequences: Sequence["_PlacedSequence"], start: int, parent: int
    ) -> None:
        """Add the tokens from `start` on of sequences that share all tokens before it.

        The shared tokens end with segment `parent`.
        """
        pending = [placed for placed in sequences if len(placed.ids) > start]
        while pending:
            # One branch: the first sequence and all that share more than `start` tokens with it, up
            # to the shortest shared prefix among them. The recursion splits them there.
            first = pending[0].sequence
            ends = [
                first.shared_length(placed.sequence, self.image_tokens.placeholder_ids)
                for placed in pending
            ]
            branch = [placed for placed, end in zip(pending, ends, strict=True) if end > start]
            pending = [placed for placed, end in zip(pending, ends, strict=True) if end <= start]
            end = min(end for end in ends if end > start)
            self._add_branches(row, branch, end, row.add(branch, start, end, parent))

    def _pad(self, row: "_RowBuilder") -> None:
        """Append a segment of filler if the row is empty or its length is fixed."""
        n = (self.pad_to or 0) - row.tokens if row.segments else max(self.pad_to or 0, 2)
        assert self.pad_to is None or n >= 0, f"{row.tokens} tokens exceed the row's {self.pad_to}"
        if n > 0:
            filler = TokenSequence(np.full(n, self.pad_id), np.zeros(n, bool), None, np.full(n, -1))
            row.add([self._place(filler, {})], 0, n, -1)
            row.copies[-1] = 0  # a filler stands for no sequence


@dataclass(frozen=True, slots=True)
class _PlacedSequence:
    """A sequence of T tokens, with the columns that a row needs of it."""

    sequence: TokenSequence
    ids: np.ndarray  # int64 [T]
    positions: np.ndarray  # int64 [4, T]
    features: np.ndarray  # int64 [T], at a placeholder the index of its image feature, -1 elsewhere
    row_index: np.ndarray  # int64 [T], index of each token in the row; -1 until it is added


@dataclass(slots=True)
class _RowBuilder:
    """The segments of a row that is being built."""

    tokens: int = 0
    #: (sequence, start, end): a segment's tokens are `start` … `end` of that sequence.
    segments: list[tuple[_PlacedSequence, int, int]] = field(default_factory=list)
    prefix: list[int] = field(default_factory=list)  # the segment that each continues, -1 for none
    copies: list[int] = field(default_factory=list)  # the number of sequences that share each

    def add(self, sequences: Sequence[_PlacedSequence], start: int, end: int, parent: int) -> int:
        """Append tokens `start` … `end` of these sequences, which share them, as one segment.

        Returns:
            The number of the new segment, which continues segment `parent`.
        """
        for placed in sequences:
            placed.row_index[start:end] = np.arange(self.tokens, self.tokens + end - start)
        self.tokens += end - start
        self.segments.append((sequences[0], start, end))
        self.prefix.append(parent)
        self.copies.append(len(sequences))
        return len(self.prefix) - 1


def _distinct_images(members: Sequence[Member]) -> dict[str, tuple[ImageRef, Grid]]:
    """Return the images of the row with their grids, by hash, in the order of their first use."""
    images: dict[str, tuple[ImageRef, Grid]] = {}
    for member in members:
        for sequence in member.trajectory.sequences:
            images.update({image.hash: (image, grid) for image, grid in sequence.images})
    return images


def _turns(members: Sequence[Member]) -> tuple[np.ndarray, np.ndarray]:
    """Return the turn of each sampled token, int64, and its advantage, float32.

    Turns are numbered over the whole row: those of earlier trajectories come first.
    """
    assert all(len(m.advantages) == len(m.trajectory.turns) for m in members)
    by_turn = [value for member in members for value in member.advantages]
    turns_before = np.cumsum([0, *(len(member.advantages) for member in members)])
    turns = _concatenate(
        [n + turns_before[i] for i, m in enumerate(members) for n in m.trajectory.turn_numbers()],
        np.int64,
    )
    if not any(isinstance(value, np.ndarray) for value in by_turn):
        return turns, np.array(by_turn, np.float32)[turns]
    advantages = np.zeros(len(turns), np.float32)
    for number, value in enumerate(by_turn):
        advantages[turns == number] = value
    return turns, advantages


def _columns(tokens: Sequence[tuple[TokenSequence, slice | np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the columns of these tokens of sequences, end to end, [n, …].

    A column is 0 where a sequence lacks it.
    """
    examples: dict[str, np.ndarray] = {}
    for sequence, _ in tokens:
        examples |= sequence.columns
    columns: dict[str, np.ndarray] = {}
    for name, example in examples.items():
        arrays = []
        for sequence, indices in tokens:
            column = sequence.columns.get(name)
            if column is None:
                column = np.zeros((len(sequence.ids), *example.shape[1:]), example.dtype)
            arrays.append(column[indices])
        columns[name] = np.concatenate(arrays)
    return columns


def _concatenate(parts: list[np.ndarray], dtype) -> np.ndarray:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)
