"""Checks of a checkpoint's config.json for models of our families that SGLang can't run.

Neither torch nor transformers is imported, so that a run can be refused before anything is started.
"""

from collections.abc import Iterator, Mapping
from typing import Any

#: Numbers in a patch of Qwen2.5-VL: 3 channels · 2 frames · 14². SGLang mistakes patches of any
#: other size for embeddings.
PATCH_NUMBERS = 1176
#: Deepstack layers that SGLang adds to Qwen3-VL with experts, whatever the config says.
DEEPSTACK_LAYERS = 3


def refusals(config: Mapping[str, Any], on_cpu: bool) -> Iterator[str]:
    """Yield the reasons why SGLang (0.5.23) can't run a model, each with a remedy.

    Args:
        config: content of a checkpoint's config.json. An absent key has transformers' default,
            which SGLang can run.
    """
    family = config.get("model_type")
    text = config.get("text_config") or {}
    vision = config.get("vision_config") or {}
    reasons = []
    if family == "qwen2_5_vl":
        side = vision.get("patch_size", 14)
        channels = vision.get("in_channels", vision.get("in_chans", 3))
        if (numbers := channels * vision.get("temporal_patch_size", 2) * side**2) != PATCH_NUMBERS:
            reasons.append(
                f"it takes patches of {PATCH_NUMBERS} numbers (vision_config.patch_size 14), not "
                f"of {numbers} (patch_size {side})"
            )
    elif family == "qwen3_vl_moe":
        deepstack = vision.get("deepstack_visual_indexes", [8, 16, 24])
        if len(deepstack) != DEEPSTACK_LAYERS:
            reasons.append(
                f"it adds {DEEPSTACK_LAYERS} deepstack layers, and "
                f"vision_config.deepstack_visual_indexes is {deepstack}"
            )
        dense, step = text.get("mlp_only_layers"), text.get("decoder_sparse_step", 1)
        if dense or step != 1:
            reasons.append(
                f"it gives every layer experts, and text_config.mlp_only_layers is {dense}, "
                f"decoder_sparse_step {step}"
            )
    elif family in ("qwen3_5", "qwen3_5_moe"):
        if on_cpu:
            reasons.append("its gated delta nets are Triton kernels, which need a GPU")
        if not _regular(kinds := text.get("layer_types") or []):
            reasons.append(
                "it wants every n-th layer to attend to all tokens, and text_config.layer_types "
                f"is {kinds}"
            )
    for reason in reasons:
        yield f"SGLang can't run this {family}: {reason}; set rollout.rollout_backend=torch"


def _regular(layer_types: list[str]) -> bool:
    """Return whether, for some n, every n-th layer and no other attends to all tokens."""
    # Fewer than n layers may follow the last full-attention layer.
    n = (*layer_types, "full_attention").index("full_attention") + 1
    expected = [
        ("linear_attention", "full_attention")[(i + 1) % n == 0] for i in range(len(layer_types))
    ]
    return layer_types == expected and n <= max(1, len(layer_types))
