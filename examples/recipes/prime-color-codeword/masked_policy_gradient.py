"""prime-rl's default loss: a policy gradient that leaves out tokens whose probability has moved too far.

    −A·ρ·[not masked] + τ·(log ρ)², ρ = π(token) / π_engine(token)

A token is masked where its probability has risen by more than 0.2 and A > 0, or fallen by more than 0.2 and A < 0.
"""

import torch

from rlinf_vl.algorithms.losses import LossInputs, TokenLoss

BOUND = 0.2
KL_WEIGHT = 1e-3


def loss(inputs: LossInputs) -> TokenLoss:
    """Return the loss of each token."""
    log_ratio = inputs.logprobs - inputs.old_logprobs
    ratio = inputs.ratio()
    change = (inputs.logprobs.exp() - inputs.old_logprobs.exp()).detach()
    has_moved = torch.where(inputs.advantages > 0, change > BOUND, change < -BOUND)
    policy_gradient = torch.where(has_moved, 0.0, inputs.advantages * ratio)
    return TokenLoss(-policy_gradient + KL_WEIGHT * log_ratio**2, ratio, has_moved)
