"""Rewards, normalized by mean and deviation over all tokens of the rollout.

    (r − μ) / √(σ² + 1e-8), μ and σ² over all sampled tokens of the rollout, σ² with N − 1

It needs no groups.

Hu et al., REINFORCE++, [2501.03262](https://arxiv.org/abs/2501.03262)
"""

import torch

from rlinf_vl.algorithms.advantages import token_moments, token_normalized

DEFAULTS = {"normalize_advantages": True}


def advantages(rewards, group_ids, tokens, *, normalize):
    return token_normalized(rewards, tokens, normalize=normalize)


def token_kl(
    returns: torch.Tensor,
    tokens: torch.Tensor,
    kl_to_end: torch.Tensor,
    kl_to_end_squared: torch.Tensor,
    *,
    beta: float,
    normalize: bool,
) -> tuple[torch.Tensor, float]:
    """Return the advantage of each turn, and the scale of the KL yet to be subtracted from it.

    The return of token t is that of its turn, less beta times the KL from t to the trajectory's
    end. Mean and variance are over the returns of all tokens; the sums over each turn's tokens
    suffice for both, so no token's KL is needed here. The advantage of token t is that of its turn
    less the scale times its KL to the end.

    Args:
        returns: float64 `[N]`, of each turn, without KL.
        tokens: int64 `[N]`, the number of sampled tokens of each turn.
        kl_to_end, kl_to_end_squared: float64 `[N]`, sums over each turn's tokens.
    """

    def squared_distance(mean: torch.Tensor) -> torch.Tensor:
        """Return Σ (return of the token - mean)² over all tokens."""
        # The square of (centered - beta · KL to the end), multiplied out, so that sums suffice.
        centered = returns - mean
        return (
            tokens * centered.square()
            - 2 * beta * centered * kl_to_end
            + beta**2 * kl_to_end_squared
        ).sum()

    total = (tokens * returns - beta * kl_to_end).sum()
    mean, deviation = token_moments(tokens.sum(), total, squared_distance)
    deviation = deviation if normalize else torch.ones_like(deviation)
    return (returns - mean) / deviation, float(beta / deviation)
