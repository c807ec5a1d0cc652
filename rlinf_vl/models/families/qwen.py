"""Functions that Qwen's families share: images to patches, stop ids, and counts of computation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from transformers import AutoConfig, GenerationConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

from rlinf_vl.models.families.family import DecodeState, Mixture
from rlinf_vl.types import Prices

IMAGE_TOKEN = "<|image_pad|>"
SPECIAL_TOKENS = (
    "<|vision_start|>",
    "<|vision_end|>",
    IMAGE_TOKEN,
    "<|video_pad|>",
    "<|vision_pad|>",
)


def stop_ids(tokenizer: Any, path: str | Path, trust_remote_code: bool) -> tuple[int, ...]:
    """Return the ids that end a response, the tokenizer's end-of-turn token first.

    Then come the ids of the checkpoint's generation_config.json and config.json (mostly end of
    text). SGLang stops at the same ids.
    """
    entries = [tokenizer.eos_token_id]
    try:
        entries.append(GenerationConfig.from_pretrained(path).eos_token_id)
    except OSError:
        pass  # the checkpoint has no generation_config.json
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    entries.append(getattr(config, "eos_token_id", None))
    ids = [
        i
        for entry in entries
        for i in (entry if isinstance(entry, (list, tuple)) else [entry])
        if i is not None
    ]
    return tuple(dict.fromkeys(ids))


class QwenImages:
    """Resizes an image to whole tokens within bounds of its area, and cuts it into patches."""

    def __init__(
        self, path: str | Path, min_pixels: int | None = None, max_pixels: int | None = None
    ) -> None:
        self._processor = self.load(path)
        size = self._processor.size
        self._min_pixels = min_pixels or size["shortest_edge"]
        self._max_pixels = max_pixels or size["longest_edge"]
        if self._min_pixels > self._max_pixels:
            raise ValueError(
                f"data.image_min_pixels: {self._min_pixels} is above data.image_max_pixels, "
                f"{self._max_pixels} (where unset: the checkpoint's own)"
            )
        self._processor.size = type(size)(
            shortest_edge=self._min_pixels, longest_edge=self._max_pixels
        )
        self.patch_size: int = self._processor.patch_size
        self.merge_size: int = self._processor.merge_size

    @staticmethod
    def load(path: str | Path) -> Any:
        """Load the image processor of a checkpoint; a subclass may load another kind."""
        return Qwen2VLImageProcessorPil.from_pretrained(path)

    def grid(self, height: int, width: int) -> tuple[int, int, int]:
        """Return (t, h, w) in patches of an image of this many pixels, after resizing."""
        rows, columns = smart_resize(
            height, width, self.patch_size * self.merge_size, self._min_pixels, self._max_pixels
        )
        return 1, rows // self.patch_size, columns // self.patch_size

    def patches(self, image: Image.Image) -> np.ndarray:
        """Return the patches of an RGB image, float32 [t·h·w, d]."""
        out = self._processor(images=[image], return_tensors="np")
        assert tuple(out["image_grid_thw"][0]) == self.grid(image.height, image.width), (
            image,
            out["image_grid_thw"],
        )
        return np.asarray(out["pixel_values"], np.float32)


def text_forward(
    text_model: nn.Module,
    inputs_embeds: torch.Tensor,
    position_ids: torch.Tensor,
    image_positions: torch.Tensor | None,
    deepstack: Sequence[torch.Tensor],
    **kwargs,
) -> torch.Tensor:
    """Run a text model without deepstack: `Family.text_forward`. `kwargs` go to the model."""
    return text_model(
        inputs_embeds=inputs_embeds,
        position_ids=position_ids,
        attention_mask=None,
        use_cache=False,
        **kwargs,
    ).last_hidden_state


def blank_image(config: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return (patches, grids) of the smallest image: one token, all zeros."""
    vision = config.vision_config
    merge = vision.spatial_merge_size
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return np.zeros((merge * merge, width), np.float32), np.array([[1, merge, merge]])


