"""PPO's clipped loss without some of the tokens that drive the entropy down (Clip-Cov).

    that of `actor`, and 0 for 0.02 % of the mini-batch's tokens, drawn among those with
    1 < (A − mean A)·(log π − mean log π) < 5

Means and share are over all sampled tokens of the mini-batch, and log π is that of the weights before
the step, where no token is clipped yet. The draw follows from the engine's logprobs, so it does not
depend on packing. It needs a pass for all old logprobs.

Cui et al., The Entropy Mechanism of RL for Reasoning Language Models,
[2505.22617](https://arxiv.org/abs/2505.22617), § 4.2
"""

import torch

from rlinf_vl.algorithms.losses import LossInputs, TokenLoss
from rlinf_vl.algorithms.losses.actor import clipped_loss

DEFAULTS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
CLIPS = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
NEEDS_MINIBATCH = True
#: The authors' share of the tokens, and their bounds of the covariance.
SHARE, LOW, HIGH = 2e-4, 1.0, 5.0


def loss(inputs: LossInputs) -> TokenLoss:
    tokens = inputs.minibatch_tokens()
    result = clipped_loss(inputs, inputs.ratio())
    covariances, numbers = tokens.covariances(), tokens.numbers()
    numbers = numbers[(covariances > LOW) & (covariances < HIGH)]
    n_dropped = min(len(numbers), max(1, int(SHARE * len(covariances))))
    highest = torch.topk(numbers, n_dropped, largest=False).values[-1] if n_dropped else -1
    call_covariances = tokens.covariances_of(inputs.advantages, inputs.start())
    dropped = (
        (call_covariances > LOW) & (call_covariances < HIGH) & (inputs.draw_numbers() <= highest)
    )
    assert result.clipped is not None
    dropped = dropped & ~result.clipped
    return TokenLoss(result.loss * ~dropped, result.ratio, result.clipped | dropped, result.capped)
