"""Qwen3.5, dense (`FAMILY`) and with a mixture of experts (`MOE`).

Three of four layers are gated delta nets, the others gate their attention. The tower is Qwen3-VL's
without deepstack.
"""

from dataclasses import replace
from typing import Any

from rlinf_vl.models.families.family import Family
from rlinf_vl.models.families.qwen import mixture, text_forward
from rlinf_vl.models.families.qwen3_vl import FAMILY as QWEN3_VL
from rlinf_vl.models.families.qwen3_vl import mixtures_of, normed_routes
from rlinf_vl.models.layers import (
    centered_norm_forward,
    delta_net_forward,
    gated_attention_forward,
    gated_norm_forward,
    mlp_forward,
    patch_embed_forward,
    vision_attention_forward,
)


def layers_of(prefix: str) -> dict[str, Any]:
    """Return `Family.layers` for classes whose names begin with `prefix`."""
    return {
        f"{prefix}GatedDeltaNet": delta_net_forward,
        f"{prefix}Attention": gated_attention_forward,
        f"{prefix}MLP": mlp_forward,
        f"{prefix}RMSNorm": centered_norm_forward,
        f"{prefix}RMSNormGated": gated_norm_forward,
        f"{prefix}VisionAttention": vision_attention_forward,
        f"{prefix}VisionPatchEmbed": patch_embed_forward,
    }


def engine_config(config: Any) -> dict[str, dict[str, Any]]:
    """Return the period of the layers that attend: SGLang reads it as one number.

    transformers lists the kind of each layer instead, `layer_types`. The last of each n layers
    attends.
    """
    # The appended kind serves configs in which no layer attends.
    kinds = [*config.text_config.layer_types, "full_attention"]
    return {"text_config": {"full_attention_interval": kinds.index("full_attention") + 1}}


def moe_engine_config(config: Any) -> dict[str, dict[str, Any]]:
    """Return the keys of `engine_config`, and those of mixtures of experts."""
    return {
        "text_config": engine_config(config)["text_config"] | normed_routes(config)["text_config"]
    }


FAMILY: Family = replace(
    QWEN3_VL,
    model_type="qwen3_5",
    projector=("model.visual.merger",),
    layers=layers_of("Qwen3_5"),
    text_forward=text_forward,
    engine_config=engine_config,
    carried_weights=("mtp.",),  # heads that predict further tokens, for speculative decoding
    # Decays are exp(-exp(A_log) · softplus(a + dt_bias)), over thousands of tokens: bfloat16 moves
    # outputs by 4e-3.
    float32_weights=("A_log", "dt_bias"),
)
MOE: Family = replace(
    FAMILY,
    model_type="qwen3_5_moe",
    layers=layers_of("Qwen3_5Moe") | mixtures_of("Qwen3_5Moe"),
    mixture=mixture,
    engine_config=moe_engine_config,
)
