"""Trajectories → one packed row (`MicroBatch`).

Invariants: trajectories move whole, with their images; a group's prompt, and each distinct image, is in the row once (with
`share_prompts` off, and where a group has one trajectory in the row, prompt and response are one segment); positions are
computed per trajectory before packing; the placeholder count of every trajectory is that of its images.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from rlinf_vl.models.families import Family
from rlinf_vl.types import Group, ImageRef, MicroBatch


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
        for _, run in groupby(members, key=lambda member: member.group.id):
            together = list(run)
            if self.share_prompts and len(together) > 1:
                self._add_shared(row, together)
            else:
                for member in together:
                    self._add_alone(row, member)
        self._pad(row)
        ids = np.concatenate(row.ids)
        pixel_values = None
        if self.pixels is not None and row.images:
            pixel_values = np.concatenate([self.pixels(image) for image in row.images.values()])
        return MicroBatch(
            ids=ids,
            positions=np.concatenate(row.positions, axis=1),
            cu_seqlens=np.cumsum([0, *map(len, row.ids)]),
            prefix=np.asarray(row.prefix),
            predict=_concatenate(row.predict, np.int64),
            targets=_concatenate(row.targets, np.int64),
            trajectories=np.repeat(np.arange(len(members)), [len(t) for t in row.targets]),
            advantages=np.repeat(np.array([m.advantage for m in members], np.float32), [len(t) for t in row.targets]),
            rollout_logprobs=_concatenate(row.logprobs, np.float32) if len(row.logprobs) == len(members) else None,
            images=tuple(row.images),
            pixel_values=pixel_values,
            grids=np.stack(row.grids) if row.grids else np.zeros((0, 3), np.int64),
            image_positions=np.flatnonzero(ids == self.image_token_id) if row.images else np.zeros(0, np.int64),
            image_features=_concatenate(row.image_features, np.int64),
            run_vision=run_vision,
        )

    def _add_shared(self, row: "_Row", members: Sequence[Member]) -> None:
        """The prompt, then every response as a segment that continues it."""
        group = members[0].group
        length = len(group.prompt_ids)
        self._add_images(row, group)
        prompt, last = len(row.ids), row.tokens + length - 1
        for m, member in enumerate(members):
            ids, positions = self._whole(member)
            if m == 0:
                row.add(ids[:length], positions[:, :length])
            start = row.tokens
            row.add(ids[length:], positions[:, length:], prefix=prompt)
            trajectory = group.trajectories[member.index]
            before = start - 1 + np.flatnonzero(trajectory.response_mask)
            row.predict_from(trajectory, np.where(before < start, last, before))

    def _add_alone(self, row: "_Row", member: Member) -> None:
        """Prompt and response as one segment."""
        start = row.tokens + len(member.group.prompt_ids)
        self._add_images(row, member.group)
        row.add(*self._whole(member))
        trajectory = member.group.trajectories[member.index]
        row.predict_from(trajectory, start - 1 + np.flatnonzero(trajectory.response_mask))

    def _whole(self, member: Member) -> tuple[np.ndarray, np.ndarray]:
        """(ids [L], positions [4, L]) of prompt and response, unpacked."""
        group = member.group
        ids = np.concatenate([group.prompt_ids, group.trajectories[member.index].ids]).astype(np.int64)
        return ids, self.family.positions(ids, self.image_token_id, group.image_grids, self.merge_size)

    def _add_images(self, row: "_Row", group: Group) -> None:
        for image, grid in zip(group.images, group.image_grids.astype(np.int64), strict=True):
            tokens = int(grid.prod()) // self.merge_size**2
            if image.hash not in row.images:
                row.images[image.hash] = image
                row.feature_start[image.hash] = row.features
                row.grids.append(grid)
                row.features += tokens
            row.image_features.append(row.feature_start[image.hash] + np.arange(tokens))

    def _pad(self, row: "_Row") -> None:
        """Append a segment of filler where the row is empty or its length is fixed."""
        filler = (self.pad_to or 0) - row.tokens if row.ids else max(self.pad_to or 0, 2)
        assert self.pad_to is None or filler >= 0, f"{row.tokens} tokens exceed the row's {self.pad_to}"
        if filler > 0:
            row.add(np.full(filler, self.pad_id, np.int64), np.broadcast_to(np.arange(filler), (4, filler)))


@dataclass(slots=True)
class _Row:
    """A row in the making: one list entry per segment, per trajectory, per image."""

    tokens: int = 0
    features: int = 0
    ids: list[np.ndarray] = field(default_factory=list)
    positions: list[np.ndarray] = field(default_factory=list)
    prefix: list[int] = field(default_factory=list)
    predict: list[np.ndarray] = field(default_factory=list)
    targets: list[np.ndarray] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    images: dict[str, ImageRef] = field(default_factory=dict)
    grids: list[np.ndarray] = field(default_factory=list)
    feature_start: dict[str, int] = field(default_factory=dict)
    image_features: list[np.ndarray] = field(default_factory=list)

    def add(self, ids: np.ndarray, positions: np.ndarray, prefix: int = -1) -> None:
        self.ids.append(ids)
        self.positions.append(positions)
        self.prefix.append(prefix)
        self.tokens += len(ids)

    def predict_from(self, trajectory, where: np.ndarray) -> None:
        """The sampled tokens of a trajectory, predicted at these positions of the row."""
        self.predict.append(where)
        self.targets.append(trajectory.ids[trajectory.response_mask].astype(np.int64))
        if trajectory.logprobs is not None:
            self.logprobs.append(trajectory.logprobs[trajectory.response_mask])


def _concatenate(parts: list[np.ndarray], dtype) -> np.ndarray:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)
