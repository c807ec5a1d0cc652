"""Trajectories → one packed row (`MicroBatch`).

Invariants: trajectories move whole, with their images; each distinct image's pixels are in the row once; positions are
computed per trajectory before packing; the placeholder count of every trajectory is that of its images.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
        pixels: image → float32 [t·h·w, d] patches.
        pad_id: id of the filler tokens.
        pad_to: tokens every row is padded to (`actor.model.variable_seq_lengths` false); None pads nothing.
    """

    family: Family
    image_token_id: int
    merge_size: int
    pixels: Callable[[ImageRef], np.ndarray]
    pad_id: int
    pad_to: int | None = None

    def __call__(self, members: Sequence[Member], *, run_vision: bool) -> MicroBatch:
        """Pack `members` in order. With none, the row is two filler tokens without loss, which keeps a rank in step."""
        ids, positions, lengths = [], [], []
        predict, targets, segments, advantages, logprobs = [], [], [], [], []
        patches: dict[str, np.ndarray] = {}
        grids: list[np.ndarray] = []
        feature_start: dict[str, int] = {}
        image_features: list[np.ndarray] = []
        n_features, cursor = 0, 0
        for segment, member in enumerate(members):
            group, trajectory = member.group, member.group.trajectories[member.index]
            row = np.concatenate([group.prompt_ids, trajectory.ids]).astype(np.int64)
            ids.append(row)
            positions.append(self.family.positions(row, self.image_token_id, group.image_grids, self.merge_size))
            lengths.append(len(row))
            sampled = cursor + len(group.prompt_ids) + np.flatnonzero(trajectory.response_mask)
            predict.append(sampled - 1)
            targets.append(trajectory.ids[trajectory.response_mask].astype(np.int64))
            segments.append(np.full(len(sampled), segment))
            advantages.append(np.full(len(sampled), member.advantage, np.float32))
            if trajectory.logprobs is not None:
                logprobs.append(trajectory.logprobs[trajectory.response_mask])
            for image, grid in zip(group.images, group.image_grids.astype(np.int64), strict=True):
                tokens = int(grid.prod()) // self.merge_size**2
                if image.hash not in patches:
                    patches[image.hash] = self.pixels(image)
                    assert len(patches[image.hash]) == int(grid.prod()), f"image {image.hash}: pixels do not fit {grid}"
                    feature_start[image.hash] = n_features
                    grids.append(grid)
                    n_features += tokens
                image_features.append(feature_start[image.hash] + np.arange(tokens))
            cursor += len(row)
        self._pad(ids, positions, lengths)
        row = np.concatenate(ids)
        return MicroBatch(
            ids=row,
            positions=np.concatenate(positions, axis=1),
            cu_seqlens=np.cumsum([0, *lengths]),
            predict=_concatenate(predict, np.int64),
            targets=_concatenate(targets, np.int64),
            segments=_concatenate(segments, np.int64),
            advantages=_concatenate(advantages, np.float32),
            rollout_logprobs=_concatenate(logprobs, np.float32) if len(logprobs) == len(members) else None,
            pixel_values=np.concatenate(list(patches.values())) if patches else None,
            grids=np.stack(grids) if grids else np.zeros((0, 3), np.int64),
            image_positions=np.flatnonzero(row == self.image_token_id) if patches else np.zeros(0, np.int64),
            image_features=_concatenate(image_features, np.int64),
            run_vision=run_vision,
        )

    def _pad(self, ids: list, positions: list, lengths: list) -> None:
        """Append a segment of filler where the row is empty or its length is fixed."""
        filler = (self.pad_to or 0) - sum(lengths) if lengths else max(self.pad_to or 0, 2)
        assert self.pad_to is None or filler >= 0, f"{sum(lengths)} tokens exceed the row's {self.pad_to}"
        if filler > 0:
            ids.append(np.full(filler, self.pad_id, np.int64))
            positions.append(np.broadcast_to(np.arange(filler), (4, filler)))
            lengths.append(filler)


def _concatenate(parts: list[np.ndarray], dtype) -> np.ndarray:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)
