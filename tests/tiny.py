"""A tiny Qwen3-VL with random weights, and random groups for it: shared by the tests that need a model."""

import io

import numpy as np
import torch
from PIL import Image
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from rlinf_vl.types import Group, ImageRef, Trajectory

VOCAB = 64
IMAGE_ID, VIDEO_ID, VISION_START, VISION_END, PAD, EOS = 60, 61, 62, 63, 0, 1
PATCH, MERGE = 4, 2
PATCH_DIM = 3 * 2 * PATCH * PATCH


def tiny_model(seed: int = 0, tie: bool = True, vision_heads: int = 2) -> Qwen3VLForConditionalGeneration:
    """float32, 2 text layers, 2 vision layers, deepstack on the first; weights large enough for images to matter."""
    torch.manual_seed(seed)
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 512,
            "initializer_range": 0.15,
            "tie_word_embeddings": tie,
            "pad_token_id": PAD,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "hidden_size": 24,
            "depth": 2,
            "num_heads": vision_heads,
            "intermediate_size": 32,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "num_position_embeddings": 16,
            "out_hidden_size": 32,
            "deepstack_visual_indexes": [0],
            "initializer_range": 0.2,
        },
        image_token_id=IMAGE_ID,
        video_token_id=VIDEO_ID,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=tie,
    )
    return Qwen3VLForConditionalGeneration(config).eval()


def banned() -> np.ndarray:
    out = np.zeros(VOCAB, bool)
    out[[IMAGE_ID, VIDEO_ID, VISION_START, VISION_END, PAD]] = True
    return out


def image(rng: np.random.Generator, rows: int, columns: int) -> tuple[ImageRef, np.ndarray]:
    """A random picture of rows × columns merged tokens, and its grid."""
    array = rng.integers(0, 256, (rows * PATCH * MERGE, columns * PATCH * MERGE, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "PNG")
    return ImageRef.of(buffer.getvalue()), np.array([1, rows * MERGE, columns * MERGE])


def pixels(ref: ImageRef) -> np.ndarray:
    """Patches of an image made by `image`: any fixed function of the picture serves a random model."""
    array = np.asarray(Image.open(io.BytesIO(ref.data)), np.float32) / 128 - 1
    h, w = array.shape[0] // PATCH, array.shape[1] // PATCH
    x = array.reshape(h // MERGE, MERGE, PATCH, w // MERGE, MERGE, PATCH, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    x = np.repeat(x[:, :, :, :, :, None], 2, axis=5)
    return np.ascontiguousarray(x.reshape(h * w, PATCH_DIM))


def prompt(rng: np.random.Generator, grids: list[np.ndarray], text: int) -> np.ndarray:
    """Random text with the images' placeholders interleaved, int32."""
    parts = [rng.integers(2, 60, text)]
    for grid in grids:
        n = int(grid.prod()) // MERGE**2
        parts += [[VISION_START], np.full(n, IMAGE_ID), [VISION_END], rng.integers(2, 60, rng.integers(1, 4))]
    return np.concatenate(parts).astype(np.int32)


def group(rng: np.random.Generator, shapes: list[tuple[int, int]], responses: list[int], name: str = "g") -> Group:
    """One problem with images of the given shapes (merged tokens), and random responses of the given lengths."""
    made = [image(rng, *shape) for shape in shapes]
    trajectories = tuple(
        Trajectory(
            ids=rng.integers(2, 60, n).astype(np.int32),
            response_mask=np.ones(n, bool),
            logprobs=(-3 + rng.normal(size=n)).astype(np.float32),
            versions=np.zeros(n, np.int32),
            reward=float(rng.integers(0, 2)),
            finish_reason="stop",
        )
        for n in responses
    )
    return Group(
        id=name,
        problem_id=name,
        prompt_ids=prompt(rng, [g for _, g in made], int(rng.integers(3, 7))),
        images=tuple(i for i, _ in made),
        image_grids=np.array([g for _, g in made], np.int32).reshape(len(made), 3),
        trajectories=trajectories,
    )


def transformers_logprobs(model, g: Group, index: int, temperature: float = 1.0) -> torch.Tensor:
    """Log-probability of each response token by transformers' own unpacked forward (its own M-RoPE and mask), float32 [R]."""
    t = g.trajectories[index]
    ids = torch.tensor(np.concatenate([g.prompt_ids, t.ids]), dtype=torch.int64)[None]
    inputs = {}
    if g.images:
        inputs = {
            "pixel_values": torch.from_numpy(np.concatenate([pixels(i) for i in g.images])),
            "image_grid_thw": torch.from_numpy(g.image_grids.astype(np.int64)),
            "mm_token_type_ids": (ids == IMAGE_ID).int(),
        }
    model.model.rope_deltas = None
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).logits[0].float() / temperature
    logits[:, torch.from_numpy(banned())] = -torch.inf
    logp = logits.log_softmax(-1)
    where = len(g.prompt_ids) + torch.arange(len(t.ids))
    return logp[where - 1, ids[0, where]]
