"""The toy models, built with random weights; `rlinf_vl.extras.toy.warm_start` trains them.

A toy model has one to two million parameters. Its checkpoint has the format of transformers, which
loads it with its own classes; it is built once and reused.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.utils.logging import disable_progress_bar

from rlinf_vl.extras.toy import files
from rlinf_vl.extras.toy.task import Toy, toy_of
from rlinf_vl.extras.toy.tile_models import TILE_MODELS
from rlinf_vl.models.families import family_at
from rlinf_vl.models.saving import save_model

#: Patches along a side of the picture for which the vision tower learns positions; those of other
#: sizes are interpolated.
GRID = 6
TEXT_INIT_STD = 0.05
VISION_INIT_STD = 0.08
#: Modules whose weights are drawn as those of their part.
MATRICES = nn.Linear | nn.Embedding | nn.Conv2d | nn.Conv3d
#: model_type → settings of its toy's text model and of its vision tower, beyond those of
#: `toy_config`.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": ({}, {"deepstack_visual_indexes": [0, 1]}),
    "qwen3_vl_moe": (
        # 96 keeps the experts' matrices from being square: see `save_model`.
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96},
        {"deepstack_visual_indexes": [0, 1, 2]},  # SGLang expects three
    ),
    "qwen3_5": (
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "full_attention_interval": 2,
        }
        | {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 32,
        }
        | {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 2, 2],
            }
            | {"mrope_interleaved": True, "partial_rotary_factor": 0.5}
        },
        {},
    ),
}


def write_files(toy: Toy, folder: Path) -> None:
    """Write the files of a toy's checkpoint besides its weights and config."""
    tile_model = TILE_MODELS.get(toy.model_type)
    write = tile_model.write_files if tile_model else files.write_toy_files
    write(folder, toy.words)


def toy_config(toy: Toy) -> Any:
    """Return the config of transformers for a toy's model.

    The text model is 128 wide; the vision tower is 64 wide with 3 layers. An image token stands for
    16×16 pixels.
    """
    tile_model = TILE_MODELS.get(toy.model_type)
    ids = files.special_ids(toy.words, tile_model.marks.values() if tile_model else ())
    text = {
        # The vocabulary is padded to a multiple of 8.
        "vocab_size": -(-(max(ids.values()) + 1) // 8) * 8,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "pad_token_id": ids[files.PAD_TOKEN],
        "bos_token_id": None,
        "eos_token_id": ids[files.EOS_TOKEN],
        "initializer_range": TEXT_INIT_STD,
    }
    vision = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": VISION_INIT_STD}
    layers, heads = 3, 2
    if tile_model:
        vision |= {"num_hidden_layers": layers, "num_attention_heads": heads}
        return tile_model.config(text, vision, ids)
    rope = {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
    vision |= {
        "depth": layers,
        "num_heads": heads,
        "out_hidden_size": text["hidden_size"],
        "patch_size": files.PATCH_SIZE,
        "spatial_merge_size": files.MERGE_SIZE,
        "temporal_patch_size": files.TEMPORAL_PATCH_SIZE,
        "num_position_embeddings": GRID**2,
    }
    family_text, family_vision = MODELS[toy.model_type]
    return AutoConfig.for_model(
        toy.model_type,
        text_config=text | {"rope_parameters": text["rope_parameters"] | rope} | family_text,
        vision_config=vision | family_vision,
        tie_word_embeddings=True,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )


def new_toy_model(toy: Toy, seed: int) -> PreTrainedModel:
    """Build the model in float32 with random weights.

    Matrices and embeddings are normal, biases 0, norms 1, and the decays of gated delta nets slow.
    """
    model = AutoModelForImageTextToText.from_config(toy_config(toy)).float()
    tower = set(model.get_encoder(modality="image").modules())
    generator = torch.Generator().manual_seed(seed)
    initialized = set()
    for name, module in model.named_modules():
        # The head is tied to the embeddings: drawing it, too, would draw those twice.
        if isinstance(module, MATRICES) and name != "lm_head":
            std = VISION_INIT_STD if module in tower else TEXT_INIT_STD
            nn.init.normal_(module.weight, std=std, generator=generator)
            initialized.add(module.weight)
            if (bias := getattr(module, "bias", None)) is not None:
                nn.init.zeros_(bias)
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            nn.init.uniform_(weight, -3, 0, generator=generator)
        # Experts, routers and the convolutions of gated delta nets are no modules of those types.
        elif weight.ndim > 1 and weight not in initialized:
            std = 0.3 if "conv1d" in name else TEXT_INIT_STD
            nn.init.normal_(weight, std=std, generator=generator)
    return model


def write_untrained(toy: Toy, folder: Path, seed: int) -> PreTrainedModel:
    """Write a checkpoint with random weights into a folder, which is created if missing.

    It has weights, config, tokenizer and image settings. Returns the model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_files(toy, folder)
    model = new_toy_model(toy, seed)
    model.generation_config = GenerationConfig.from_pretrained(folder)
    save_toy_model(model, folder)
    return model


def save_toy_model(model: PreTrainedModel, folder: Path) -> None:
    """Write weights and config."""
    disable_progress_bar()  # transformers would show a bar for one file of 4 MB
    save_model(model, family_at(model.config), folder)


def write_readme(toy: Toy, model: PreTrainedModel, folder: Path, build_facts: str) -> None:
    """Write a README that says what the task is, what is planted, and how the weights were made."""
    parameters = f"{model.num_parameters():,} parameters in float32"
    text = f"# Toy checkpoint\n\n{toy.summary()}\n\n{build_facts}, {parameters}.\n"
    (folder / "README.md").write_text(text, encoding="utf-8")


def config_of_toy(name: str) -> Any:
    """Return the config of transformers for the model of an embedded task."""
    return toy_config(toy_of(name))
