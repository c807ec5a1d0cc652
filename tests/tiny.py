"""Tiny members of every family with random weights, and random groups for them: shared by the tests that need a model."""

import io
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from rlinf_vl.models.image_tokens import ImageTokens
from rlinf_vl.types import (
    Group,
    ImageRef,
    Request,
    Sample,
    SamplingParams,
    TokenSequence,
    Trajectory,
    Turn,
)

VOCAB = 64
IMAGE_ID, VIDEO_ID, VISION_START, VISION_END, PAD, EOS = 60, 61, 62, 63, 0, 1
PATCH, MERGE = 4, 2
IMAGE_TOKENS = ImageTokens(IMAGE_ID, MERGE)
PATCH_DIM = 3 * 2 * PATCH * PATCH


TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": EOS,
}
VISION = {
    "hidden_size": 24,
    "depth": 2,
    "num_heads": 2,
    "intermediate_size": 32,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "initializer_range": 0.2,
}
QWEN3_VISION = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
QWEN3_5 = {
    "head_dim": 16,
    "rope_parameters": {"mrope_interleaved": True, "partial_rotary_factor": 0.5},
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
}
QWEN3_5_VISION = {"num_position_embeddings": 16}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
QWEN3 = {"head_dim": 16, "rope_parameters": {"mrope_interleaved": True}}
#: model_type → what a tiny member of the family has beside `TEXT` and `VISION`; None: no vision tower.
MEMBERS: dict[str, tuple[dict, dict | None]] = {
    "qwen3_vl": (QWEN3, QWEN3_VISION),
    "qwen3_vl_moe": (QWEN3 | EXPERTS | {"mlp_only_layers": [0]}, QWEN3_VISION),
    "qwen2_5_vl": (
        {},
        {"window_size": 4 * PATCH, "fullatt_block_indexes": [1]},
    ),  # windows of 2 × 2 tokens
    "qwen3_5": (QWEN3_5, QWEN3_5_VISION),
    "qwen3_5_moe": (QWEN3_5 | EXPERTS | {"shared_expert_intermediate_size": 24}, QWEN3_5_VISION),
    "qwen3": ({"head_dim": 16}, None),
}


#: Names of the weights of a vision tower and its projector have one of these.
TOWER = (".visual.", ".vision_tower.", ".multi_modal_projector.")
#: A Gemma 3 whose images are tiles of 2 × 2 tokens, in patches of one token; its windows are shorter than its prompts.
GEMMA3_TEXT = {
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": base}
        for kind, base in (("sliding_attention", 1e4), ("full_attention", 1e6))
    },
}
TILE_SIDE = 2 * PATCH * MERGE
GEMMA3_VISION = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "patch_size": PATCH * MERGE,
    "image_size": TILE_SIDE,
}


def gemma3_config() -> Any:
    return AutoConfig.for_model(
        "gemma3",
        text_config=TEXT | GEMMA3_TEXT | {"initializer_range": 0.18},
        vision_config=GEMMA3_VISION,
        mm_tokens_per_image=4,
        image_token_index=IMAGE_ID,
        boi_token_index=VISION_START,
        eoi_token_index=VISION_END,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )


def tiny_family(model_type: str) -> Any:
    """The family of a tiny member."""
    from rlinf_vl.models.families import family_at, family_of

    return family_at(gemma3_config()) if model_type == "gemma3" else family_of(model_type)