def head_dim(text: Any) -> int:
    """Return the size of an attention head; some text configs have no key for it."""
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def prices(config: Any, tower_trained: bool, tower_products: int = 2) -> Prices:
    """Count multiply-adds of attention, head and tower, relative to a text token's linear layers.

    Counted are gated MLPs in the text model (in a mixture, the experts that a token visits), the
    projections and states of its delta nets, and tower MLPs of `tower_products` products, 3 if
    gated. A frozen tower has no backward, which is two thirds of the work.
    """
    text = config.get_text_config()
    query_width, kv_width = (
        text.num_attention_heads * head_dim(text),
        text.num_key_value_heads * head_dim(text),
    )
    if experts := getattr(text, "num_experts", 0):
        shared_width = getattr(text, "shared_expert_intermediate_size", 0)
        mlp = 3 * (text.num_experts_per_tok * text.moe_intermediate_size + shared_width) + experts
    else:
        mlp = 3 * text.intermediate_size
    recurrent = linear_layers(text)
    attending = text.num_hidden_layers - len(recurrent)
    gate_width = query_width if recurrent else 0  # families with delta nets gate their attention
    linear = text.hidden_size * (
        attending * (2 * (query_width + kv_width) + gate_width) + text.num_hidden_layers * mlp
    )
    if recurrent:
        value_heads, key_dim, value_dim = (
            text.linear_num_value_heads,
            text.linear_key_head_dim,
            text.linear_value_head_dim,
        )
        inputs = 2 * text.linear_num_key_heads * key_dim + 2 * value_heads * (value_dim + 1)
        linear += len(recurrent) * (
            text.hidden_size * (inputs + value_heads * value_dim)
            + 4 * value_heads * key_dim * value_dim
        )
    return Prices(
        attention=2 * query_width * attending / linear,
        head=text.vocab_size * text.hidden_size / linear,
        patch=patch_products(config, tower_products) / linear * (1 if tower_trained else 1 / 3),
    )


def patch_products(config: Any, tower_products: int) -> float:
    """Count the multiply-adds of one patch in the tower, in the unit of `prices`."""
    if (vision := getattr(config, "vision_config", None)) is None:
        return 0.0
    block = vision.hidden_size * (
        4 * vision.hidden_size + tower_products * vision.intermediate_size
    )
    # A merger runs once for spatial_merge_size² patches, on their concatenation.
    merged = vision.hidden_size * vision.spatial_merge_size**2
    merger = vision.hidden_size * (merged + vision.out_hidden_size)
    return vision.depth * block + feature_layers(config) * merger


def feature_layers(config: Any) -> int:
    """Return the number of tensors in `VisionFeatures`: the tokens, and one per deepstack layer."""
    return 1 + len(getattr(config.vision_config, "deepstack_visual_indexes", ()))


def mixture(config: Any) -> Mixture | None:
    """Return the mixtures of experts of a model, None if it has none."""
    text = config.get_text_config()
    if not getattr(text, "num_experts", 0):
        return None
    dense, step = (
        getattr(text, "mlp_only_layers", None) or (),
        getattr(text, "decoder_sparse_step", 1),
    )
    layers = (i for i in range(text.num_hidden_layers) if i not in dense and (i + 1) % step == 0)
    return Mixture(tuple(layers), text.num_experts, text.num_experts_per_tok)


def decode_state(config: Any) -> DecodeState:
    """Return the tensors that decoding stores: keys and values, or a delta net's state."""
    text = config.get_text_config()
    recurrent = linear_layers(text)
    row_shapes: dict[int, tuple[tuple[int, ...], ...]] = {}
    if recurrent:
        value_heads, key_dim, value_dim = (
            text.linear_num_value_heads,
            text.linear_key_head_dim,
            text.linear_value_head_dim,
        )
        conv_width = 2 * text.linear_num_key_heads * key_dim + value_heads * value_dim
        # The last inputs of the convolution, and the state of the recurrence.
        tail_rows = text.linear_conv_kernel_dim - 1
        row_shapes = dict.fromkeys(
            recurrent, ((tail_rows, conv_width), (value_heads, key_dim, value_dim))
        )
    attending = tuple(i for i in range(text.num_hidden_layers) if i not in recurrent)
    return DecodeState(attending, text.num_key_value_heads, head_dim(text), row_shapes)


def linear_layers(text: Any) -> tuple[int, ...]:
    """Return the numbers of the layers in a text config that are gated delta nets."""
    kinds = getattr(text, "layer_types", None) or ()
    return tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention")
