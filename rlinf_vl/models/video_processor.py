"""Clips to patches: the frames of a video as transformers' video processors of Qwen's models cut them.

transformers' own need torchvision; what they compute is computed here by torch. Neither is imported
at the top, see `rlinf_vl.models.family`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from rlinf_vl.types import Grid

if TYPE_CHECKING:
    import torch
    from PIL import Image

#: Colours' means and deviations where a checkpoint's files have none: of CLIP, and of Qwen3-VL.
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
#: Pillow's number of the method by which frames are resized.
BICUBIC = 3
#: An area that no frame has.
NO_BOUND = 2**62


class VideoProcessor(Protocol):
    """Cuts clips into the patches that the vision tower reads."""

    #: Whether the prompt has the time of each temporal patch before it.
    timestamped: bool

    def grid(self, frames: int, height: int, width: int) -> Grid:
        """Return (t, h, w) in patches of a clip of so many frames of this size, after resizing."""
        ...

    def patches(self, frames: "Sequence[Image.Image]") -> np.ndarray:
        """Return the patches of RGB frames of one size: float32 [t·h·w, d]."""
        ...

    def text(self, timestamps: Sequence[float], start: str, placeholder: str, end: str) -> str:
        """Return the text that stands for a clip in a prompt, with one placeholder for each run."""
        ...


class Qwen2Videos:
    """Resizes frames within bounds of the area of one, as transformers' Qwen2VLVideoProcessor."""

    timestamped = False
    #: Settings where the checkpoint's files have none.
    defaults: ClassVar[Mapping[str, Any]] = {
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28},
        "patch_size": 14,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
        "max_video_tokens": 128000,
    }
    #: The settings under which older checkpoints have the two bounds.
    bounds: ClassVar[Mapping[str, str]] = {
        "min_pixels": "shortest_edge",
        "max_pixels": "longest_edge",
    }

    def __init__(
        self, path: str | Path, min_pixels: int | None = None, max_pixels: int | None = None
    ) -> None:
        """Read the settings of a checkpoint.

        `min_pixels` and `max_pixels` bound a frame's area further than the checkpoint does.

        Raises:
            ValueError: a bound is above the other; or frames are not resized bicubically.
        """
        from transformers.video_processing_utils import BaseVideoProcessor

        settings, _ = BaseVideoProcessor.get_video_processor_dict(path)
        common = {"merge_size": 2, "temporal_patch_size": 2, "rescale_factor": 1 / 255}
        self._settings = common | dict(self.defaults) | settings
        size = dict(self._settings["size"] or self.defaults["size"])
        for key, edge in self.bounds.items():
            if settings.get(key) is not None:
                size[edge] = settings[key]
        self._size = size
        if (resample := self._settings.get("resample", BICUBIC)) != BICUBIC:
            raise ValueError(
                f"the video processor of {path} resizes by method {resample} of Pillow; only "
                f"bicubic ({BICUBIC}) is supported: give the frames of videos as images"
            )
        self._min_pixels, self._max_pixels = min_pixels or 0, max_pixels or NO_BOUND
        if min_pixels and max_pixels and min_pixels > max_pixels:
            raise ValueError(
                f"data.video.min_pixels: {min_pixels} is above data.video.max_pixels, {max_pixels}"
            )
        self._patch_size: int = self._settings["patch_size"]
        self._merge_size: int = self._settings["merge_size"]
        #: The side in pixels of a token.
        self._factor = self._patch_size * self._merge_size
        self._frames_per_patch: int = self._settings["temporal_patch_size"]

    def grid(self, frames: int, height: int, width: int) -> Grid:
        """Return (t, h, w) in patches of a clip of so many frames of this size, after resizing."""
        rows, columns = self._resized(frames, height, width)
        rows, columns = self._within(rows, columns, self._min_pixels, self._max_pixels)
        t = -(-frames // self._frames_per_patch)
        return t, rows // self._patch_size, columns // self._patch_size

    def patches(self, frames: "Sequence[Image.Image]") -> np.ndarray:
        """Return the patches of RGB frames of one size: float32 [t·h·w, d].

        A last temporal patch with too few frames repeats the last one.
        """
        import torch

        pixels_THWC = torch.from_numpy(np.stack([np.asarray(frame) for frame in frames]))
        height, width = pixels_THWC.shape[1:3]
        t, h, w = self.grid(len(frames), height, width)
        resized = self._resize(
            pixels_THWC.permute(0, 3, 1, 2), h * self._patch_size, w * self._patch_size
        )
        # Both in units of a stored colour, as transformers fuses the two steps.
        mean, deviation = (
            (torch.tensor(self._settings[key]) * (1.0 / self._settings["rescale_factor"])).view(
                -1, 1, 1
            )
            for key in ("image_mean", "image_std")
        )
        video = (resized.to(torch.float32) - mean) / deviation
        missing = t * self._frames_per_patch - len(video)
        video = torch.cat([video, video[-1:].expand(missing, -1, -1, -1)])
        merge, side = self._merge_size, self._patch_size
        split = video.reshape(
            t, self._frames_per_patch, -1, h // merge, merge, side, w // merge, merge, side
        )
        return split.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * h * w, -1).numpy()

    def text(self, timestamps: Sequence[float], start: str, placeholder: str, end: str) -> str:
        """Return the placeholder: the template has written what stands around it."""
        return placeholder

    def _resized(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) of a frame after resizing, by the checkpoint's bounds."""
        low, high = self._size["shortest_edge"], self._size["longest_edge"]
        if self._settings.get("cap_pixels_per_frame"):
            total = int(self._settings["max_video_tokens"] * self._factor**2 * 0.9)
            share = total * self._frames_per_patch // frames
            high = max(min(high, share), int(low * 1.05))
        return self._within(height, width, low, high)

    def _within(self, height: int, width: int, low: int, high: int) -> tuple[int, int]:
        """Return (height, width) of a frame whose area stays within these bounds."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        return smart_resize(height, width, factor=self._factor, min_pixels=low, max_pixels=high)

    @staticmethod
    def _resize(pixels: "torch.Tensor", height: int, width: int) -> "torch.Tensor":
        """Resize frames uint8 [T, 3, H, W] as torchvision does."""
        from torch.nn import functional as F

        if pixels.shape[2:] == (height, width):
            return pixels
        return F.interpolate(
            pixels, (height, width), mode="bicubic", align_corners=False, antialias=True
        )


class Qwen3Videos(Qwen2Videos):
    """Resizes frames within bounds of the area of all, as transformers' Qwen3VLVideoProcessor.

    The time of each temporal patch, the mean of its first and last frame's, stands before it in the
    prompt.
    """

    timestamped = True
    defaults: ClassVar[Mapping[str, Any]] = {
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32},
        "patch_size": 16,
        "image_mean": HALF,
        "image_std": HALF,
        "max_video_tokens": 768,
    }
    bounds: ClassVar[Mapping[str, str]] = {}

    def text(self, timestamps: Sequence[float], start: str, placeholder: str, end: str) -> str:
        """Return the time, start, placeholder and end of each temporal patch."""
        n = self._frames_per_patch
        times = [*timestamps, *[timestamps[-1]] * (-len(timestamps) % n)]
        means = [(times[i] + times[i + n - 1]) / 2 for i in range(0, len(times), n)]
        return "".join(f"<{mean:.1f} seconds>{start}{placeholder}{end}" for mean in means)

    def _resized(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) of a frame after resizing, by the checkpoint's bounds of a clip."""
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

        # transformers refuses a clip of one frame; it is resized as one of two.
        frames = max(frames, self._frames_per_patch)
        low, high = self._size["shortest_edge"], self._size["longest_edge"]
        if self._settings.get("cap_pixels_per_frame"):
            cap = self._settings["max_video_tokens"] * self._factor**2
            high = max(min(cap, high // frames), int(low * 1.05)) * frames
        return smart_resize(
            frames,
            height,
            width,
            self._frames_per_patch,
            self._factor,
            min_pixels=low,
            max_pixels=high,
        )
