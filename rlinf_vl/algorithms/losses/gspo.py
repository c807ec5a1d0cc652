"""PPO's clipped loss with one ratio for a whole sequence.

    that of `actor` with ρ = exp(mean of Δ over the sequence)

Sequences must not be split over calls.

Zheng et al., GSPO, [2507.18071](https://arxiv.org/abs/2507.18071), § 5.1
"""

from rlinf_vl.algorithms.losses import LossInputs, TokenLoss
from rlinf_vl.algorithms.losses.actor import clipped_loss

# The mean over a sequence varies far less than a token's ratio, so the bounds are a thousandth.
DEFAULTS = {
    "clip_ratio_low": 3e-4,
    "clip_ratio_high": 4e-4,
    "loss_agg_func": "seq-mean-token-mean",
}
CLIPS = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")


def loss(inputs: LossInputs) -> TokenLoss:
    return clipped_loss(inputs, inputs.sequence_ratio())
