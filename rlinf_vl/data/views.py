"""Views of images: an image again, with other pixels.

A view maps an image and a seed to an image of the same (upright) size, and a clip to one with as
many frames at the same times, so that a prompt keeps its ids and grids. What it draws at random
depends on the seed and the image alone, not on the caller, the number or the order of calls.

| view | for |
|---|---|
| `Noise` | answers that are sampled on noisy images (NoisyRollout) |
| `Mask` | PAPO's comparison of policies |
| `blank` | runs without images, the report's question where the policy looks |
| `HiddenRectangle`, `Fitted`, `blank` | vision controls of a validation |

Sources: Liu et al., "NoisyRollout" (2025, arXiv 2504.13055) for noise; Wang et al.,
"Perception-Aware Policy Optimization" (2025, arXiv 2507.06448) for masks.
"""

import hashlib
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from rlinf_vl.data.clips import clip_of, clip_ref, is_clip, timestamps_of
from rlinf_vl.data.images import decode, encode_png, image_size
from rlinf_vl.types import ImageRef

#: Steps of the diffusion process whose noise is added, and the variance β of each step.
DIFFUSION_STEPS = 1000
_BETAS = 1e-5 + (0.5e-2 - 1e-5) / (1 + np.exp(-np.linspace(-6, 6, DIFFUSION_STEPS)))
#: Share ᾱ of the image in the variance after each step.
_SIGNAL_VARIANCE = np.cumprod(1 - _BETAS)
#: Side of a masked square, in pixels.
SQUARE = 14
#: The grey of blank images and of hidden rectangles.
GREY = 128


class ImageView(Protocol):
    """A view of images: (image, seed) → image."""

    def __call__(self, image: ImageRef, seed: int) -> ImageRef:
        """Return the view of an image.

        Raises:
            ImageError: the image can't be decoded.
        """
        ...


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise of a diffusion after `strength` × 1000 steps; `strength` is in 0 … 1."""

    strength: float

    def __call__(self, image: ImageRef, seed: int) -> ImageRef:
        return _redrawn(image, seed, self._pixels) if self.strength else image

    def _pixels(self, pixels: np.ndarray, random: np.random.Generator) -> np.ndarray:
        signal = _SIGNAL_VARIANCE[min(int(self.strength * DIFFUSION_STEPS), DIFFUSION_STEPS - 1)]
        noise = random.standard_normal(pixels.shape, np.float32)
        noised = math.sqrt(signal) * (pixels / np.float32(255)) + math.sqrt(1 - signal) * noise
        return (255 * noised.clip(0, 1)).astype(np.uint8)


@dataclass(frozen=True, slots=True)
class Mask:
    """Black squares with a side of `SQUARE` pixels, each with probability `strength`."""

    strength: float

    def __call__(self, image: ImageRef, seed: int) -> ImageRef:
        return _redrawn(image, seed, self._pixels) if self.strength else image

    def _pixels(self, pixels: np.ndarray, random: np.random.Generator) -> np.ndarray:
        height, width, _ = pixels.shape
        squares = random.random((-(-height // SQUARE), -(-width // SQUARE))) >= self.strength
        visible = squares.repeat(SQUARE, axis=0).repeat(SQUARE, axis=1)
        return pixels * visible[:height, :width, None]


@dataclass(frozen=True, slots=True)
class HiddenRectangle:
    """A grey rectangle over `share` of the area, in the image's proportions, at a random place.

    It lies at the same place of each frame of a clip.
    """

    share: float

    def __call__(self, image: ImageRef, seed: int) -> ImageRef:
        height, width = image_size(image)
        box_height = min(height, max(1, round(height * math.sqrt(self.share))))
        box_width = min(width, max(1, round(width * math.sqrt(self.share))))
        random = random_of(f"{seed} rectangle {image.hash}")
        top = int(random.integers(height - box_height + 1))
        left = int(random.integers(width - box_width + 1))

        def hidden(picture: ImageRef, place: int) -> bytes:
            pixels = np.array(decode(picture))
            pixels[top : top + box_height, left : left + box_width] = GREY
            return encode_png(Image.fromarray(pixels))

        return _each_picture(image, hidden)


@dataclass(frozen=True, slots=True)
class Fitted:
    """Another image, `lent`, with the size of the first, and, of a clip, its frames' number and
    times."""

    lent: ImageRef

    def __call__(self, image: ImageRef, seed: int = 0) -> ImageRef:
        size = image_size(image)
        if not is_clip(image):
            return ImageRef.of(_sized(self.lent, size))
        timestamps, frames = timestamps_of(image), clip_of(self.lent).frames
        lent = [frames[k * len(frames) // len(timestamps)] for k in range(len(timestamps))]
        return clip_ref([_sized(ImageRef.of(frame), size) for frame in lent], timestamps)


def blank(image: ImageRef, seed: int = 0) -> ImageRef:
    """Return a uniform mid-grey image."""
    height, width = image_size(image)
    png = encode_png(Image.new("RGB", (width, height), (GREY,) * 3))
    if is_clip(image):
        timestamps = timestamps_of(image)
        return clip_ref([png] * len(timestamps), timestamps)
    return ImageRef.of(png)


def random_of(name: str) -> np.random.Generator:
    """Return the random numbers of a name."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little"))


def _each_picture(image: ImageRef, encoded: Callable[[ImageRef, int], bytes]) -> ImageRef:
    """Return the image that `encoded(picture, place)` makes of a picture, or of each frame."""
    if not is_clip(image):
        return ImageRef.of(encoded(image, 0))
    clip = clip_of(image)
    frames = [encoded(ImageRef.of(frame), place) for place, frame in enumerate(clip.frames)]
    return clip_ref(frames, clip.timestamps)


def _redrawn(
    image: ImageRef,
    seed: int,
    pixels_of: Callable[[np.ndarray, np.random.Generator], np.ndarray],
) -> ImageRef:
    """Return the image with other pixels, as PNG; each frame has random numbers of its own."""

    def redrawn(picture: ImageRef, place: int) -> bytes:
        # By its place, too: a video that stands still has equal frames.
        suffix = f" {place}" if is_clip(image) else ""
        random = random_of(f"{seed} {image.hash}{suffix}")
        metadata = PngInfo()
        # Two images that have become equal, such as black ones, must keep different hashes.
        metadata.add_text("clean", picture.hash)
        png = io.BytesIO()
        pixels = pixels_of(np.asarray(decode(picture)), random)
        Image.fromarray(pixels).save(png, "PNG", pnginfo=metadata, compress_level=1)
        return png.getvalue()

    return _each_picture(image, redrawn)


def _sized(picture: ImageRef, size: tuple[int, int]) -> bytes:
    """Return the picture in (height, width) pixels: its bytes where it has that size, else PNG."""
    if image_size(picture) == size:
        return bytes(picture.data)
    height, width = size
    return encode_png(decode(picture).resize((width, height), Image.Resampling.BICUBIC))
