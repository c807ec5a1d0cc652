"""Keys of `algorithm.image_corruption`: what a policy learns from beside its reward."""

from dataclasses import dataclass

from rlinf_vl.config.schema.limits import POSITIVE, SHARE, key

#: What `rlinf_vl.data.corruption` does to an image.
CORRUPTIONS = ("noise", "mask")


@dataclass
class ImageCorruptionConfig:
    share: float = key(0.0, SHARE)
    """NoisyRollout: share of each group's answers that are drawn on corrupted images; all are trained on with the clean ones. 0 is
    off, the paper takes 0.5. Their tokens have no engine's logprob on the clean image, so TIS leaves them alone."""
    kind: str = key("noise", CORRUPTIONS)
    """noise: a diffusion's, of strength × 1000 steps. mask: squares of 14 pixels, each black with probability strength."""
    strength: float = key(0.5, SHARE)
    """How strong at the run's start."""
    schedule: str = key("sigmoid", ("constant", "linear", "sigmoid"))
    """How the strength falls over the run's steps: not at all, evenly to 0, or around midpoint."""
    midpoint: float = key(2 / 3, SHARE)
    """Of sigmoid: the share of the run after which half of the strength is left."""
    steepness: float = key(30.0, POSITIVE)
    """Of sigmoid: how sudden the fall is."""
