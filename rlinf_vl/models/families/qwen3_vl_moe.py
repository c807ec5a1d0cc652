"""Qwen3-VL with mixtures of experts."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlinf_vl.models.families.qwen3_vl import FAMILY as QWEN3_VL
from rlinf_vl.models.families.qwen3_vl import layers_of
from rlinf_vl.models.family import Forward
from rlinf_vl.models.shapes import mixture

if TYPE_CHECKING:
    import torch

#: Deepstack layers that SGLang adds, whatever the config says.
DEEPSTACK_LAYERS = 3


def layers() -> dict[str, Forward]:
    """Return `Family.layers`."""
    return layers_of("Qwen3VLMoe") | mixtures_of("Qwen3VLMoeText")


def mixtures_of(prefix: str) -> dict[str, Forward]:
    """Return `Family.layers` of mixtures, for classes whose names begin with `prefix`."""
    from rlinf_vl.models.experts import experts_forward
    from rlinf_vl.models.mixture import mixture_forward, mixture_layer_forward

    return {
        f"{prefix}DecoderLayer": mixture_layer_forward,
        f"{prefix}SparseMoeBlock": mixture_forward,
        f"{prefix}Experts": experts_forward,
    }


def transposed_experts(name: str, weight: "torch.Tensor") -> "Iterable[tuple[str, torch.Tensor]]":
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


def engine_limits(config: Mapping[str, Any], on_cpu: bool) -> Iterator[str]:
    """Yield why SGLang can't run a model: `Family.engine_limits`."""
    text, vision = config.get("text_config") or {}, config.get("vision_config") or {}
    deepstack = vision.get("deepstack_visual_indexes", [8, 16, 24])
    if len(deepstack) != DEEPSTACK_LAYERS:
        yield (
            f"it adds {DEEPSTACK_LAYERS} deepstack layers, and "
            f"vision_config.deepstack_visual_indexes is {deepstack}"
        )
    dense, step = text.get("mlp_only_layers"), text.get("decoder_sparse_step", 1)
    if dense or step != 1:
        yield (
            f"it gives every layer experts, and text_config.mlp_only_layers is {dense}, "
            f"decoder_sparse_step {step}"
        )


FAMILY = replace(
    QWEN3_VL,
    model_type="qwen3_vl_moe",
    layers=layers,
    mixture=mixture,
    engine_names=transposed_experts,
    engine_config=normed_routes,
    engine_limits=engine_limits,
)
