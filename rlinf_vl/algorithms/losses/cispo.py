"""REINFORCE, weighted by the clipped ratio.

    −A·sg[c(ρ)]·log π

Every token keeps a gradient, with a bounded weight. By default the ratio has no lower bound.

MiniMax-M1, [2506.13585](https://arxiv.org/abs/2506.13585), § 3.1; the upper bound of 5 is that of
ScaleRL, [2510.13786](https://arxiv.org/abs/2510.13786)
"""

from rlinf_vl.algorithms.losses import LossInputs, TokenLoss

DEFAULTS = {"clip_ratio_low": 1.0, "clip_ratio_high": 4.0}
CLIPS = ("clip_ratio_low", "clip_ratio_high")


def loss(inputs: LossInputs) -> TokenLoss:
    ratio = inputs.ratio()
    clipped = inputs.clipped(ratio)
    # The ratio is a constant weight: the gradient goes through the logprob alone.
    return TokenLoss(
        -inputs.advantages * clipped.detach() * inputs.logprobs, ratio, clipped != ratio
    )
