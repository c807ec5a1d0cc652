"""Keys of `algorithm.image_corruption`, `.papo` and `.distillation`: learning signals beside the
reward."""

from dataclasses import dataclass

from rlinf_vl.config.schema.limits import NOT_NEGATIVE, POSITIVE, SHARE, key

#: The corruptions of images in `rlinf_vl.data.corruption`.
CORRUPTIONS = ("noise", "mask")


@dataclass
class ImageCorruptionConfig:
    share: float = key(0.0, SHARE)
    """NoisyRollout: share of each group's answers that are drawn on corrupted images; all are
    trained on with the clean ones. 0 is off, the paper takes 0.5. Their tokens have no engine's
    logprob on the clean image, so TIS leaves them alone."""
    kind: str = key("noise", CORRUPTIONS)
    """noise: a diffusion's, of strength × 1000 steps. mask: squares of 14 pixels, each black with
    probability strength."""
    strength: float = key(0.5, SHARE)
    """How strong at the run's start."""
    schedule: str = key("sigmoid", ("constant", "linear", "sigmoid"))
    """How the strength falls over the run's steps: not at all, evenly to 0, or around midpoint."""
    midpoint: float = key(2 / 3, SHARE)
    """For sigmoid: the share of the run after which half of the strength is left."""
    steepness: float = key(30.0, POSITIVE)
    """For sigmoid: how sudden the fall is."""


@dataclass
class PapoConfig:
    weight: float = key(0.0, NOT_NEGATIVE)
    """PAPO's γ, usually 0.01 to 0.02: weight of KL(policy‖policy on corrupted images), subtracted
    from the loss. Costs a further pass. 0 is off."""
    kind: str = key("mask", CORRUPTIONS)
    """How those images are corrupted, as image_corruption.kind; anew in each step."""
    strength: float = key(0.6, SHARE)
    """How strongly."""
    entropy_weight: float = key(0.0, NOT_NEGATIVE)
    """PAPO's η, usually 0.03: weight of two entropies, the policy's and that on corrupted images,
    added to the loss. Above 0 the further pass has gradients, too."""


@dataclass
class DistillationConfig:
    teacher_path: str | None = None
    """A checkpoint with the policy's tokenizer and images, whose distribution the policy learns on
    its own answers; null is off."""
    weight: float = key(1.0, NOT_NEGATIVE)
    """Weight of the reverse KL, KL(policy‖teacher), of each token."""
    top_k: int = key(0, NOT_NEGATIVE)
    """0: the sampled token's log-ratio to the teacher is subtracted from its advantage. K > 0: the
    KL over the policy's K likeliest tokens and the rest as one is added to the loss; more exact,
    for a larger head."""
    reward_weight: float = key(1.0, NOT_NEGATIVE)
    """Factor of the reward's advantages; 0 learns from the teacher alone."""
