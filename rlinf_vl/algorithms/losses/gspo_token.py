"""GSPO's ratio and clip with a gradient of each token's own (GSPO-token).

    that of `actor` with ρ = sg[exp(mean of Δ over the sequence)]·π / sg[π]

Where all tokens of a sequence have one advantage, `gspo` has the same values and gradients; this one
takes advantages of turns and tokens, too. Sequences must not be split over calls.

Zheng et al., GSPO, [2507.18071](https://arxiv.org/abs/2507.18071), § 4.3
"""

from rlinf_vl.algorithms.losses import LossInputs, TokenLoss
from rlinf_vl.algorithms.losses.actor import clipped_loss

DEFAULTS = {
    "clip_ratio_low": 3e-4,
    "clip_ratio_high": 4e-4,
    "loss_agg_func": "seq-mean-token-mean",
}
CLIPS = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")


def loss(inputs: LossInputs) -> TokenLoss:
    # The last factor is 1, and passes the gradient on.
    of_token = (inputs.logprobs - inputs.logprobs.detach()).exp()
    return clipped_loss(inputs, inputs.sequence_ratio().detach() * of_token)
