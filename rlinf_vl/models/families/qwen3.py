"""Qwen3: text only."""

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from rlinf_vl.models.families.family import Family
from rlinf_vl.models.families.qwen import (
    IMAGE_TOKEN,
    SPECIAL_TOKENS,
    decode_state,
    prices,
    stop_ids,
    text_forward,
)
from rlinf_vl.models.layers import attention_forward, mlp_forward, norm_forward
from rlinf_vl.models.positions import mrope_positions


def plain_positions(
    text_model: nn.Module, inputs_embeds, position_ids, image_positions, deepstack, **kwargs
) -> torch.Tensor:
    """Run `text_forward` of a model that counts tokens: it needs the first row of positions."""
    return text_forward(
        text_model, inputs_embeds, position_ids[0], image_positions, deepstack, **kwargs
    )


def no_images(*_: Any) -> Any:
    """Refuse images: stands in for the functions of a family with a vision tower."""
    raise ValueError("this family has no vision tower, so that it reads no images")


FAMILY = Family(
    model_type="qwen3",
    auto_model=AutoModelForCausalLM,
    text_model="model",
    text_blocks="model.layers",
    vision_tower=None,
    vision_blocks=None,
    projector=(),
    fsdp_units=("model.layers.*",),
    image_token=IMAGE_TOKEN,
    special_tokens=SPECIAL_TOKENS,
    stop_ids=stop_ids,
    layers={
        "Qwen3Attention": attention_forward,
        "Qwen3MLP": mlp_forward,
        "Qwen3RMSNorm": norm_forward,
    },
    positions=mrope_positions,  # without images its rows are equal
    text_forward=plain_positions,
    encode_images=no_images,
    image_processor=no_images,
    blank_image=no_images,
    feature_layers=no_images,
    prices=prices,
    decode_state=decode_state,
)
