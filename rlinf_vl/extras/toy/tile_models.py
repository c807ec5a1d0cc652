"""The toy's models that read an image as a tile, and have no file in `rlinf_vl.models.families`.

Text positions are counted, and a projector stands beside the vision tower. Gemma 3's layers slide,
but for the last, and the tokens of its image see each other.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from rlinf_vl.extras.toy import files

#: Side of a tile in pixels, the toy's pictures, and its tokens: four patches make one.
TILE = 48
TILE_TOKENS = (TILE // files.PATCH_SIZE // files.MERGE_SIZE) ** 2
#: Tokens that a sliding layer of the Gemma 3 sees: fewer than those of a question.
WINDOW = 24


@dataclass(frozen=True)
class TileModel:
    """How the files and the config of such a model are made.

    Attributes:
        marks: tokens by the tokenizer's names of them.
        image: the chat template's text of an image.
        image_processor: its class, and settings beyond a tile's size.
        processor: the class of transformers' combined processor.
        config: (sizes of the text model, sizes of the tower, ids of the special tokens) →
            transformers' config, by the names that configs have for sizes.
    """

    marks: Mapping[str, str]
    image: str
    image_processor: Mapping[str, Any]
    processor: str
    config: Callable[[dict[str, Any], dict[str, Any], Mapping[str, int]], Any]

    def write_files(self, folder: Path, words: Iterable[str]) -> None:
        """Write tokenizer, chat template, generation and image settings."""
        files.write_tokenizer(folder, words, marks=self.marks.values(), image=self.image)
        tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
        images = {
            "size": {"height": TILE, "width": TILE},
            "image_mean": [0.9] * 3,
            "image_std": [0.2] * 3,
        }
        processor = {"processor_class": self.processor, "image_seq_length": TILE_TOKENS}
        for name, settings in (
            ("tokenizer_config.json", tokenizer | dict(self.marks)),
            ("preprocessor_config.json", images | dict(self.image_processor)),
            ("processor_config.json", processor),
        ):
            (folder / name).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _internvl(text: dict[str, Any], vision: dict[str, Any], ids: Mapping[str, int]) -> Any:
    """Return an InternVL's config: `TileModel.config`."""
    sides = {"image_size": [TILE] * 2, "patch_size": [files.PATCH_SIZE] * 2}
    return AutoConfig.for_model(
        "internvl",
        text_config=text | {"model_type": "qwen2"},
        vision_config=vision | sides | {"layer_scale_init_value": 1.0},
        image_token_id=ids["<IMG_CONTEXT>"],
        image_seq_length=TILE_TOKENS,
        downsample_ratio=1 / files.MERGE_SIZE,
        tie_word_embeddings=True,
    )


def _gemma3(text: dict[str, Any], vision: dict[str, Any], ids: Mapping[str, int]) -> Any:
    """Return a Gemma 3's config: `TileModel.config`."""
    rope, layers = text["rope_parameters"], text["num_hidden_layers"]
    text = text | {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": text["head_dim"],
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention"] * (layers - 1) + ["full_attention"],
        "rope_parameters": {"sliding_attention": rope, "full_attention": rope},
    }
    return AutoConfig.for_model(
        "gemma3",
        text_config=text,
        vision_config=vision | {"image_size": TILE, "patch_size": files.PATCH_SIZE},
        mm_tokens_per_image=TILE_TOKENS,
        image_token_index=ids["<image_soft_token>"],
        boi_token_index=ids["<start_of_image>"],
        eoi_token_index=ids["<end_of_image>"],
        eos_token_id=text["eos_token_id"],
        tie_word_embeddings=True,
    )


#: By model_type.
TILE_MODELS = {
    "internvl": TileModel(
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        "<IMG_CONTEXT>",
        {
            "image_processor_type": "GotOcr2ImageProcessor",
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 4,
        },
        "InternVLProcessor",
        _internvl,
    ),
    "gemma3": TileModel(
        {
            "boi_token": "<start_of_image>",
            "image_token": "<image_soft_token>",
            "eoi_token": "<end_of_image>",
        },
        "<start_of_image>",
        {"image_processor_type": "Gemma3ImageProcessor"},
        "Gemma3Processor",
        _gemma3,
    ),
}
