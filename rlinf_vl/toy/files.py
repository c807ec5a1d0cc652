"""The files around the toy model's weights: tokenizer, chat template, generation and image settings.

The tokenizer is Qwen's kind: byte-level BPE over all 256 bytes, so any text can be tokenized, with just enough merges
that each word of the toy task's prompt and answer is one token. Files have the names and forms that transformers and
SGLang expect.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Their ids follow the bytes and the merges, in this order."""
PAD_TOKEN = "<|endoftext|>"
EOS_TOKEN = "<|im_end|>"

WORDS = ("user", "assistant", "system", "What", " is", " the", " area", " perimeter", "*(", ")=", " \\", "boxed")
"""Pieces of text (as the pre-tokenizer cuts them) that become one token each."""

PATCH_SIZE, MERGE_SIZE, TEMPORAL_PATCH_SIZE = 8, 2, 2
PIXEL_MEAN, PIXEL_STD = 0.9, 0.2
MIN_PIXELS, MAX_PIXELS = 32 * 32, 192 * 192
"""Bounds of an image's area: the toy's 48×48 pass unchanged, a larger picture costs at most 144 tokens."""

# Qwen2's pre-tokenizer: contractions, words with what stands before them, single digits, punctuation, white space.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{%- if part.type in ['image', 'image_url'] or 'image' in part or 'image_url' in part -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' or 'video' in part -%}
<|vision_start|><|video_pad|><|vision_end|>
{%- elif 'text' in part -%}
{{ part.text }}
{%- endif -%}
{%- endfor %}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def toy_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """(token → id, merges), without special tokens: the bytes, then each word of `WORDS` grown from its left end."""
    vocabulary = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for word in WORDS:
        letters = word.replace(" ", "Ġ")
        for end in range(2, len(letters) + 1):
            if letters[:end] not in vocabulary:
                merges.append((letters[: end - 1], letters[end - 1]))
                vocabulary[letters[:end]] = len(vocabulary)
    return vocabulary, merges


def write_toy_tokenizer(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, vocab.json, merges.txt and chat_template.jinja into `folder`."""
    vocabulary, merges = toy_vocabulary()
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, continuing_subword_prefix="", end_of_word_suffix=""))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "vocab.json", vocabulary)
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "add_prefix_space": False,
            "added_tokens_decoder": {
                str(len(vocabulary) + index): {
                    "content": token,
                    "lstrip": False,
                    "normalized": False,
                    "rstrip": False,
                    "single_word": False,
                    "special": True,
                }
                for index, token in enumerate(SPECIAL_TOKENS)
            },
            "additional_special_tokens": [t for t in SPECIAL_TOKENS if t not in (PAD_TOKEN, EOS_TOKEN)],
            "bos_token": None,
            "eos_token": EOS_TOKEN,
            "pad_token": PAD_TOKEN,
            "unk_token": None,
            "errors": "replace",
            "clean_up_tokenization_spaces": False,
            "split_special_tokens": False,
            "model_max_length": 4096,
        },
    )


def write_toy_processor(folder: Path) -> None:
    """Write preprocessor_config.json and video_preprocessor_config.json into `folder`."""
    common = {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [PIXEL_MEAN] * 3,
        "image_std": [PIXEL_STD] * 3,
        "merge_size": MERGE_SIZE,
        "patch_size": PATCH_SIZE,
        "processor_class": "Qwen3VLProcessor",
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
        "temporal_patch_size": TEMPORAL_PATCH_SIZE,
    }
    _write_json(folder / "preprocessor_config.json", common | {"image_processor_type": "Qwen2VLImageProcessor"})
    _write_json(folder / "video_preprocessor_config.json", common | {"video_processor_type": "Qwen3VLVideoProcessor"})


def write_toy_generation_config(folder: Path, ids: dict[str, int]) -> None:
    """Write generation_config.json into `folder`: what to stop at and how to sample; `ids` maps special tokens."""
    _write_json(
        folder / "generation_config.json",
        {
            "do_sample": True,
            "eos_token_id": [ids[EOS_TOKEN]],
            "pad_token_id": ids[PAD_TOKEN],
            "temperature": 1.0,
            "top_k": 0,
            "top_p": 1.0,
        },
    )


def special_ids() -> dict[str, int]:
    """Special token → id."""
    first = len(toy_vocabulary()[0])
    return {token: first + index for index, token in enumerate(SPECIAL_TOKENS)}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
