"""transformers' own forward of one sequence at a time: what every proof compares with."""

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from rlinf_vl.data.clips import frame_refs, is_clip
from rlinf_vl.data.images import decode
from rlinf_vl.models.encoders import encode_square_patches, squares
from rlinf_vl.packing.collator import Member as PackedTrajectory
from rlinf_vl.prove.member import Member
from rlinf_vl.prove.problems import INTERVAL
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
    ids = torch.from_numpy(sequence.ids.astype(np.int64))[None]
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if sequence.images:
        pictures = [(image, grid) for image, grid in sequence.images if not is_clip(image)]
        clips = [(image, grid) for image, grid in sequence.images if is_clip(image)]
        if pictures:
            inputs |= _picture_inputs(member, model, pictures)
        if clips:
            inputs |= _clip_inputs(member, model, clips)
        for key in ("mm_token_type_ids", "token_type_ids"):
            if key in inspect.signature(model.forward).parameters:
                tokens = member.image_tokens
                inputs[key] = (ids == tokens.id).int() + 2 * (ids == tokens.video_id).int()
    if hasattr(model.model, "rope_deltas"):  # of the sequence before
        model.model.rope_deltas = None
    logits = model(**inputs).logits[0].float()
    logits = logits.masked_fill(torch.from_numpy(member.banned), -torch.inf)
    sampled = torch.from_numpy(np.flatnonzero(sequence.loss_mask))
    return logits.log_softmax(-1)[sampled - 1, ids[0, sampled]]


def _picture_inputs(
    member: Member, model: PreTrainedModel, pictures: Sequence[tuple[ImageRef, Grid]]
) -> dict[str, torch.Tensor]:
    """Return the arguments of a model's forward for the pictures of a sequence."""
    patches = [pixels_of(member, image) for image, _ in pictures]
    pixels = torch.from_numpy(np.concatenate(patches))
    inputs = {"pixel_values": pixels}
    has_grids = "image_grid_thw" in inspect.signature(model.forward).parameters
    if has_grids:
        inputs["image_grid_thw"] = torch.tensor([grid for _, grid in pictures])
    if not has_grids or member.family.encode_images is encode_square_patches:
        inputs["pixel_values"] = squares(pixels)
    if "pixel_attention_mask" in inspect.signature(model.forward).parameters:
        inputs["pixel_values"] = inputs["pixel_values"].unsqueeze(0)  # of one prompt
    return inputs


def _clip_inputs(
    member: Member, model: PreTrainedModel, clips: Sequence[tuple[ImageRef, Grid]]
) -> dict[str, torch.Tensor]:
    """Return the arguments of a model's forward for the clips of a sequence."""
    patches = [pixels_of(member, image) for image, _ in clips]
    inputs = {
        "pixel_values_videos": torch.from_numpy(np.concatenate(patches)),
        "video_grid_thw": torch.tensor([grid for _, grid in clips]),
    }
    if "second_per_grid_ts" in inspect.signature(model.forward).parameters:
        seconds = INTERVAL * member.config.vision_config.temporal_patch_size
        inputs["second_per_grid_ts"] = torch.tensor([seconds] * len(clips))
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
