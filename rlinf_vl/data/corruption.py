"""NoisyRollout: some answers of a group are sampled on corrupted images.

Source: Liu et al., "NoisyRollout" (2025, arXiv 2504.13055).
"""

import math
from dataclasses import dataclass, replace

from rlinf_vl.config.schema import ImageCorruptionConfig
from rlinf_vl.data.views import ImageView, Noise
from rlinf_vl.types import ImageRef, Trajectory

#: The fall of the noise: the share of the run after which half of it is left, and how sudden the
#: fall is.
MIDPOINT, STEEPNESS = 2 / 3, 30.0


@dataclass(frozen=True, slots=True)
class Corruption:
    """The corruption of a group's images.

    Attributes:
        view: of an image, as those answers see it.
        share: share of the group's answers that see it.
    """

    view: ImageView
    share: float

    def samples(self, group_size: int) -> int:
        """Return how many answers of a group see corrupted images; these are the group's last."""
        return round(self.share * group_size)


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
    return Corruption(Noise(strength), settings.share) if strength and settings.share else None


class Shown:
    """The corrupted images of one group, made on first use and cached; callable from any thread."""

    def __init__(self, view: ImageView, seed: int) -> None:
        self.by_hash: dict[str, ImageRef] = {}  # corrupted image by the hash of the original
        self._clean: dict[str, ImageRef] = {}  # original image by the hash of the corrupted one
        self._view = view
        self._seed = seed

    def __call__(self, image: ImageRef) -> ImageRef:
        """Return the corrupted image.

        Raises:
            ImageError: the image can't be decoded.
        """
        if image.hash not in self.by_hash:
            corrupted = self._view(image, self._seed)
            self._clean[corrupted.hash] = image
            self.by_hash[image.hash] = corrupted
        return self.by_hash[image.hash]

    def undone(self, trajectory: Trajectory) -> Trajectory:
        """Return a trajectory, sampled on corrupted images, with the original images."""
        sequences = tuple(sequence.with_images(self._clean) for sequence in trajectory.sequences)
        return replace(trajectory, sequences=sequences, corrupted=True)
