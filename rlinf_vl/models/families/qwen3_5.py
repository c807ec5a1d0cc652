"""Qwen3.5, dense.

Three of four layers are gated delta nets, the others gate their attention. The tower is Qwen3-VL's
without deepstack.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rlinf_vl.models.families.qwen3_vl import FAMILY as QWEN3_VL
from rlinf_vl.models.family import Forward, text_forward


def layers_of(prefix: str) -> dict[str, Forward]:
    """Return `Family.layers` for classes whose names begin with `prefix`."""
    from rlinf_vl.models import layers

    return {
        f"{prefix}GatedDeltaNet": layers.delta_net_forward,
        f"{prefix}Attention": layers.gated_attention_forward,
        f"{prefix}MLP": layers.mlp_forward,
        f"{prefix}RMSNorm": layers.centered_norm_forward,
        f"{prefix}RMSNormGated": layers.gated_norm_forward,
        f"{prefix}VisionAttention": layers.vision_attention_forward,
        f"{prefix}VisionPatchEmbed": layers.patch_embed_forward,
    }


def engine_config(config: Any) -> dict[str, dict[str, Any]]:
    """Return the period of the layers that attend: SGLang reads it as one number.

    transformers lists the kind of each layer instead, `layer_types`. The last of each n layers
    attends.
    """
    return {"text_config": {"full_attention_interval": _interval(config.text_config.layer_types)}}


def engine_limits(config: Mapping[str, Any], on_cpu: bool) -> Iterator[str]:
    """Yield why SGLang can't run a model: `Family.engine_limits`."""
    if on_cpu:
        yield "its gated delta nets are Triton kernels, which need a GPU"
    kinds = (config.get("text_config") or {}).get("layer_types") or []
    n = _interval(kinds)
    expected = [("linear_attention", "full_attention")[(i + 1) % n == 0] for i in range(len(kinds))]
    if kinds != expected or n > max(1, len(kinds)):
        yield (
            "it wants every n-th layer to attend to all tokens, and text_config.layer_types is "
            f"{kinds}"
        )


def _interval(layer_types: Sequence[str]) -> int:
    """Return the number of the first layer that attends to all tokens, counted from 1."""
    # The appended kind serves configs in which no layer attends.
    return [*layer_types, "full_attention"].index("full_attention") + 1


FAMILY = replace(
    QWEN3_VL,
    model_type="qwen3_5",
    projector=("model.visual.merger",),
    layers=partial(layers_of, "Qwen3_5"),
    text_forward=text_forward,
    engine_config=engine_config,
    engine_limits=engine_limits,
    carried_weights=("mtp.",),  # heads that predict further tokens, for speculative decoding
    # Decays are exp(-exp(A_log) · softplus(a + dt_bias)), over thousands of tokens: bfloat16 moves
    # outputs by 4e-3.
    float32_weights=("A_log", "dt_bias"),
)
