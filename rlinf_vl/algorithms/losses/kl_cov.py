"""The policy gradient, with a price on the tokens that drive the entropy down (KL-Cov).

    −A·ρ, plus |Δ| for the 0.02 % of the mini-batch's tokens with the largest
    (A − mean A)·(log π − mean log π)

Means and share are over all sampled tokens of the mini-batch, and log π is that of the weights before
the step, so what is chosen does not depend on packing. It needs a pass for all old logprobs.

Cui et al., The Entropy Mechanism of RL for Reasoning Language Models,
[2505.22617](https://arxiv.org/abs/2505.22617), § 4.3
"""

import torch

from rlinf_vl.algorithms.losses import LossInputs, TokenLoss

DEFAULTS: dict[str, float] = {}
CLIPS = ()
NEEDS_MINIBATCH = True
#: The authors' share of the tokens, and the weight of their KL.
SHARE, WEIGHT = 2e-4, 1.0


def loss(inputs: LossInputs) -> TokenLoss:
    tokens = inputs.minibatch_tokens()
    covariances = tokens.covariances()
    ratio = inputs.ratio()
    k = min(len(covariances), max(1, int(SHARE * len(covariances))))
    lowest_chosen = torch.topk(covariances, k).values[-1] if k else torch.inf
    priced = tokens.covariances_of(inputs.advantages, inputs.start()) >= lowest_chosen
    price = WEIGHT * (inputs.logprobs - inputs.old_logprobs).abs()
    return TokenLoss(-inputs.advantages * ratio + price * priced, ratio)
