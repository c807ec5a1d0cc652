"""The toy's InternVL: images are tiles of one size, text positions are counted, and a projector
stands beside the vision tower. It has no file in `rlinf_vl.models.families`."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from rlinf_vl.toy import files

#: Side of a tile in pixels, the toy's pictures, and its tokens: four patches make one.
TILE = 48
TILE_TOKENS = (TILE // files.PATCH_SIZE // files.MERGE_SIZE) ** 2
PLACEHOLDER = "<IMG_CONTEXT>"
#: Tokens by the tokenizer's names of them.
MARKS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": PLACEHOLDER,
    "video_token": "<video>",
}


def write_files(folder: Path, words: Iterable[str]) -> None:
    """Write tokenizer, chat template, generation and image settings."""
    files.write_tokenizer(folder, words, marks=MARKS.values(), image=PLACEHOLDER)
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    images = {
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": {"height": TILE, "width": TILE},
        "crop_to_patches": True,
        "min_patches": 1,
        "max_patches": 4,
        "image_mean": [0.9] * 3,
        "image_std": [0.2] * 3,
    }
    processor = {"processor_class": "InternVLProcessor", "image_seq_length": TILE_TOKENS}
    for name, settings in (
        ("tokenizer_config.json", tokenizer | MARKS),
        ("preprocessor_config.json", images),
        ("processor_config.json", processor),
    ):
        (folder / name).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def config(text: dict[str, Any], vision: dict[str, Any], ids: Mapping[str, int]) -> Any:
    """Return the config of transformers.

    Args:
        text, vision: sizes of the text model and the tower, by the names that configs have for them.
        ids: of the special tokens.
    """
    sides = {"image_size": [TILE] * 2, "patch_size": [files.PATCH_SIZE] * 2}
    return AutoConfig.for_model(
        "internvl",
        text_config=text | {"model_type": "qwen2"},
        vision_config=vision | sides | {"layer_scale_init_value": 1.0},
        image_token_id=ids[PLACEHOLDER],
        image_seq_length=TILE_TOKENS,
        downsample_ratio=1 / files.MERGE_SIZE,
        tie_word_embeddings=True,
    )
