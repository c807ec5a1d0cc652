"""Images to patches, and the sizes in pixels that a checkpoint's files imply.

transformers is imported where it is used, see `rlinf_vl.models.family`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rlinf_vl.models.image_tokens import ImageTokens

if TYPE_CHECKING:
    from PIL import Image


class ImageProcessor(Protocol):
    """Cuts images into the patches that the vision tower reads."""

    def grid(self, height: int, width: int) -> tuple[int, int, int]:
        """Return (t, h, w) in patches of an image of this many pixels, after resizing."""
        ...

    def patches(self, image: "Image.Image") -> np.ndarray:
        """Return an RGB image's patches: float32 [t·h·w, channels · temporal patch · patch²]."""
        ...

    def image_tokens(self, placeholder_id: int) -> ImageTokens:
        """Return the images' placeholders, which have this id, among token ids."""
        ...

    def ids(self, height: int, width: int, placeholder_id: int) -> np.ndarray:
        """Return the ids int32 [n] that stand for an image of this many pixels in a prompt.

        They are its placeholders, and what the chat template does not write around them.
        """
        ...


class QwenImages:
    """Resizes an image to whole tokens within bounds of its area, and cuts it into patches."""

    def __init__(
        self, path: str | Path, min_pixels: int | None = None, max_pixels: int | None = None
    ) -> None:
        self._processor = self.load(path)
        size = self._processor.size
        self._min_pixels = min_pixels or size["shortest_edge"]
        self._max_pixels = max_pixels or size["longest_edge"]
        if self._min_pixels > self._max_pixels:
            raise ValueError(
                f"data.image_min_pixels: {self._min_pixels} is above data.image_max_pixels, "
                f"{self._max_pixels} (where unset: the checkpoint's own)"
            )
        self._processor.size = type(size)(
            shortest_edge=self._min_pixels, longest_edge=self._max_pixels
        )
        self.patch_size: int = self._processor.patch_size
        self._merge_size: int = self._processor.merge_size

    def load(self, path: str | Path) -> Any:
        """Load the image processor of a checkpoint; a subclass may load another kind."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        return Qwen2VLImageProcessorPil.from_pretrained(path)

    def grid(self, height: int, width: int) -> tuple[int, int, int]:
        """Return (t, h, w) in patches of an image of this many pixels, after resizing."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        rows, columns = smart_resize(
            height, width, self.patch_size * self._merge_size, self._min_pixels, self._max_pixels
        )
        return 1, rows // self.patch_size, columns // self.patch_size

    def patches(self, image: "Image.Image") -> np.ndarray:
        """Return the patches of an RGB image, float32 [t·h·w, d]."""
        out = self._processor(images=[image], return_tensors="np")
        assert tuple(out["image_grid_thw"][0]) == self.grid(image.height, image.width), (
            image,
            out["image_grid_thw"],
        )
        pixels = np.asarray(out["pixel_values"], np.float32)
        return pixels.reshape(len(pixels), -1)

    def image_tokens(self, placeholder_id: int) -> ImageTokens:
        """Return the images' placeholders, which have this id, among token ids."""
        return ImageTokens(placeholder_id, self._merge_size)

    def ids(self, height: int, width: int, placeholder_id: int) -> np.ndarray:
        """Return the placeholders of an image of this many pixels, int32 [n]."""
        return self.image_tokens(placeholder_id).ids(self.grid(height, width))


def channels_of(vision: Any) -> int:
    """Return the colours of a pixel by a vision config, whose key has several names."""
    return getattr(vision, "in_channels", None) or getattr(vision, "num_channels", None) or 3


def frames_of_patch(vision: Any) -> int:
    """Return the frames that a patch spans: one without a key."""
    return getattr(vision, "temporal_patch_size", None) or 1


def blank_image(config: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return (patches, grids) of the smallest image: one token, all zeros."""
    vision = config.vision_config
    merge = vision.spatial_merge_size
    width = channels_of(vision) * frames_of_patch(vision) * vision.patch_size**2
    return np.zeros((merge * merge, width), np.float32), np.array([[1, merge, merge]])


def processor_settings(config: Any) -> dict[str, Any]:
    """Return the preprocessor_config.json of `QwenImages` that follows from a model's config."""
    vision = config.vision_config
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": vision.patch_size,
        "merge_size": vision.spatial_merge_size,
        "temporal_patch_size": frames_of_patch(vision),
    }


def token_side(config: Mapping[str, Any]) -> int:
    """Return the side in pixels of the square of an image token: `Family.token_side`."""
    merge_size = config.get("merge_size") or config.get("spatial_merge_size") or 2
    return int(config.get("patch_size") or 16) * int(merge_size)
