"""Qwen3-VL, dense."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from rlinf_vl.models.family import Family, Forward, VisionFeatures, text_forward
from rlinf_vl.models.video_processor import Qwen3Videos

if TYPE_CHECKING:
    import torch
    from torch import nn

IMAGE_TOKEN = "<|image_pad|>"
SPECIAL_TOKENS = (
    "<|vision_start|>",
    "<|vision_end|>",
    IMAGE_TOKEN,
    "<|video_pad|>",
    "<|vision_pad|>",
)


def layers_of(prefix: str) -> dict[str, Forward]:
    """Return `Family.layers` for classes whose names begin with `prefix`."""
    from rlinf_vl.models import layers

    return {
        f"{prefix}TextAttention": layers.attention_forward,
        f"{prefix}TextMLP": layers.mlp_forward,
        f"{prefix}TextRMSNorm": layers.norm_forward,
        f"{prefix}VisionAttention": layers.vision_attention_forward,
        f"{prefix}VisionPatchEmbed": layers.patch_embed_forward,
    }


def encode_images(
    tower: "nn.Module", patches: "torch.Tensor", grids: np.ndarray, dtype: "torch.dtype"
) -> VisionFeatures:
    """Run the tower: a patch attends within its own image and frame."""
    from rlinf_vl.models.layers import frame_attention
    from rlinf_vl.models.transfer import on_device

    # The tower reads numbers from its grids, and a tensor on `meta` has none.
    shapes = on_device(grids, "cpu" if patches.is_meta else patches.device)
    out = tower(patches, grid_thw=shapes, context=frame_attention(grids, patches.device, dtype))
    return VisionFeatures(out.pooler_output, tuple(out.get("deepstack_features", ())))


def deepstack_text_forward(
    text_model: Any,
    inputs_embeds: "torch.Tensor",
    position_ids: "torch.Tensor",
    image_positions: "torch.Tensor | None",
    deepstack: "Sequence[torch.Tensor]",
    **kwargs,
) -> "torch.Tensor":
    """Run a text model that adds deepstack features to its first layers: `Family.text_forward`."""
    from rlinf_vl.models.layers import add_deepstack

    # The model's own method takes a mask, and searches it for positions in every layer.
    text_model._deepstack_process = add_deepstack
    kwargs["visual_pos_masks"] = image_positions
    kwargs["deepstack_visual_embeds"] = list(deepstack) if image_positions is not None else None
    return text_forward(
        text_model, inputs_embeds, position_ids, image_positions, deepstack, **kwargs
    )


FAMILY = Family(
    model_type="qwen3_vl",
    text_model="model.language_model",
    vision_tower="model.visual",
    text_blocks="model.language_model.layers",
    vision_blocks="model.visual.blocks",
    projector=("model.visual.merger", "model.visual.deepstack_merger_list"),
    fsdp_units=("model.visual.blocks.*", "model.language_model.layers.*", "model.visual"),
    image_token=IMAGE_TOKEN,
    special_tokens=SPECIAL_TOKENS,
    layers=partial(layers_of, "Qwen3VL"),
    text_forward=deepstack_text_forward,
    encode_images=encode_images,
    videos=Qwen3Videos,
)
