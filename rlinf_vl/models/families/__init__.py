"""The table of model families: one row says where a vision-language model keeps its parts. A new family is a new row, and
the tests in tests/unit/models run for every row."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from rlinf_vl.models.layers import (
    add_deepstack,
    attention_forward,
    mlp_forward,
    norm_forward,
    patch_embed_forward,
    vision_attention_forward,
)
from rlinf_vl.models.positions import mrope_positions


@dataclass(frozen=True, slots=True)
class VisionFeatures:
    """What the vision tower gives for some images, in order: `tokens` [N, H], and one [N, H] per deepstack layer."""

    tokens: torch.Tensor
    deepstack: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        model_type: `model_type` of the checkpoint's config.json.
        text_model, vision_tower: dotted paths of those modules in the transformers model.
        text_blocks, vision_blocks: dotted paths of their block lists (FSDP shards and checkpoints per block).
        special_tokens: vision placeholders that may never be sampled.
        image_token: the placeholder that stands for one image token.
        encode_images: (vision tower, pixel_values [P, d], grids [n, 3], kwargs) → `VisionFeatures`.
        text_forward: (text model, inputs_embeds [1, T, H], position_ids [4, 1, T], positions of image tokens int64 [N] or
            None, deepstack features, kwargs) → last hidden state [1, T, H].
        layers: class name of a module → the `forward` that takes the place of its own.
        positions: (ids [T], image token id, grids, merge size) → [4, T].
    """

    model_type: str
    text_model: str
    vision_tower: str
    text_blocks: str
    vision_blocks: str
    image_token: str
    special_tokens: Sequence[str]
    encode_images: Callable[..., VisionFeatures]
    text_forward: Callable[..., torch.Tensor]
    layers: Mapping[str, Callable[..., object]]
    positions: Callable[[np.ndarray, int, np.ndarray, int], np.ndarray]


def _qwen3_vl_encode(tower: nn.Module, pixel_values: torch.Tensor, grids: torch.Tensor, **kwargs) -> VisionFeatures:
    out = tower(pixel_values, grid_thw=grids, **kwargs)
    return VisionFeatures(out.pooler_output, tuple(out.deepstack_features))


def _qwen3_vl_text(text_model: Any, inputs_embeds, position_ids, image_positions, deepstack, **kwargs) -> torch.Tensor:
    # Its own takes a mask, and searches it for positions in every layer.
    text_model._deepstack_process = add_deepstack
    return text_model(
        inputs_embeds=inputs_embeds,
        position_ids=position_ids,
        attention_mask=None,
        use_cache=False,
        visual_pos_masks=image_positions,
        deepstack_visual_embeds=list(deepstack) if image_positions is not None else None,
        **kwargs,
    ).last_hidden_state


FAMILIES: dict[str, Family] = {
    "qwen3_vl": Family(
        model_type="qwen3_vl",
        text_model="model.language_model",
        vision_tower="model.visual",
        text_blocks="model.language_model.layers",
        vision_blocks="model.visual.blocks",
        image_token="<|image_pad|>",
        special_tokens=("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|vision_pad|>"),
        encode_images=_qwen3_vl_encode,
        text_forward=_qwen3_vl_text,
        layers={
            "Qwen3VLTextAttention": attention_forward,
            "Qwen3VLTextMLP": mlp_forward,
            "Qwen3VLTextRMSNorm": norm_forward,
            "Qwen3VLVisionAttention": vision_attention_forward,
            "Qwen3VLVisionPatchEmbed": patch_embed_forward,
        },
        positions=mrope_positions,
    ),
}


def family_of(model_type: str) -> Family:
    """The row of `rollout.model.model_type`; ValueError names the rows there are."""
    if model_type not in FAMILIES:
        raise ValueError(
            f"rollout.model.model_type: {model_type!r} is not a known family; known: {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]
