"""Qwen3-VL, dense (`FAMILY`) and with a mixture of experts (`MOE`)."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from rlinf_vl.models.families.family import Family, VisionFeatures
from rlinf_vl.models.families.qwen import (
    IMAGE_TOKEN,
    SPECIAL_TOKENS,
    QwenImages,
    blank_image,
    decode_state,
    feature_layers,
    mixture,
    prices,
    stop_ids,
    text_forward,
)
from rlinf_vl.models.layers import (
    add_deepstack,
    attention_forward,
    frame_attention,
    mlp_forward,
    norm_forward,
    patch_embed_forward,
    vision_attention_forward,
)
from rlinf_vl.models.mixture import experts_forward, mixture_forward, mixture_layer_forward
from rlinf_vl.models.positions import mrope_positions
from rlinf_vl.models.transfer import on_device


def encode_images(
    tower: nn.Module, patches: torch.Tensor, grids: np.ndarray, dtype: torch.dtype
) -> VisionFeatures:
    """Run the tower: a patch attends within its own image and frame."""
    # The tower reads numbers from its grids, and a tensor on `meta` has none.
    shapes = on_device(grids, "cpu" if patches.is_meta else patches.device)
    out = tower(patches, grid_thw=shapes, context=frame_attention(grids, patches.device, dtype))
    return VisionFeatures(out.pooler_output, tuple(out.get("deepstack_features", ())))


def deepstack_text_forward(
    text_model: Any,
    inputs_embeds: torch.Tensor,
    position_ids: torch.Tensor,
    image_positions: torch.Tensor | None,
    deepstack: Sequence[torch.Tensor],
    **kwargs,
) -> torch.Tensor:
    """Run a text model that adds deepstack features to its first layers: `Family.text_forward`."""
    # The model's own method takes a mask, and searches it for positions in every layer.
    text_model._deepstack_process = add_deepstack
    kwargs["visual_pos_masks"] = image_positions
    kwargs["deepstack_visual_embeds"] = list(deepstack) if image_positions is not None else None
    return text_forward(
        text_model, inputs_embeds, position_ids, image_positions, deepstack, **kwargs
    )


def layers_of(prefix: str) -> dict[str, Any]:
    """Return `Family.layers` for classes whose names begin with `prefix`."""
    return {
        f"{prefix}TextAttention": attention_forward,
        f"{prefix}TextMLP": mlp_forward,
        f"{prefix}TextRMSNorm": norm_forward,
        f"{prefix}VisionAttention": vision_attention_forward,
        f"{prefix}VisionPatchEmbed": patch_embed_forward,
    }


def mixtures_of(prefix: str) -> dict[str, Any]:
    """Return `Family.layers` of mixtures, for classes whose names begin with `prefix`."""
    return {
        f"{prefix}DecoderLayer": mixture_layer_forward,
        f"{prefix}SparseMoeBlock": mixture_forward,
        f"{prefix}Experts": experts_forward,
    }


def transposed_experts(name: str, weight: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
    """Return the weight in SGLang's layout: the experts of a layer transposed.

    SGLang, and checkpoints on the hub, store them as [experts, in, out]; transformers has [experts,
    out, in] in memory.
    """
    stacked = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    return ((name, weight.transpose(1, 2).contiguous() if stacked else weight),)


def normed_routes(config: Any) -> dict[str, dict[str, Any]]:
    """Return the config key that makes SGLang weigh experts as transformers does.

    transformers normalises the weights of a token's experts to 1, whatever its config says.
    """
    return {"text_config": {"norm_topk_prob": True}}


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
    stop_ids=stop_ids,
    layers=layers_of("Qwen3VL"),
    positions=mrope_positions,
    text_forward=deepstack_text_forward,
    encode_images=encode_images,
    image_processor=QwenImages,
    blank_image=blank_image,
    feature_layers=feature_layers,
    prices=prices,
    decode_state=decode_state,
)
MOE = replace(
    FAMILY,
    model_type="qwen3_vl_moe",
    layers=layers_of("Qwen3VLMoe") | mixtures_of("Qwen3VLMoeText"),
    mixture=mixture,
    engine_names=transposed_experts,
    engine_config=normed_routes,
)
