"""A soft gate in place of the clip.

    −A·(4/τ)·sigmoid(τ·(ρ − 1)), τ = 1 where A > 0, else 1.05

The gradient fades as ρ leaves 1.

Gao et al., SAPO, [2511.20347](https://arxiv.org/abs/2511.20347)
"""

import torch

from rlinf_vl.algorithms.losses import LossInputs, TokenLoss

DEFAULTS = {"loss_agg_func": "seq-mean-token-mean"}
CLIPS = ()
#: The paper's temperatures, of positive advantages and of the others: the higher, the narrower the
#: gate.
TAU_POS, TAU_NEG = 1.0, 1.05


def loss(inputs: LossInputs) -> TokenLoss:
    advantages, ratio = inputs.advantages, inputs.ratio()
    tau_pos, tau_neg = (
        advantages.new_full((), TAU_POS),
        advantages.new_full((), TAU_NEG),
    )
    # Divided by τ, times 4: the gate's slope at ρ = 1 is τ/4, so the gradient there is PPO's.
    tau = torch.where(advantages > 0, tau_pos, tau_neg)
    return TokenLoss(-advantages * (4 / tau) * torch.sigmoid(tau * (ratio - 1)), ratio)
