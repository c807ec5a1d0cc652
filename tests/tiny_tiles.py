"""Tiny checkpoints in the format of the hub whose images are tiles, each with a tokenizer and a processor of its own."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer, Qwen2Tokenizer

from rlinf_vl.extras.toy import files

#: Pixels and patches along a side of a tile, and its tokens: four patches make one.
TILE, PATCHES, TOKENS = 48, 6, 9
ROPE = {"rope_type": "default", "rope_theta": 1e4}
TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{%- if part.type in ['image', 'image_url'] or 'image' in part -%}IMAGE
{% elif 'text' in part -%}{{ part.text }}{%- endif -%}
{%- endfor %}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""
TEXT = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rope_parameters": ROPE,
    "tie_word_embeddings": True,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
NORMALIZE = {"image_mean": [0.9] * 3, "image_std": [0.2] * 3}
INTERNVL_MARKS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
GEMMA3_MARKS = {
    "boi_token": "<start_of_image>",
    "image_token": "<image_soft_token>",
    "eoi_token": "<end_of_image>",
}
IDEFICS3_MARKS = [
    "<fake_token_around_image>",
    "<image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{i + 1}_col_{j + 1}>" for i in range(6) for j in range(6)),
]


def write_internvl(folder: Path, seed: int = 0) -> Path:
    """Write an InternVL, which has its tiles in one row between two marks, and return its folder."""
    tokenizer = _write_tokenizer(folder, list(INTERNVL_MARKS.values()), "<IMG_CONTEXT>")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | INTERNVL_MARKS))
    images = {
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": {"height": TILE, "width": TILE},
        "crop_to_patches": True,
        "min_patches": 1,
        "max_patches": 4,
    }
    processor = {"processor_class": "InternVLProcessor", "image_seq_length": TOKENS}
    _write_processor(folder, images, processor)
    config = AutoConfig.for_model(
        "internvl",
        text_config=_text(tokenizer, "qwen2"),
        vision_config=VISION | {"image_size": [TILE, TILE], "patch_size": [TILE // PATCHES] * 2},
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=TOKENS,
        downsample_ratio=0.5,
        tie_word_embeddings=True,
    )
    return _write_model(folder, config, seed)


def write_idefics3(folder: Path, seed: int = 0) -> Path:
    """Write an Idefics 3, which names row and column of each tile, and return its folder. SmolVLM's prompts are the same."""
    tokenizer = _write_tokenizer(folder, IDEFICS3_MARKS, "<image>")
    images = {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": 3 * TILE},
        "max_image_size": {"longest_edge": TILE},
        "do_image_splitting": True,
    }
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": TOKENS}
    _write_processor(folder, images, processor)
    config = AutoConfig.for_model(
        "idefics3",
        text_config=_text(tokenizer, "llama"),
        vision_config=VISION | {"image_size": TILE, "patch_size": TILE // PATCHES},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
    )
    return _write_model(folder, config, seed)


def write_gemma3(folder: Path, seed: int = 0) -> Path:
    """Write a Gemma 3, whose processor writes line breaks and marks around an image, and return its folder.

    Its layers slide, and its tokenizer joins line breaks.
    """
    tokenizer = _write_tokenizer(
        folder, list(GEMMA3_MARKS.values()), "<start_of_image>", ["\n\n", "\n\n\n"]
    )
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | GEMMA3_MARKS))
    images = {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": TILE, "width": TILE},
    }
    processor = {"processor_class": "Gemma3Processor", "image_seq_length": TOKENS}
    _write_processor(folder, images, processor)
    text = _text(tokenizer, "gemma3_text") | {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 11,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": ROPE,
            "full_attention": ROPE | {"rope_theta": 1e6},
        },
    }
    config = AutoConfig.for_model(
        "gemma3",
        text_config=text,
        vision_config=VISION | {"image_size": TILE, "patch_size": TILE // PATCHES},
        mm_tokens_per_image=TOKENS,
        image_token_index=tokenizer.convert_tokens_to_ids("<image_soft_token>"),
        boi_token_index=tokenizer.convert_tokens_to_ids("<start_of_image>"),
        eoi_token_index=tokenizer.convert_tokens_to_ids("<end_of_image>"),
        eos_token_id=tokenizer.eos_token_id,
    )
    return _write_model(folder, config, seed)


def _write_tokenizer(
    folder: Path, marks: list[str], placeholder: str, texts: Sequence[str] = ()
) -> Any:
    """Write the toy's tokenizer with these marks and tokens of plain text, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    files.write_toy_files(folder)
    (folder / "video_preprocessor_config.json").unlink()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert isinstance(tokenizer, Qwen2Tokenizer)
    special = [*tokenizer.all_special_tokens, *marks]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.add_tokens(list(texts))
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", placeholder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def _write_processor(folder: Path, images: dict[str, Any], processor: dict[str, Any]) -> None:
    (folder / "preprocessor_config.json").write_text(json.dumps(images | NORMALIZE))
    (folder / "processor_config.json").write_text(json.dumps(processor))


def _text(tokenizer: Any, model_type: str) -> dict[str, Any]:
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return TEXT | ids | {"model_type": model_type, "vocab_size": len(tokenizer)}


def _write_model(folder: Path, config: Any, seed: int) -> Path:
    """Write a model with random weights, and return the folder."""
    torch.manual_seed(seed)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    return folder
