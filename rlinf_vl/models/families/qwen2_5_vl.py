"""Qwen2.5-VL: most blocks of the tower attend within windows, and there is no deepstack."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from rlinf_vl.models.families.qwen3_vl import FAMILY as QWEN3_VL
from rlinf_vl.models.family import Forward, VisionFeatures, text_forward
from rlinf_vl.models.shapes import prices
from rlinf_vl.models.video_processor import Qwen2Videos

if TYPE_CHECKING:
    import torch

#: Numbers in a patch: 3 channels · 2 frames · 14². SGLang mistakes patches of any other size for
#: embeddings.
PATCH_NUMBERS = 1176


def layers() -> dict[str, Forward]:
    """Return `Family.layers`."""
    from rlinf_vl.models import layers

    return {
        "Qwen2_5_VLAttention": layers.attention_forward,
        "Qwen2MLP": layers.mlp_forward,
        "Qwen2_5_VLRMSNorm": layers.norm_forward,
        "Qwen2_5_VLVisionAttention": window_attention_forward,
        "Qwen2_5_VisionPatchEmbed": layers.patch_embed_forward,
    }


def encode_images(
    tower: Any, patches: "torch.Tensor", grids: np.ndarray, dtype: "torch.dtype"
) -> VisionFeatures:
    """Run the tower: a patch attends within its window, and in some blocks within its frame."""
    import torch
    from transformers.vision_utils import get_vision_window_index

    from rlinf_vl.models.attention import SegmentAttention
    from rlinf_vl.models.layers import frame_bounds
    from rlinf_vl.models.transfer import on_device

    device = patches.device
    shapes = torch.from_numpy(grids)
    window_index, window_bounds = get_vision_window_index(
        shapes, tower.spatial_merge_size, tower.window_size, tower.patch_size
    )
    frames = frame_bounds(grids)
    contexts = {
        len(bounds): SegmentAttention(bounds, causal=False, device=device, dtype=dtype)
        for bounds in (window_bounds.numpy().astype(np.int64), frames)
    }
    out = tower(
        patches,
        grid_thw=shapes if patches.is_meta else on_device(grids, device),
        window_index=window_index.to(device),
        cu_window_seqlens=window_bounds,
        cu_seqlens=torch.from_numpy(frames),
        contexts=contexts,
    )
    return VisionFeatures(out.pooler_output)


def window_attention_forward(
    self: Any, hidden_states, *, cu_seqlens, contexts, **kwargs
) -> "torch.Tensor":
    """Run `vision_attention_forward` within the segments that the tower hands to this block.

    `contexts` has one context per number of segments. Windows are parts of frames, so if there are
    as many windows as frames, the two are equal.
    """
    from rlinf_vl.models.layers import vision_attention_forward

    return vision_attention_forward(
        self, hidden_states, context=contexts[len(cu_seqlens)], **kwargs
    )


def engine_names(name: str, weight: "torch.Tensor") -> "Iterable[tuple[str, torch.Tensor]]":
    """Return the weight under SGLang's name for it.

    SGLang and checkpoints on the hub use the names of this family's first release in transformers.
    """
    return (
        (
            name.replace("model.language_model.", "model.").replace("model.visual.", "visual."),
            weight,
        ),
    )


def engine_limits(config: Mapping[str, Any], on_cpu: bool) -> Iterator[str]:
    """Yield why SGLang can't run a model: `Family.engine_limits`."""
    vision = config.get("vision_config") or {}
    side = vision.get("patch_size", 14)
    channels = vision.get("in_channels", vision.get("in_chans", 3))
    numbers = channels * vision.get("temporal_patch_size", 2) * side**2
    if numbers != PATCH_NUMBERS:
        yield (
            f"it takes patches of {PATCH_NUMBERS} numbers (vision_config.patch_size 14), not of "
            f"{numbers} (patch_size {side})"
        )


FAMILY = replace(
    QWEN3_VL,
    model_type="qwen2_5_vl",
    projector=("model.visual.merger",),
    layers=layers,
    text_forward=text_forward,
    encode_images=encode_images,
    videos=Qwen2Videos,
    prices=partial(prices, tower_products=3),
    engine_names=engine_names,
    engine_limits=engine_limits,
)
