"""Images cut into tiles of one size, by the checkpoint's own processor.

LLaVA and Gemma 3 have one tile an image; InternVL and SmolVLM have as many as its shape asks for. A
row of pixels is a tile, and each tile becomes the same number of tokens. The ids around an image's
tokens and between its tiles are those that the processor writes. Gemma 3's writes line breaks around
an image, which a tokenizer may join with those of the template: there the text around an image is
written before the prompt is encoded.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.processing_auto import (
    PROCESSOR_MAPPING_NAMES,  # pyright: ignore[reportPrivateImportUsage]
    processor_class_from_name,
)
from transformers.processing_utils import ProcessorMixin

from rlinf_vl.models.image_tokens import ImageTokens, image_token_id

#: Sizes of images whose tiles and ids are kept.
MAX_SIZES = 4096
#: Side in pixels of an image that has as many tiles as there are.
LARGE = 2048


class TileImages:
    """Tiles as transformers' combined processor of a checkpoint cuts them.

    Attributes:
        placeholder: the text that a template writes for an image.
    """

    def __init__(
        self,
        path: str | Path,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        """Load the processor of a checkpoint, with Python of its own if it is trusted.

        Raises:
            ValueError: a bound of pixels is set, which tiles don't have; or tiles have unequal
                numbers of tokens.
        """
        for key, bound in (("min", min_pixels), ("max", max_pixels)):
            if bound is not None:
                raise ValueError(
                    f"data.image_{key}_pixels: {bound}, but {path} cuts images into tiles of one "
                    "size, whose number its own processor sets; leave it out"
                )
        self._processor = images_processor(path, trust_remote_code=trust_remote_code)
        self._tokenizer = self._processor.tokenizer
        self.placeholder: str = self._processor.image_token
        # The config's id, if the template's text is another token.
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        self._id = image_token_id(config)
        rows, ids = self._process(Image.new("RGB", (64, 64)))
        self._tokens_per_tile, remainder = divmod(int((ids == self._id).sum()), len(rows))
        if remainder or not self._tokens_per_tile:
            raise ValueError(
                f"the processor of {path} makes {len(rows)} tiles and {(ids == self._id).sum()} "
                "placeholders of an image; only tiles of equally many tokens are supported"
            )
        # A large image has every mark, such as those of rows and columns.
        many_ids = self._process(Image.new("RGB", (LARGE, LARGE)))[1]
        # White space may be an added token, too, and is sampled.
        added = self._tokenizer.get_added_vocab().items()
        special = {i for text, i in added if text.strip()} - {self._id}
        self._marks = tuple(sorted(special & {*ids.tolist(), *many_ids.tolist()}))
        self._texts = "", ""
        if self._tokenizer.convert_tokens_to_ids(self.placeholder) != self._id:
            first = int(np.flatnonzero(ids == self._id)[0])
            once = ids[(ids != self._id) | (np.arange(len(ids)) == first)]
            self._texts = self.placeholder, self._tokenizer.decode(once)

    @lru_cache(MAX_SIZES)  # noqa: B019  # one processor in a process
    def _facts(self, height: int, width: int) -> tuple[int, np.ndarray]:
        """Return (tiles, ids) of an image of this many pixels.

        Raises:
            ValueError: its tiles have other numbers of tokens than those of other images, or text
                between them.
        """
        rows, ids = self._process(Image.new("RGB", (width, height)))
        placeholders, expected = int((ids == self._id).sum()), len(rows) * self._tokens_per_tile
        if placeholders != expected:
            raise ValueError(
                f"an image of {width}×{height} becomes {placeholders} placeholders of {len(rows)} "
                f"tiles, not {expected}, {self._tokens_per_tile} a tile"
            )
        if self._texts[0] and len(rows) > 1:
            raise ValueError(
                f"an image of {width}×{height} becomes {len(rows)} crops with text between them, "
                "which is not supported; set do_pan_and_scan to false in processor_config.json"
            )
        return len(rows), ids

    def grid(self, height: int, width: int) -> tuple[int, int, int]:
        """Return (tiles, 1, 1) of an image of this many pixels."""
        return self._facts(height, width)[0], 1, 1

    def ids(self, height: int, width: int, placeholder_id: int) -> np.ndarray:
        """Return what takes the place of an image's placeholder in a prompt, int32 [n]."""
        ids = self._facts(height, width)[1]
        return ids[ids == self._id] if self._texts[0] else ids

    def patches(self, image: Image.Image) -> np.ndarray:
        """Return the tiles of an RGB image, float32 [tiles, 3 · height · width]."""
        return self._process(image)[0]

    def image_tokens(self, placeholder_id: int) -> ImageTokens:
        """Return the images' placeholders, which have this id, among token ids.

        Raises:
            ValueError: the processor writes another one.
        """
        if placeholder_id != self._id:
            raise ValueError(
                f"the processor writes id {self._id} for an image's tokens, "
                f"but the config names id {placeholder_id}"
            )
        return ImageTokens(
            placeholder_id,
            tokens_per_tile=self._tokens_per_tile,
            marks=self._marks,
            template_text=self._texts[0],
            placeholder_text=self._texts[1],
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


def images_processor(path: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Load the combined processor of a checkpoint for images alone.

    Without its video processor, which needs torchvision.
    """
    settings, _ = ProcessorMixin.get_processor_dict(path)
    name: Any = settings.pop("processor_class", None)
    reference = settings.get("auto_map", {}).get("AutoProcessor")
    if trust_remote_code and reference:
        processor_class = get_class_from_dynamic_module(reference, path)
    else:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        name = name or PROCESSOR_MAPPING_NAMES[config.model_type]
        processor_class: Any = processor_class_from_name(name)

    class ImagesOnly(processor_class):  # pyright: ignore[reportGeneralTypeIssues]
        def check_argument_for_proper_class(self, *_: Any) -> None:
            """Accept None in place of a video processor."""

    own_settings = {
        key: value
        for key, value in settings.items()
        if key not in ("image_processor", "video_processor", "tokenizer", "auto_map")
    }
    return ImagesOnly(
        image_processor=AutoImageProcessor.from_pretrained(
            path, backend="pil", trust_remote_code=trust_remote_code
        ),
        tokenizer=AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code),
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
