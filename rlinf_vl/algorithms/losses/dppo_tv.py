"""REINFORCE, weighted by the ratio, where the policy's probability has not moved too far (DPPO).

    −A·sg[min(ρ, `clip_ratio_c`)]·log π where π − π_old ≤ `clip_ratio_high`, if A > 0, or else
    π_old − π ≤ `clip_ratio_low`; 0 elsewhere

The bounds are of the probability itself, the total variation between "this token" and "another". A
ratio bounds rare tokens tightly and likely ones hardly at all; this does the opposite.

Qi et al., Rethinking the Trust Region in LLM Reinforcement Learning,
[2602.04879](https://arxiv.org/abs/2602.04879), Binary-TV; the bounds are those of verl's script
"""

import torch

from rlinf_vl.algorithms.losses import LossInputs, TokenLoss

DEFAULTS = {"clip_ratio_low": 0.15, "clip_ratio_high": 0.15, "clip_ratio_c": 20.0}
CLIPS = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")


def loss(inputs: LossInputs) -> TokenLoss:
    low, high = inputs.bounds()
    moved = inputs.logprobs.detach().exp() - inputs.old_logprobs.exp()
    return within(inputs, moved <= high, moved >= -low)


def within(inputs: LossInputs, may_rise: torch.Tensor, may_fall: torch.Tensor) -> TokenLoss:
    """Return the loss of DPPO, given whether a token's probability may still rise, and fall."""
    ratio = inputs.ratio()
    valid = torch.where(inputs.advantages > 0, may_rise, may_fall)
    truncated = ratio.detach() if inputs.clip_c is None else ratio.detach().clamp(max=inputs.clip_c)
    loss = -inputs.advantages * truncated * inputs.logprobs * valid
    return TokenLoss(loss, ratio, ~valid, valid & (ratio > truncated))
