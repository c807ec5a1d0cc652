"""Clips of noise, conversations that show them beside pictures, and transformers' forward of those."""

import io

import numpy as np
import torch
from PIL import Image

from rlinf_vl.data.clips import clip_of, clip_ref, is_clip
from rlinf_vl.tools.verify.prove.reference import behind_clips
from rlinf_vl.types import ImageRef

#: Sizes of tiny members with the toy's tokenizer, see `sglang_toy.write_member`.
SIZES = {
    "qwen3_vl": {
        "text": {"num_hidden_layers": 3},
        "vision": {"depth": 3, "deepstack_visual_indexes": [0, 2], "patch_size": 8},
    },
    "qwen3_vl_moe": {
        "text": {"num_hidden_layers": 3, "mlp_only_layers": []},
        "vision": {"depth": 3, "deepstack_visual_indexes": [0, 1, 2], "patch_size": 8},
    },
    "qwen2_5_vl": {
        "text": {"num_hidden_layers": 3},
        "vision": {"patch_size": 14, "window_size": 56, "depth": 3},
    },
    "qwen3_5": {"text": {"num_hidden_layers": 4}, "vision": {"patch_size": 8}},
    "qwen3_5_moe": {"text": {"num_hidden_layers": 4}, "vision": {"patch_size": 8}},
}


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def picture(rng: np.random.Generator, height: int = 48, width: int = 48) -> ImageRef:
    return ImageRef.of(png(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)))


def clip(rng, frames: int, height: int = 40, width: int = 56, interval: float = 0.5) -> ImageRef:
    """Frames of noise, one every `interval` seconds."""
    noise = rng.integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
    return clip_ref([png(frame) for frame in noise], [interval * i for i in range(frames)])


def part(image: ImageRef) -> dict:
    kind = "video_url" if is_clip(image) else "image_url"
    return {"type": kind, kind: {"url": image.url}}


def user(*parts: str | ImageRef) -> dict:
    """A message of texts, pictures and clips."""
    return {
        "role": "user",
        "content": [{"type": "text", "text": p} if isinstance(p, str) else part(p) for p in parts],
    }


def transformers_inputs(processor, ids: np.ndarray, images) -> dict:
    """The arguments of a transformers forward, or of `get_rope_index`, for ids [T] with these images."""
    row = torch.from_numpy(ids.astype(np.int64))[None]
    tokens, inputs = processor.image_tokens, {"input_ids": row}
    inputs["attention_mask"] = torch.ones_like(row)
    if not images:
        return inputs
    inputs["mm_token_type_ids"] = (row == tokens.id).int() + 2 * (row == tokens.video_id).int()
    for pixels, grids, shown in (
        ("pixel_values", "image_grid_thw", [i for i in images if not is_clip(i)]),
        ("pixel_values_videos", "video_grid_thw", [i for i in images if is_clip(i)]),
    ):
        if shown:
            inputs[pixels] = torch.from_numpy(np.concatenate([processor.pixels(i) for i in shown]))
            inputs[grids] = torch.tensor([processor.grid(i) for i in shown])
    if tokens.tokens_per_second is not None and "video_grid_thw" in inputs:
        # As transformers' processor of a video sampled at a fixed rate.
        times = [clip_of(i).timestamps for i in images if is_clip(i)]
        rates = [1 / (t[1] - t[0]) if len(t) > 1 else 1.0 for t in times]
        inputs["second_per_grid_ts"] = torch.tensor([2 / rate for rate in rates])
    return inputs


def transformers_logprobs(processor, model, sequence, banned: np.ndarray) -> torch.Tensor:
    """Log-probability of each sampled token by transformers' own forward, float32 [R]."""
    inputs = transformers_inputs(processor, sequence.ids, [image for image, _ in sequence.images])
    if "video_grid_thw" in inputs:
        # Text begins behind a clip's largest position, which transformers 5 differs from.
        names = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts", "mm_token_type_ids")
        grids = {name: inputs[name] for name in names if name in inputs}
        positions, _ = model.model.get_rope_index(inputs["input_ids"], **grids)
        is_frame = inputs["input_ids"][0] == processor.image_tokens.video_id
        inputs["position_ids"] = behind_clips(positions, is_frame)
    model.model.rope_deltas = None
    logits = model(**inputs).logits[0].float()
    logits = logits.masked_fill(torch.from_numpy(banned), -torch.inf)
    sampled = torch.from_numpy(np.flatnonzero(sequence.loss_mask))
    return logits.log_softmax(-1)[sampled - 1, inputs["input_ids"][0, sampled]]
