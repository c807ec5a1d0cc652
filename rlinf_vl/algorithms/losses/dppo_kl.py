"""DPPO's loss with bounds of a KL divergence.

    that of `dppo_tv` where A > 0: KL ≤ `clip_ratio_high` or π ≤ π_old; else:
    KL ≤ `clip_ratio_low` or π ≥ π_old; with
    KL = π_old·log(π_old / π) + (1 − π_old)·log((1 − π_old + 1e-8) / (1 − π + 1e-8))

The KL is that from π_old to π between "this token" and "another", as in `dppo_tv`.

Qi et al., Rethinking the Trust Region in LLM Reinforcement Learning,
[2602.04879](https://arxiv.org/abs/2602.04879), Binary-KL; the bounds are those of verl's script
"""

from rlinf_vl.algorithms.losses import LossInputs, TokenLoss
from rlinf_vl.algorithms.losses.dppo_tv import within

DEFAULTS = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.05, "clip_ratio_c": 20.0}
CLIPS = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")


def loss(inputs: LossInputs) -> TokenLoss:
    logprobs, old_logprobs = inputs.logprobs.detach(), inputs.old_logprobs
    new, old = logprobs.exp(), old_logprobs.exp()
    # 1e-8 keeps the probability of the other tokens away from 0.
    log_ratio_of_others = ((1 - old + 1e-8) / (1 - new + 1e-8)).log()
    kl = old * (old_logprobs - logprobs) + (1 - old) * log_ratio_of_others
    low, high = inputs.bounds()
    return within(inputs, (kl <= high) | (new <= old), (kl <= low) | (new >= old))
