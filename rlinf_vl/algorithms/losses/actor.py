"""The clipped policy-gradient loss of PPO, dual-clipped where `clip_ratio_c` is set.

    max(−A·ρ, −A·c(ρ)); with `clip_ratio_c` and A < 0 at most −A·`clip_ratio_c`

A token that is clipped has no gradient.

Schulman et al., PPO, [1707.06347](https://arxiv.org/abs/1707.06347); Ye et al.,
[1912.09729](https://arxiv.org/abs/1912.09729); Yu et al., DAPO,
[2503.14476](https://arxiv.org/abs/2503.14476), for two bounds
"""

import math

import torch

from rlinf_vl.algorithms.losses import LossInputs, TokenLoss

DEFAULTS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
CLIPS = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")


def loss(inputs: LossInputs) -> TokenLoss:
    return clipped_loss(inputs, inputs.ratio())


def clipped_loss(inputs: LossInputs, ratio: torch.Tensor) -> TokenLoss:
    """Return the loss of PPO for a ratio of each token."""
    advantages, clipped = inputs.advantages, inputs.clipped(ratio)
    # PPO is pessimistic: the larger of the two losses counts.
    is_clipped = -advantages * clipped > -advantages * ratio
    loss = -advantages * torch.where(is_clipped, clipped, ratio)
    # Dual clip: with A < 0 the loss grows with ρ without bound; the cap is one.
    cap = -advantages * (math.inf if inputs.clip_c is None else inputs.clip_c)
    is_capped = (advantages < 0) & (loss > cap)
    return TokenLoss(torch.where(is_capped, cap, loss), ratio, is_clipped, is_capped)
