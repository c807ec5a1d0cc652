"""A tiny InternVL checkpoint in the format of the hub, with a tokenizer and a processor of its own."""

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer, Qwen2Tokenizer

from rlinf_vl.toy import files

SPECIAL = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
#: Pixels and patches along a side of a tile, and its tokens: four patches make one.
TILE, PATCHES, TOKENS = 48, 6, 9
ROPE = {"rope_type": "default", "rope_theta": 1e4}
TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{%- if part.type in ['image', 'image_url'] or 'image' in part -%}<IMG_CONTEXT>
{% elif 'text' in part -%}{{ part.text }}{%- endif -%}
{%- endfor %}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""


def write_internvl(folder: Path, seed: int = 0) -> Path:
    """Write the checkpoint, with random weights, and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    files.write_toy_files(folder)
    (folder / "video_preprocessor_config.json").unlink()
    toy = AutoTokenizer.from_pretrained(folder)
    assert isinstance(toy, Qwen2Tokenizer)
    toy.add_special_tokens(
        {"additional_special_tokens": [*toy.all_special_tokens, *SPECIAL.values()]}
    )
    toy.chat_template = TEMPLATE
    toy.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | SPECIAL))
    images = {
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": {"height": TILE, "width": TILE},
        "crop_to_patches": True,
        "min_patches": 1,
        "max_patches": 4,
        "image_mean": [0.9] * 3,
        "image_std": [0.2] * 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    processor = {"processor_class": "InternVLProcessor", "image_seq_length": TOKENS}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    text = {
        "model_type": "qwen2",
        "vocab_size": len(toy),
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_parameters": ROPE,
        "tie_word_embeddings": True,
        "eos_token_id": toy.eos_token_id,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": [TILE, TILE],
        "patch_size": [TILE // PATCHES] * 2,
    }
    config = AutoConfig.for_model(
        "internvl",
        text_config=text,
        vision_config=vision,
        image_token_id=toy.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=TOKENS,
        downsample_ratio=0.5,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    return folder
