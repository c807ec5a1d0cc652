"""What Qwen's families share: images to patches, the ids that end an answer, counts of what a model takes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from transformers import AutoConfig, GenerationConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from rlinf_vl.models.families.family import DecodeState, Mixture
from rlinf_vl.types import Prices

IMAGE_TOKEN = "<|image_pad|>"
SPECIAL_TOKENS = ("<|vision_start|>", "<|vision_end|>", IMAGE_TOKEN, "<|video_pad|>", "<|vision_pad|>")


def stop_ids(tokenizer: Any, path: str | Path, trust_remote_code: bool) -> tuple[int, ...]:
    """The tokenizer's end-of-turn token, then those of the checkpoint's generation_config.json and config.json (end of text,
    mostly). SGLang stops at the same ones."""
    found = [tokenizer.eos_token_id]
    try:
        found.append(GenerationConfig.from_pretrained(path).eos_token_id)
    except OSError:
        pass  # the checkpoint has no generation_config.json
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    found.append(getattr(config, "eos_token_id", None))
    flat = [i for entry in found for i in (entry if isinstance(entry, (list, tuple)) else [entry]) if i is not None]
    return tuple(dict.fromkeys(flat))


class QwenImages:
    """Resizes an image to whole tokens within bounds of its area, and cuts it into patches."""

    def __init__(self, path: str | Path, min_pixels: int | None = None, max_pixels: int | None = None) -> None:
        self._processor = self.load(path)
        size = self._processor.size
        self._least = min_pixels or size["shortest_edge"]
        self._most = max_pixels or size["longest_edge"]
        if self._least > self._most:
            raise ValueError(
                f"data.image_min_pixels: {self._least} is above data.image_max_pixels, {self._most} (where unset: the "
                "checkpoint's own)"
            )
        self._processor.size = type(size)(shortest_edge=self._least, longest_edge=self._most)
        self.patch_size: int = self._processor.patch_size
        self.merge_size: int = self._processor.merge_size

    @staticmethod
    def load(path: str | Path) -> Any:
        return Qwen2VLImageProcessorPil.from_pretrained(path)

    def grid(self, height: int, width: int) -> tuple[int, int, int]:
        rows, columns = smart_resize(height, width, self.patch_size * self.merge_size, self._least, self._most)
        return 1, rows // self.patch_size, columns // self.patch_size

    def patches(self, image: Image.Image) -> np.ndarray:
        out = self._processor(images=[image], return_tensors="np")
        assert tuple(out["image_grid_thw"][0]) == self.grid(image.height, image.width), (image, out["image_grid_thw"])
        return np.asarray(out["pixel_values"], np.float32)


def text_forward(
    text_model: nn.Module,
    inputs_embeds: torch.Tensor,
    position_ids: torch.Tensor,
    image_positions: torch.Tensor | None,
    deepstack: Sequence[torch.Tensor],
    **kwargs,
) -> torch.Tensor:
    """`Family.text_forward` of text models without deepstack; `kwargs` go to the model."""
    return text_model(
        inputs_embeds=inputs_embeds, position_ids=position_ids, attention_mask=None, use_cache=False, **kwargs
    ).last_hidden_state


def blank_image(config: Any) -> tuple[np.ndarray, np.ndarray]:
    vision = config.vision_config
    merge = vision.spatial_merge_size
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return np.zeros((merge * merge, width), np.float32), np.array([[1, merge, merge]])


def head_dim(text: Any) -> int:
    """Of a text config; some have no key for it."""
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def prices(config: Any, tower_trained: bool, tower_products: int = 2) -> Prices:
    """Count multiply-adds: gated MLPs in the text model (of a mixture, those of the experts that a token visits), projections and
    states of its delta nets, and in the tower MLPs of so many products, 3 if gated. A frozen tower has no backward, which is two
    thirds of the work."""
    text = config.get_text_config()
    queries, keys = text.num_attention_heads * head_dim(text), text.num_key_value_heads * head_dim(text)
    if experts := getattr(text, "num_experts", 0):
        shared = getattr(text, "shared_expert_intermediate_size", 0)
        mlp = 3 * (text.num_experts_per_tok * text.moe_intermediate_size + shared) + experts
    else:
        mlp = 3 * text.intermediate_size
    recurrent = linear_layers(text)
    attending = text.num_hidden_layers - len(recurrent)
    gate = queries if recurrent else 0  # families with delta nets gate their attention
    linear = text.hidden_size * (attending * (2 * (queries + keys) + gate) + text.num_hidden_layers * mlp)
    if recurrent:
        heads, k, v = text.linear_num_value_heads, text.linear_key_head_dim, text.linear_value_head_dim
        inputs = 2 * text.linear_num_key_heads * k + 2 * heads * (v + 1)
        linear += len(recurrent) * (text.hidden_size * (inputs + heads * v) + 4 * heads * k * v)
    return Prices(
        attention=2 * queries * attending / linear,
        head=text.vocab_size * text.hidden_size / linear,
        patch=patch_products(config, tower_products) / linear * (1 if tower_trained else 1 / 3),
    )


def patch_products(config: Any, tower_products: int) -> float:
    """Multiply-adds of one patch in the tower, by `prices`' count."""
    if (vision := getattr(config, "vision_config", None)) is None:
        return 0.0
    block = vision.hidden_size * (4 * vision.hidden_size + tower_products * vision.intermediate_size)
    merged = vision.hidden_size * vision.spatial_merge_size**2  # a merger's input, for as many patches as it merges
    merger = vision.hidden_size * (merged + vision.out_hidden_size)
    return vision.depth * block + feature_layers(config) * merger


def feature_layers(config: Any) -> int:
    return 1 + len(getattr(config.vision_config, "deepstack_visual_indexes", ()))


def mixture(config: Any) -> Mixture | None:
    text = config.get_text_config()
    if not getattr(text, "num_experts", 0):
        return None
    dense, step = getattr(text, "mlp_only_layers", None) or (), getattr(text, "decoder_sparse_step", 1)
    layers = (i for i in range(text.num_hidden_layers) if i not in dense and (i + 1) % step == 0)
    return Mixture(tuple(layers), text.num_experts, text.num_experts_per_tok)


def decode_state(config: Any) -> DecodeState:
    text = config.get_text_config()
    recurrent, shapes = linear_layers(text), ()
    if recurrent:
        heads, k, v = text.linear_num_value_heads, text.linear_key_head_dim, text.linear_value_head_dim
        width = 2 * text.linear_num_key_heads * k + heads * v
        shapes = (text.linear_conv_kernel_dim - 1, width), (heads, k, v)
    attending = tuple(i for i in range(text.num_hidden_layers) if i not in recurrent)
    return DecodeState(attending, text.num_key_value_heads, head_dim(text), dict.fromkeys(recurrent, shapes))


def linear_layers(text: Any) -> tuple[int, ...]:
    """Numbers of the layers of a text config that are gated delta nets."""
    kinds = getattr(text, "layer_types", None) or ()
    return tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention")
