"""Images made worse on purpose: what NoisyRollout samples answers on, and what PAPO compares the policy with.

One hook, `Corruption`: image → image of the same size, so that prompts have the same ids. What is drawn depends on a seed and
the image alone, not on who asks, how often, or in which order.

Sources: Liu et al., "NoisyRollout" (2025, arXiv 2504.13055) for noise and its schedule; Wang et al., "Perception-Aware Policy
Optimization" (2025, arXiv 2507.06448) for masks.
"""

import hashlib
import io
import math
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from rlinf_vl.config.schema import ImageCorruptionConfig
from rlinf_vl.data.images import decode
from rlinf_vl.types import ImageRef, Trajectory

#: Steps of the diffusion whose noise is added, and variance β of each.
DIFFUSION_STEPS = 1000
_BETAS = 1e-5 + (0.5e-2 - 1e-5) / (1 + np.exp(-np.linspace(-6, 6, DIFFUSION_STEPS)))
#: Share ᾱ of the image's variance that is left after each step.
_LEFT = np.cumprod(1 - _BETAS)
#: Side of a masked square, in pixels.
SQUARE = 14


@dataclass(frozen=True, slots=True)
class Corruption:
    """
    Attributes:
        kind: noise (of a diffusion after strength × 1000 steps) or mask (each square of `SQUARE` pixels is black with probability
            strength).
        strength: 0 … 1; 0 leaves the image as it is.
        share: of a group's answers that see corrupted images.
    """

    kind: str
    strength: float
    share: float = 1.0

    def samples(self, group_size: int) -> int:
        """How many answers of a group see corrupted images: the last so many."""
        return round(self.share * group_size)

    def __call__(self, image: ImageRef, seed: int) -> ImageRef:
        """A PNG of the same (upright) size. Raises ImageError: the image can't be decoded."""
        if self.strength == 0:
            return image
        digest = hashlib.blake2b(f"{seed} {image.hash}".encode(), digest_size=8).digest()
        random = np.random.default_rng(int.from_bytes(digest, "little"))
        pixels = {"noise": self._noise, "mask": self._mask}[self.kind](np.asarray(decode(image)), random)
        about = PngInfo()
        about.add_text("clean", image.hash)  # two images that look alike now still have names of their own
        png = io.BytesIO()
        Image.fromarray(pixels).save(png, "PNG", pnginfo=about, compress_level=1)
        return ImageRef.of(png.getvalue())

    def _noise(self, pixels: np.ndarray, random: np.random.Generator) -> np.ndarray:
        left = _LEFT[min(int(self.strength * DIFFUSION_STEPS), DIFFUSION_STEPS - 1)]
        noise = random.standard_normal(pixels.shape, np.float32)
        noised = math.sqrt(left) * (pixels / np.float32(255)) + math.sqrt(1 - left) * noise
        return (255 * noised.clip(0, 1)).astype(np.uint8)

    def _mask(self, pixels: np.ndarray, random: np.random.Generator) -> np.ndarray:
        height, width, _ = pixels.shape
        squares = random.random((-(-height // SQUARE), -(-width // SQUARE))) >= self.strength
        shown = squares.repeat(SQUARE, axis=0).repeat(SQUARE, axis=1)
        return pixels * shown[:height, :width, None]


def corruption_at(settings: ImageCorruptionConfig, done: float) -> Corruption | None:
    """What answers are drawn on after the share `done` of the run, 0 … 1: its strength falls as `settings.schedule` says. None:
    on images as they are.

    sigmoid: strength · (1 - 1 / (1 + exp(-steepness · (done - midpoint)))), NoisyRollout's.
    """
    left = 1.0
    if settings.schedule == "linear":
        left = 1 - done
    elif settings.schedule == "sigmoid":
        left = 0.5 * (1 - math.tanh(settings.steepness * (done - settings.midpoint) / 2))  # the same, at any steepness
    strength = settings.strength * left
    return Corruption(settings.kind, strength, settings.share) if strength and settings.share else None


class Shown:
    """What one group's corrupted answers see in place of its images. Callable from any thread; remembers what it was asked."""

    def __init__(self, corruption: Corruption, seed: int) -> None:
        self.by_hash: dict[str, ImageRef] = {}  # of the image as it is
        self._clean: dict[str, ImageRef] = {}  # by what is shown
        self._corruption = corruption
        self._seed = seed

    def __call__(self, image: ImageRef) -> ImageRef:
        """Raises ImageError: it can't be decoded."""
        if image.hash not in self.by_hash:
            shown = self._corruption(image, self._seed)
            self._clean[shown.hash] = image
            self.by_hash[image.hash] = shown
        return self.by_hash[image.hash]

    def undone(self, trajectory: Trajectory) -> Trajectory:
        """A trajectory that was drawn on shown images, with the images as they are."""
        sequences = tuple(sequence.with_images(self._clean) for sequence in trajectory.sequences)
        return replace(trajectory, sequences=sequences, corrupted=True)
