"""Qwen3: text only."""

from typing import TYPE_CHECKING

from rlinf_vl.models.families.qwen3_vl import IMAGE_TOKEN, SPECIAL_TOKENS
from rlinf_vl.models.family import Family, Forward, text_forward

if TYPE_CHECKING:
    import torch
    from torch import nn


def layers() -> dict[str, Forward]:
    """Return `Family.layers`."""
    from rlinf_vl.models import layers

    return {
        "Qwen3Attention": layers.attention_forward,
        "Qwen3MLP": layers.mlp_forward,
        "Qwen3RMSNorm": layers.norm_forward,
    }


def plain_positions(
    text_model: "nn.Module", inputs_embeds, position_ids, image_positions, deepstack, **kwargs
) -> "torch.Tensor":
    """Run `text_forward` of a model that counts tokens: it needs the first row of positions."""
    return text_forward(
        text_model, inputs_embeds, position_ids[0], image_positions, deepstack, **kwargs
    )


FAMILY = Family(
    model_type="qwen3",
    auto_model="AutoModelForCausalLM",
    text_model="model",
    text_blocks="model.layers",
    vision_tower=None,
    vision_blocks=None,
    projector=(),
    fsdp_units=("model.layers.*",),
    image_token=IMAGE_TOKEN,
    special_tokens=SPECIAL_TOKENS,
    layers=layers,
    text_forward=plain_positions,
)
