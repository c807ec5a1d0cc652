"""The geometric mean of a sequence's clipped ratios (GMPO).

    −A·exp(mean over the sequence of c(Δ)); c(Δ) = min(Δ, `clip_ratio_high`) where A > 0,
    max(Δ, −`clip_ratio_low`) where A < 0

The bounds are of Δ = log ρ of each token, and wider than PPO's, since one token moves the mean
little. Sequences must not be split over calls.

Zhao et al., Geometric-Mean Policy Optimization, [2507.20673](https://arxiv.org/abs/2507.20673), § 3
"""

import torch

from rlinf_vl.algorithms.losses import LossInputs, TokenLoss

DEFAULTS = {
    "clip_ratio_low": 0.4,
    "clip_ratio_high": 0.4,
    "loss_agg_func": "seq-mean-token-mean",
}
CLIPS = ("clip_ratio_low", "clip_ratio_high")


def loss(inputs: LossInputs) -> TokenLoss:
    log_ratio = inputs.logprobs - inputs.old_logprobs
    low, high = inputs.bounds()
    upper, lower = log_ratio.clamp(max=high), log_ratio.clamp(min=-low)
    clipped = torch.where(inputs.advantages < 0, lower, upper)
    ratio = inputs.sequence_mean(clipped)
    return TokenLoss(-inputs.advantages * ratio, ratio, clipped != log_ratio)