def tiny_config(
    family: str = "qwen3_vl", *, tie: bool = True, text: Mapping = {}, vision: Mapping = {}
) -> Any:
    """transformers' config of a tiny member. `text` and `vision` replace keys of its parts; what follows from other keys does
    without being said: the tower's output size, the kinds of the layers, the sections of the rotary angles."""
    if family == "gemma3":
        return gemma3_config()
    own_text, own_vision = MEMBERS[family]
    sizes: dict[str, Any] = TEXT | own_text | {"tie_word_embeddings": tie} | dict(text)
    rope = {"rope_type": "default", "rope_theta": 1e4} | sizes.get("rope_parameters", {})
    if own_vision is None:
        return AutoConfig.for_model(family, **sizes | {"rope_parameters": rope})
    head = sizes.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"]
    angles = int(head * rope.get("partial_rotary_factor", 1)) // 2
    rope = {"mrope_section": [angles - 2 * (angles // 4), angles // 4, angles // 4]} | rope
    if interval := sizes.get("full_attention_interval"):
        kinds = [
            "linear_attention" if (i + 1) % interval else "full_attention"
            for i in range(sizes["num_hidden_layers"])
        ]
        sizes = {"layer_types": kinds} | sizes
    return AutoConfig.for_model(
        family,
        text_config=sizes | {"rope_parameters": rope},
        vision_config=VISION
        | own_vision
        | {"out_hidden_size": sizes["hidden_size"]}
        | dict(vision),
        image_token_id=IMAGE_ID,
        video_token_id=VIDEO_ID,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=tie,
    )


def tiny_model(
    seed: int = 0,
    tie: bool = True,
    vision_heads: int = 2,
    family: str = "qwen3_vl",
    **sizes: Mapping,
) -> Any:
    """A tiny member in float32, two layers deep on either side unless `sizes` (`text`, `vision`: see `tiny_config`) say more;
    weights large enough for images to matter. Biases and norms are random, too, and the decays of gated delta nets slow, so that
    their states reach far."""
    torch.manual_seed(seed)
    sizes["vision"] = {"num_heads": vision_heads} | sizes.get("vision", {})
    config = tiny_config(family, tie=tie, **sizes)
    kind = AutoModelForCausalLM if family == "qwen3" else AutoModelForImageTextToText
    model = kind.from_config(config).eval()
    for name, p in model.named_parameters():
        if name.endswith("A_log"):
            p.data.uniform_(-3, 0)
        elif p.ndim == 1:
            p.data += 0.1 * torch.randn_like(p)
        elif not p.any():  # Gemma's projector begins with zeros
            p.data.normal_(std=0.2)
    return model


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
    x = array.reshape(h // MERGE, MERGE, PATCH, w // MERGE, MERGE, PATCH, 3).transpose(
        0, 3, 1, 4, 6, 2, 5
    )
    x = np.repeat(x[:, :, :, :, :, None], 2, axis=5)
    return np.ascontiguousarray(x.reshape(h * w, PATCH_DIM))


def tiles(ref: ImageRef) -> np.ndarray:
    """The one tile of an image of 2 × 2 merged tokens, float32 [1, 3 · side²]."""
    array = np.asarray(Image.open(io.BytesIO(ref.data)), np.float32) / 128 - 1
    return np.ascontiguousarray(array.transpose(2, 0, 1)).reshape(1, 3 * TILE_SIDE**2)


def prompt(rng: np.random.Generator, grids: list[np.ndarray], text: int) -> np.ndarray:
    """Random text with the images' placeholders interleaved, int32."""
    parts = [rng.integers(2, 60, text)]
    for grid in grids:
        n = int(grid.prod()) // MERGE**2
        parts += [
            [VISION_START],
            np.full(n, IMAGE_ID),
            [VISION_END],
            rng.integers(2, 60, rng.integers(1, 4)),
        ]
    return np.concatenate(parts).astype(np.int32)


def request(
    rng: np.random.Generator,
    shapes: list[tuple[int, int]],
    sampling: SamplingParams | None = None,
    seeds=(),
) -> Request:
    """A random prompt with images of the given shapes (merged tokens)."""
    return request_about(rng, [image(rng, *shape) for shape in shapes], sampling, seeds)


def request_about(
    rng: np.random.Generator, images, sampling: SamplingParams | None = None, seeds=()
) -> Request:
    """A random prompt with these images and their grids."""
    ids = prompt(rng, [grid for _, grid in images], int(rng.integers(3, 7)))
    return Request(
        ids, tuple(i for i, _ in images), grids(images), sampling or SamplingParams(), tuple(seeds)
    )


def answered(
    request: Request, samples: Iterable[Sample], name: str = "g", rewards: Iterable[float] = ()
) -> Group:
    """The group of these samples."""
    trajectories, prompt = [], len(request.ids)
    for sample, reward in zip_longest(samples, rewards, fillvalue=0.0):
        sequence = TokenSequence.of_sample(request, sample)
        turn = Turn(0, prompt, len(sequence.ids), sample.finish_reason, reward)
        trajectories.append(Trajectory((sequence,), (turn,), reward, {}, sample.finish_reason))
    return Group(name, name, prompt, tuple(trajectories))


def group(
    rng: np.random.Generator, shapes: list[tuple[int, int]], responses: list[int], name: str = "g"
) -> Group:
    """One problem with images of the given shapes (merged tokens), and random responses of the given lengths."""
    images = [image(rng, *shape) for shape in shapes]
    samples, rewards = [], []
    for n in responses:
        ids, logprobs = (
            rng.integers(2, 60, n).astype(np.int32),
            (-3 + rng.normal(size=n)).astype(np.float32),
        )
        samples.append(Sample(ids, logprobs, np.zeros(n, np.int32), "stop"))
        rewards.append(float(rng.integers(0, 2)))
    return answered(request_about(rng, images), samples, name, rewards)


def grids(images) -> np.ndarray:
    """int64 [n, 3] of (image, grid) pairs."""
    return np.array([grid for _, grid in images], np.int64).reshape(-1, 3)


def transformers_logprobs(model, g: Group, index: int, temperature: float = 1.0) -> torch.Tensor:
    """Log-probability of each sampled token by transformers' own unpacked forward (its own M-RoPE and mask), float32 [R]."""
    found = []
    for sequence in g.trajectories[index].sequences:
        ids, inputs = transformers_inputs(sequence, model.config.model_type)
        model.model.rope_deltas = None
        logits = (
            model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).logits[0].float()
            / temperature
        )
        logits[:, torch.from_numpy(banned())] = -torch.inf
        where = torch.from_numpy(np.flatnonzero(sequence.loss_mask))
        found.append(logits.log_softmax(-1)[where - 1, ids[0, where]])
    return torch.cat(found)


def transformers_inputs(
    sequence: TokenSequence, model_type: str = "qwen3_vl"
) -> tuple[torch.Tensor, dict]:
    """(ids int64 [1, T], the images' arguments) of a transformers forward."""
    ids = torch.from_numpy(sequence.ids.astype(np.int64))[None]
    if not sequence.images:
        return ids, {}
    if model_type == "gemma3":
        rows = np.concatenate([tiles(image) for image, _ in sequence.images])
        squares = torch.from_numpy(rows).view(-1, 3, TILE_SIDE, TILE_SIDE)
        return ids, {"pixel_values": squares, "token_type_ids": (ids == IMAGE_ID).int()}
    return ids, {
        "pixel_values": torch.from_numpy(
            np.concatenate([pixels(image) for image, _ in sequence.images])
        ),
        "image_grid_thw": torch.from_numpy(grids(sequence.images)),
        "mm_token_type_ids": (ids == IMAGE_ID).int(),
    }


def tiny_policy(
    dtype: torch.dtype = torch.float32, seed: int = 0, temperature: float = 1.0, chunk: int | None = None,
    model_type: str = "qwen3_vl", **sizes: Mapping,
):  # fmt: skip
    """The tiny model as `Trainer` wants it, as a checkpoint is read in `dtype`: its weights, not the tables of rotary angles."""
    from rlinf_vl.models.loading import use_packed_attention
    from rlinf_vl.models.policy import PolicyModel

    family = tiny_family(model_type)
    model = use_packed_attention(tiny_model(seed, family=model_type, **sizes), family)
    for p in model.parameters():
        p.data = p.data.to(dtype)
    return PolicyModel(model, family, banned(), temperature=temperature, chunk=chunk)


def tiny_collator(model_type: str = "qwen3_vl", **settings):
    from rlinf_vl.packing.collator import Collator

    cut = tiles if model_type == "gemma3" else pixels
    return Collator(tiny_family(model_type), IMAGE_TOKENS, cut, PAD, **settings)


def tiny_trainer(
    mesh,
    load=tiny_policy,
    *,
    actor=None,
    algorithm=None,
    max_tokens: int = 400,
    teachers=(),
    **collator,
):
    """A `Trainer` of the tiny model in float32 (`actor` may say otherwise), for a run of one step."""
    from rlinf_vl.actor.trainer import TeacherSource, Trainer
    from rlinf_vl.config.presets import with_presets
    from rlinf_vl.config.schema import ActorConfig, AlgorithmConfig

    if actor is None:
        actor = ActorConfig()
        actor.fsdp_config.mixed_precision.param_dtype = "fp32"
    collate = tiny_collator(**collator)
    sources = [TeacherSource(load_teacher, collate, labels) for load_teacher, labels in teachers]
    algorithm = algorithm or with_presets(AlgorithmConfig())
    return Trainer(
        load,
        collate,
        mesh,
        actor,
        algorithm,
        max_tokens=max_tokens,
        total_steps=1,
        teachers=sources,
    )
