"""The cross entropy of the tokens, weighted by their advantages: the loss of `rlinf-vl sft`.

    −A·log π

A demonstrated token has the advantage 1. With advantages from rewards it is the plain policy
gradient: its gradient is that of the other losses at ρ = 1, and nothing bounds the step.

Ouyang et al., [2203.02155](https://arxiv.org/abs/2203.02155), § 3.5, for demonstrations; Williams,
REINFORCE, Machine Learning 8, 1992, for rewards
"""

from typing import Any

from rlinf_vl.algorithms.losses import LossInputs, TokenLoss

DEFAULTS: dict[str, Any] = {}
CLIPS = ()


def loss(inputs: LossInputs) -> TokenLoss:
    return TokenLoss(-inputs.advantages * inputs.logprobs, inputs.ratio().detach())
