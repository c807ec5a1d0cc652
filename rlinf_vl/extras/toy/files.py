"""The toy model's files besides its weights: tokenizer, chat template, generation, image settings.

The tokenizer is of Qwen's kind: byte-level BPE over all 256 bytes, so any text can be tokenized. It
has just enough merges that each word of a toy task's prompts and answers is one token. Files have
the names and forms that transformers and SGLang expect.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, pre_tokenizers
from transformers import GenerationConfig, Qwen2Tokenizer

#: The special tokens, in the order of their ids, which follow those of the bytes and the merges.
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
PAD_TOKEN = "<|endoftext|>"
EOS_TOKEN = "<|im_end|>"
#: Pieces of text, as the pre-tokenizer cuts them, that become one token each; a task may add more.
WORDS = (
    "user",
    "assistant",
    "system",
    "What",
    " is",
    " the",
    " area",
    " perimeter",
    "*(",
    ")=",
    " \\",
    "boxed",
)

PATCH_SIZE = 8
MERGE_SIZE = 2
TEMPORAL_PATCH_SIZE = 2

#: Tools are shown as name(arguments): a JSON schema would be longer than all else that the tiny
#: models read.
CHAT_TEMPLATE = """\
{%- if tools -%}
<|im_start|>system
{% for tool in tools -%}
{{ tool.function.name }}({{ ((tool.function.parameters or {}).properties or {}) | join(',') }})
{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{%- if part.type in ['image', 'image_url'] or 'image' in part or 'image_url' in part -%}
IMAGE
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


def toy_vocabulary(words: Iterable[str] = ()) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return (token → id, merges), without special tokens.

    The tokens are the bytes, then each prefix of each word of `WORDS` and `words`: BPE builds a
    word from its left end, one character per merge.
    """
    vocabulary = {
        token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    merges = []
    for word in (*WORDS, *words):
        letters = word.replace(" ", "Ġ")  # byte-level BPE writes a space as Ġ
        for end in range(2, len(letters) + 1):
            if letters[:end] not in vocabulary:
                merges.append((letters[: end - 1], letters[end - 1]))
                vocabulary[letters[:end]] = len(vocabulary)
    return vocabulary, merges


def special_ids(words: Iterable[str] = (), marks: Iterable[str] = ()) -> dict[str, int]:
    """Return the id of each special token, `marks` behind `SPECIAL_TOKENS`, in the vocabulary with
    these words."""
    first = len(toy_vocabulary(words)[0])
    return {token: first + index for index, token in enumerate((*SPECIAL_TOKENS, *marks))}


def write_tokenizer(
    folder: Path,
    words: Iterable[str] = (),
    *,
    marks: Iterable[str] = (),
    image: str = "<|vision_start|><|image_pad|><|vision_end|>",
) -> None:
    """Write the tokenizer with its chat template, and the generation settings.

    Args:
        words, marks: as in `special_ids`.
        image: the chat template's text of an image.
    """
    vocabulary, merges = toy_vocabulary(words)
    ids = special_ids(words, marks)
    make: Any = Qwen2Tokenizer  # its annotations only allow file names
    tokenizer = make(
        vocabulary | ids,
        merges,
        unk_token=None,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        additional_special_tokens=[AddedToken(token, special=True) for token in ids],
        chat_template=CHAT_TEMPLATE.replace("IMAGE", image),
        model_max_length=4096,
    )
    tokenizer.save_pretrained(folder)
    GenerationConfig(
        do_sample=True,
        eos_token_id=[ids[EOS_TOKEN]],
        pad_token_id=ids[PAD_TOKEN],
        temperature=1.0,
        top_k=0,
        top_p=1.0,
    ).save_pretrained(folder)


def write_toy_files(folder: Path, words: Iterable[str] = ()) -> None:
    """Write the tokenizer with its chat template, and generation, image and video settings, as a
    Qwen3-VL has them."""
    write_tokenizer(folder, words)
    pixels = dict.fromkeys(("do_convert_rgb", "do_normalize", "do_rescale", "do_resize"), True) | {
        "image_mean": [0.9] * 3,
        "image_std": [0.2] * 3,
        "merge_size": MERGE_SIZE,
        "patch_size": PATCH_SIZE,
        "processor_class": "Qwen3VLProcessor",
        "resample": 3,
        "rescale_factor": 1 / 255,
        # Bounds of the area: 48×48 passes unchanged, a larger picture has at most 144 tokens.
        "size": {"shortest_edge": 32 * 32, "longest_edge": 192 * 192},
        "temporal_patch_size": TEMPORAL_PATCH_SIZE,
    }
    image = pixels | {"image_processor_type": "Qwen2VLImageProcessor"}
    video = pixels | {"video_processor_type": "Qwen3VLVideoProcessor"}
    for name, settings in (
        ("preprocessor_config.json", image),
        ("video_preprocessor_config.json", video),
    ):
        (folder / name).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
