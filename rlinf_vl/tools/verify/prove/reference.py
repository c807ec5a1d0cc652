"""transformers' own forward of one sequence at a time: what every proof compares with."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from rlinf_vl.data.clips import frame_refs, is_clip
from rlinf_vl.data.images import decode
from rlinf_vl.models.encoders import encode_square_patches, squares
from rlinf_vl.models.family import Family
from rlinf_vl.models.image_tokens import ImageTokens, runs_of_images
from rlinf_vl.packing.collator import Member as PackedTrajectory
from rlinf_vl.tools.verify.prove.member import Member
from rlinf_vl.tools.verify.prove.problems import INTERVAL
from rlinf_vl.types import Grid, Group, ImageRef, TokenSequence


def pixels_of(member: Member, image: ImageRef) -> np.ndarray:
    """Return the patches of a picture or a clip, float32 [P, d]."""
    if is_clip(image):
        assert member.videos is not None
        return member.videos.patches([decode(frame) for frame in frame_refs(image)])
    assert member.images is not None
    return member.images.patches(decode(image))


def logprobs_of(member: Member, model: PreTrainedModel, sequence: TokenSequence) -> torch.Tensor:
    """Return the log-probability of each sampled token of a sequence, float32 [R].

    Positions, masks and image features are transformers' own.
    """
    clip_seconds = 0.0
    if member.videos is not None:
        clip_seconds = INTERVAL * member.config.vision_config.temporal_patch_size
    inputs = forward_inputs(
        model,
        member.family,
        member.image_tokens,
        partial(pixels_of, member),
        sequence,
        lambda clip: clip_seconds,
    )
    logits = model(**inputs).logits[0].float()
    logits = logits.masked_fill(torch.from_numpy(member.banned), -torch.inf)
    sampled = torch.from_numpy(np.flatnonzero(sequence.loss_mask))
    return logits.log_softmax(-1)[sampled - 1, inputs["input_ids"][0, sampled]]


def forward_inputs(
    model: PreTrainedModel,
    family: Family,
    image_tokens: ImageTokens,
    pixels: Callable[[ImageRef], np.ndarray],
    sequence: TokenSequence,
    clip_seconds: Callable[[ImageRef], float],
) -> dict[str, Any]:
    """Return the arguments of transformers' own forward of one sequence, unpacked.

    `pixels` returns an image's patches, `clip_seconds` the seconds of a clip's temporal patch.
    """
    ids = torch.from_numpy(sequence.ids.astype(np.int64))[None]
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    parameters = inspect.signature(model.forward).parameters
    if sequence.images:
        pictures = [(pixels(image), grid) for image, grid in sequence.images if not is_clip(image)]
        clips = [(image, grid) for image, grid in sequence.images if is_clip(image)]
        if pictures:
            inputs |= _picture_inputs(family, model, pictures)
        if clips:
            patches = [pixels(image) for image, _ in clips]
            inputs["pixel_values_videos"] = torch.from_numpy(np.concatenate(patches))
            inputs["video_grid_thw"] = torch.tensor([grid for _, grid in clips])
            if "second_per_grid_ts" in parameters:
                seconds = [clip_seconds(image) for image, _ in clips]
                inputs["second_per_grid_ts"] = torch.tensor(seconds)
        for key in ("mm_token_type_ids", "token_type_ids"):
            if key in parameters:
                videos = 2 * (ids == image_tokens.video_id).int()
                inputs[key] = (ids == image_tokens.id).int() + videos
        if clips and hasattr(model.model, "get_rope_index"):
            names = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts", "mm_token_type_ids")
            grid_inputs = {name: inputs[name] for name in names if name in inputs}
            positions, _ = model.model.get_rope_index(ids, **grid_inputs)
            inputs["position_ids"] = behind_clips(positions, ids[0] == image_tokens.video_id)
    if hasattr(model.model, "rope_deltas"):  # of the sequence before
        model.model.rope_deltas = None
    return inputs


def behind_clips(positions: torch.Tensor, is_clip: torch.Tensor) -> torch.Tensor:
    """Return positions int [3, 1, T] whose text begins behind each clip's largest position.

    It is the published rule; transformers 5 begins behind the longer side of the grid, within the
    clip's time. `is_clip` is True at a clip's tokens, bool [T].
    """
    positions = positions.clone()
    for start, end in runs_of_images(is_clip.numpy(), np.array([0, len(is_clip)])).tolist():
        if end < len(is_clip):
            first = positions[0, 0, end]
            shift = positions[:, 0, start:end].max() + 1 - first
            positions[:, 0, end:] += shift.clamp(min=0)
    return positions


def _picture_inputs(
    family: Family, model: PreTrainedModel, pictures: Sequence[tuple[np.ndarray, Grid]]
) -> dict[str, torch.Tensor]:
    """Return the arguments of a model's forward for the pictures of a sequence."""
    pixels = torch.from_numpy(np.concatenate([patches for patches, _ in pictures]))
    inputs = {"pixel_values": pixels}
    has_grids = "image_grid_thw" in inspect.signature(model.forward).parameters
    if has_grids:
        inputs["image_grid_thw"] = torch.tensor([grid for _, grid in pictures])
    if not has_grids or family.encode_images is encode_square_patches:
        inputs["pixel_values"] = squares(pixels)
    if "pixel_attention_mask" in inspect.signature(model.forward).parameters:
        inputs["pixel_values"] = inputs["pixel_values"].unsqueeze(0)  # of one prompt
    return inputs


def packed_trajectories(groups: Iterable[Group]) -> list[PackedTrajectory]:
    """Return all trajectories of some groups as the collator takes them, without advantages."""
    return [
        PackedTrajectory(group, i, [0.0] * len(trajectory.turns))
        for group in groups
        for i, trajectory in enumerate(group.trajectories)
    ]


def all_logprobs(
    member: Member, model: PreTrainedModel, packed: Iterable[PackedTrajectory]
) -> torch.Tensor:
    """Return the logprobs of all sampled tokens, end to end, float32 [R]."""
    sequences = [sequence for p in packed for sequence in p.trajectory.sequences]
    return torch.cat([logprobs_of(member, model, sequence) for sequence in sequences])


def weighted_sum(logprobs: torch.Tensor) -> torch.Tensor:
    """Return a sum of logprobs with a weight of its own for each, whose gradient shows each."""
    return (logprobs * torch.linspace(-1, 1, len(logprobs))).sum()
