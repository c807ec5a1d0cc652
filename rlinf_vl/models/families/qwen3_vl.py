"""Qwen3-VL: what only this family has, gathered in `FAMILY` at the end."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from transformers import AutoConfig, GenerationConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from rlinf_vl.models.families.family import DecodeState, Family, VisionFeatures
from rlinf_vl.models.layers import (
    add_deepstack,
    attention_forward,
    frame_attention,
    mlp_forward,
    norm_forward,
    patch_embed_forward,
    vision_attention_forward,
)
from rlinf_vl.models.positions import mrope_positions
from rlinf_vl.models.transfer import on_device
from rlinf_vl.types import Prices


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
        self._processor = Qwen2VLImageProcessorPil.from_pretrained(path)
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

    def grid(self, height: int, width: int) -> tuple[int, int, int]:
        rows, columns = smart_resize(height, width, self.patch_size * self.merge_size, self._least, self._most)
        return 1, rows // self.patch_size, columns // self.patch_size

    def patches(self, image: Image.Image) -> np.ndarray:
        out = self._processor(images=[image], return_tensors="np")
        assert tuple(out["image_grid_thw"][0]) == self.grid(image.height, image.width), (image, out["image_grid_thw"])
        return np.asarray(out["pixel_values"], np.float32)


def blank_image(config: Any) -> tuple[np.ndarray, np.ndarray]:
    vision = config.vision_config
    merge = vision.spatial_merge_size
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return np.zeros((merge * merge, width), np.float32), np.array([[1, merge, merge]])


def encode_images(tower: nn.Module, patches: torch.Tensor, grids: np.ndarray, dtype: torch.dtype) -> VisionFeatures:
    """A patch sees those of its own image and frame."""
    # The tower reads sizes out of its grids, which a tensor on the meta device doesn't have.
    shapes = on_device(grids, "cpu" if patches.is_meta else patches.device)
    out = tower(patches, grid_thw=shapes, context=frame_attention(grids, patches.device, dtype))
    return VisionFeatures(out.pooler_output, tuple(out.deepstack_features))


def text_forward(
    text_model: Any,
    inputs_embeds: torch.Tensor,
    position_ids: torch.Tensor,
    image_positions: torch.Tensor | None,
    deepstack: Sequence[torch.Tensor],
    **kwargs,
) -> torch.Tensor:
    text_model._deepstack_process = add_deepstack  # its own takes a mask, and searches it for positions in every layer
    return text_model(
        inputs_embeds=inputs_embeds,
        position_ids=position_ids,
        attention_mask=None,
        use_cache=False,
        visual_pos_masks=image_positions,
        deepstack_visual_embeds=list(deepstack) if image_positions is not None else None,
        **kwargs,
    ).last_hidden_state


def prices(config: Any, tower_trained: bool) -> Prices:
    """Count multiply-adds: gated MLPs in the text model, plain ones in the tower. A frozen tower has no backward, which is two
    thirds of the work."""
    text, vision = config.text_config, config.vision_config
    queries, keys = text.num_attention_heads * text.head_dim, text.num_key_value_heads * text.head_dim
    linear = text.num_hidden_layers * text.hidden_size * (2 * (queries + keys) + 3 * text.intermediate_size)
    block = vision.hidden_size * (4 * vision.hidden_size + 2 * vision.intermediate_size)
    merged = vision.hidden_size * vision.spatial_merge_size**2  # a merger's input, for as many patches as it merges
    merger = vision.hidden_size * (merged + vision.out_hidden_size)
    patch = vision.depth * block + feature_layers(config) * merger
    return Prices(
        attention=2 * queries * text.num_hidden_layers / linear,
        head=text.vocab_size * text.hidden_size / linear,
        patch=patch / linear * (1 if tower_trained else 1 / 3),
    )


def feature_layers(config: Any) -> int:
    return 1 + len(config.vision_config.deepstack_visual_indexes)


def decode_state(config: Any) -> DecodeState:
    text = config.text_config
    return DecodeState(tuple(range(text.num_hidden_layers)), text.num_key_value_heads, text.head_dim)


FAMILY = Family(
    model_type="qwen3_vl",
    text_model="model.language_model",
    vision_tower="model.visual",
    text_blocks="model.language_model.layers",
    vision_blocks="model.visual.blocks",
    fsdp_units=("model.visual.blocks.*", "model.language_model.layers.*", "model.visual"),
    image_token="<|image_pad|>",
    special_tokens=("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|vision_pad|>"),
    stop_ids=stop_ids,
    layers={
        "Qwen3VLTextAttention": attention_forward,
        "Qwen3VLTextMLP": mlp_forward,
        "Qwen3VLTextRMSNorm": norm_forward,
        "Qwen3VLVisionAttention": vision_attention_forward,
        "Qwen3VLVisionPatchEmbed": patch_embed_forward,
    },
    positions=mrope_positions,
    text_forward=text_forward,
    encode_images=encode_images,
    image_processor=QwenImages,
    blank_image=blank_image,
    feature_layers=feature_layers,
    prices=prices,
    decode_state=decode_state,
)
