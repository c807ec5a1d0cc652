"""Corruption of images: NoisyRollout samples answers on corrupted images, PAPO compares policies.

`Corruption` maps an image to an image of the same size, so that prompts keep their ids. The random
numbers depend on a seed and the image alone, not on the caller, the number or the order of calls.

Sources: Liu et al., "NoisyRollout" (2025, arXiv 2504.13055) for noise and its schedule; Wang et
al., "Perception-Aware Policy Optimization" (2025, arXiv 2507.06448) for masks.
"""

import hashlib
import io
import math
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from rlinf_vl.config.schema import ImageCorruptionConfig
from rlinf_vl.data.clips import clip_of, clip_ref, is_clip
from rlinf_vl.data.images import decode
from rlinf_vl.types import ImageRef, Trajectory

#: Steps of the diffusion process whose noise is added, and the variance β of each step.
DIFFUSION_STEPS = 1000
_BETAS = 1e-5 + (0.5e-2 - 1e-5) / (1 + np.exp(-np.linspace(-6, 6, DIFFUSION_STEPS)))
#: Share ᾱ of the image in the variance after each step.
_SIGNAL_VARIANCE = np.cumprod(1 - _BETAS)
#: Side of a masked square, in pixels.
SQUARE = 14
#: NoisyRollout's fall of the noise: the share of the run after which half of it is left, and how
#: sudden the fall is.
MIDPOINT, STEEPNESS = 2 / 3, 30.0


@dataclass(frozen=True, slots=True)
class Corruption:
    """A kind of corruption and its strength.

    Attributes:
        kind: "noise" (of a diffusion after strength × 1000 steps) or "mask" (each square with a
            side of `SQUARE` pixels is black with probability strength).
        strength: 0 … 1; 0 does not change the image.
        share: share of a group's answers that see corrupted images.
    """

    kind: str
    strength: float
    share: float = 1.0

    def samples(self, group_size: int) -> int:
        """Return how many answers of a group see corrupted images; these are the group's last."""
        return round(self.share * group_size)

    def __call__(self, image: ImageRef, seed: int) -> ImageRef:
        """Return the corrupted image, a PNG of the same (upright) size; of a clip, the clip of its
        corrupted frames, each by random numbers of its own.

        Raises:
            ImageError: the image can't be decoded.
        """
        if self.strength == 0:
            return image
        if is_clip(image):
            clip = clip_of(image)
            frames = [
                # By its place, too: a video that stands still has equal frames.
                self._picture(ImageRef.of(frame), f"{seed} {image.hash} {place}")
                for place, frame in enumerate(clip.frames)
            ]
            return clip_ref(frames, clip.timestamps)
        return ImageRef.of(self._picture(image, f"{seed} {image.hash}"))

    def _picture(self, image: ImageRef, name: str) -> bytes:
        """Return the corrupted picture as PNG; its random numbers depend on `name`."""
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        random = np.random.default_rng(int.from_bytes(digest, "little"))
        pixels = {"noise": self._noise, "mask": self._mask}[self.kind](
            np.asarray(decode(image)), random
        )
        metadata = PngInfo()
        # Two images that are equal once corrupted, such as black ones, must keep different hashes.
        metadata.add_text("clean", image.hash)
        png = io.BytesIO()
        Image.fromarray(pixels).save(png, "PNG", pnginfo=metadata, compress_level=1)
        return png.getvalue()

    def _noise(self, pixels: np.ndarray, random: np.random.Generator) -> np.ndarray:
        signal = _SIGNAL_VARIANCE[min(int(self.strength * DIFFUSION_STEPS), DIFFUSION_STEPS - 1)]
        noise = random.standard_normal(pixels.shape, np.float32)
        noised = math.sqrt(signal) * (pixels / np.float32(255)) + math.sqrt(1 - signal) * noise
        return (255 * noised.clip(0, 1)).astype(np.uint8)

    def _mask(self, pixels: np.ndarray, random: np.random.Generator) -> np.ndarray:
        height, width, _ = pixels.shape
        squares = random.random((-(-height // SQUARE), -(-width // SQUARE))) >= self.strength
        visible = squares.repeat(SQUARE, axis=0).repeat(SQUARE, axis=1)
        return pixels * visible[:height, :width, None]


def corruption_at(settings: ImageCorruptionConfig, done: float) -> Corruption | None:
    """Return the corruption of the images on which answers are sampled, or None for no corruption.

    Args:
        settings: algorithm.image_corruption. Its strength falls during the run as NoisyRollout's,
            strength · (1 - 1 / (1 + exp(-STEEPNESS · (done - MIDPOINT)))).
        done: share of the run that is done, 0 … 1.
    """
    # The formula above, written with tanh.
    factor = 0.5 * (1 - math.tanh(STEEPNESS * (done - MIDPOINT) / 2))
    strength = settings.strength * factor
    return Corruption("noise", strength, settings.share) if strength and settings.share else None


class Shown:
    """The corrupted images of one group, made on first use and cached; callable from any thread."""

    def __init__(self, corruption: Corruption, seed: int) -> None:
        self.by_hash: dict[str, ImageRef] = {}  # corrupted image by the hash of the original
        self._clean: dict[str, ImageRef] = {}  # original image by the hash of the corrupted one
        self._corruption = corruption
        self._seed = seed

    def __call__(self, image: ImageRef) -> ImageRef:
        """Return the corrupted image.

        Raises:
            ImageError: the image can't be decoded.
        """
        if image.hash not in self.by_hash:
            corrupted = self._corruption(image, self._seed)
            self._clean[corrupted.hash] = image
            self.by_hash[image.hash] = corrupted
        return self.by_hash[image.hash]

    def undone(self, trajectory: Trajectory) -> Trajectory:
        """Return a trajectory, sampled on corrupted images, with the original images."""
        sequences = tuple(sequence.with_images(self._clean) for sequence in trajectory.sequences)
        return replace(trajectory, sequences=sequences, corrupted=True)
