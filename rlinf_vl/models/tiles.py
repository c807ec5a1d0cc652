"""Images cut into tiles of one size, by the checkpoint's own processor.

LLaVA has one tile an image; InternVL as many as its shape asks for. A row of pixels is a tile, and
each tile becomes the same number of tokens.
"""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer
from transformers.models.auto.processing_auto import (
    PROCESSOR_MAPPING_NAMES,  # pyright: ignore[reportPrivateImportUsage]
    processor_class_from_name,
)
from transformers.processing_utils import ProcessorMixin

from rlinf_vl.models.image_tokens import ImageTokens


class TileImages:
    """Tiles as transformers' combined processor of a checkpoint cuts them.

    Attributes:
        placeholder: the text of a placeholder.
    """

    def __init__(
        self, path: str | Path, min_pixels: int | None = None, max_pixels: int | None = None
    ) -> None:
        """Load the processor of a checkpoint.

        Raises:
            ValueError: a bound of pixels is set, which tiles don't have; or the prompt has other
                text between the placeholders of an image.
        """
        for key, bound in (("min", min_pixels), ("max", max_pixels)):
            if bound is not None:
                raise ValueError(
                    f"data.image_{key}_pixels: {bound}, but {path} cuts images into tiles of one "
                    "size, whose number its own processor sets; leave it out"
                )
        self._processor = images_processor(path)
        self.placeholder: str = self._processor.image_token
        self._tokenizer = self._processor.tokenizer
        rows, ids = self._process(Image.new("RGB", (64, 64)))
        placeholders = np.flatnonzero(ids == self._id)
        first, last = int(placeholders[0]), int(placeholders[-1])
        if last - first + 1 != len(placeholders) or len(placeholders) % len(rows):
            raise ValueError(
                f"the processor of {path} makes {len(rows)} tiles and {len(placeholders)} "
                "placeholders of an image, with other tokens between them; only tiles of equally "
                "many tokens in a row are supported"
            )
        self._tokens_per_tile = len(placeholders) // len(rows)
        self._prefix = tuple(ids[:first].tolist())
        self._suffix = tuple(ids[last + 1 :].tolist())

    @property
    def _id(self) -> int:
        return self._tokenizer.convert_tokens_to_ids(self.placeholder)

    @cache  # noqa: B019  # one processor in a process
    def grid(self, height: int, width: int) -> tuple[int, int, int]:
        """Return (tiles, 1, 1) of an image of this many pixels.

        Raises:
            ValueError: the processor writes other tokens for it than for other images.
        """
        rows, ids = self._process(Image.new("RGB", (width, height)))
        tokens = self.image_tokens(self._id)
        grids = np.array([[len(rows), 1, 1]])
        expected, _ = tokens.expand(np.array([self._id], np.int32), grids)
        if not np.array_equal(ids, expected):
            raise ValueError(
                f"an image of {width}×{height} becomes {len(ids)} ids of {len(rows)} tiles, not "
                f"{len(expected)}, {self._tokens_per_tile} a tile"
            )
        return len(rows), 1, 1

    def patches(self, image: Image.Image) -> np.ndarray:
        """Return the tiles of an RGB image, float32 [tiles, 3 · height · width]."""
        return self._process(image)[0]

    def image_tokens(self, placeholder_id: int) -> ImageTokens:
        """Return the images' placeholders, which have this id, among token ids."""
        return ImageTokens(
            placeholder_id,
            tokens_per_tile=self._tokens_per_tile,
            prefix=self._prefix,
            suffix=self._suffix,
        )

    def _process(self, image: Image.Image) -> tuple[np.ndarray, np.ndarray]:
        """Return (tiles, ids of the prompt) of one image."""
        out = self._processor(
            images=[image],
            text=[self.placeholder],
            return_tensors="np",
            text_kwargs={"add_special_tokens": False},
        )
        pixels = np.asarray(out["pixel_values"], np.float32)
        # Some have a dimension for the images of a prompt before that of tiles.
        tiles = pixels.reshape(-1, int(np.prod(pixels.shape[-3:])))
        return tiles, np.asarray(out["input_ids"][0], np.int32)


def images_processor(path: str | Path) -> Any:
    """Load the combined processor of a checkpoint for images alone.

    Without its video processor, which needs torchvision.
    """
    settings, _ = ProcessorMixin.get_processor_dict(path)
    model_type = AutoConfig.from_pretrained(path).model_type
    name: Any = settings.pop("processor_class", None) or PROCESSOR_MAPPING_NAMES[model_type]
    processor_class = processor_class_from_name(name)

    class ImagesOnly(processor_class):  # pyright: ignore[reportGeneralTypeIssues]
        def check_argument_for_proper_class(self, *_: Any) -> None:
            """Accept None in place of a video processor."""

    own_settings = {
        key: value
        for key, value in settings.items()
        if key not in ("image_processor", "video_processor", "tokenizer", "auto_map")
    }
    return ImagesOnly(
        image_processor=AutoImageProcessor.from_pretrained(path, backend="pil"),
        tokenizer=AutoTokenizer.from_pretrained(path),
        **own_settings,
    )


def blank_tile(config: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return (tiles, grids) of an image of one tile."""
    height, width = _sides(config.vision_config.image_size)
    # Not zeros: some models take tiles of zeros for padding.
    return np.ones((1, 3 * height * width), np.float32), np.array([[1, 1, 1]])


def patches_of_tile(config: Any) -> int:
    """Return the number of patches that a tower cuts a tile into."""
    vision = config.vision_config
    height, width = _sides(vision.image_size)
    patch_height, patch_width = _sides(vision.patch_size)
    return (height // patch_height) * (width // patch_width)


def _sides(size: Any) -> tuple[int, int]:
    """Return (height, width) of a config's size, which is a number for a square."""
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return height, width
