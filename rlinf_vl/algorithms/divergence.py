"""Estimators of the KL divergence from the logprobs of sampled tokens."""

import torch

from rlinf_vl.algorithms.aggregation import check_allowed, check_shapes, zero_outside

DIVERGENCE_ESTIMATORS = ("k1", "k2", "k3", "abs")

#: Upper bound of a log-ratio before exp; a lowered one carries no gradient. e^20 is 5e8: a few such
#: tokens would drown a batch or overflow.
MAX_LOG_RATIO = 20.0
#: Least probability that `reverse_kl` gives to the tokens outside its K together: below it,
#: 1 - Σ q_k is rounding error of float32.
MIN_REST = 1e-6


def reverse_kl(log_q: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    """Return KL(q‖p) per token of two distributions over K tokens and one rest.

    The rest stands for all other tokens; its probability is 1 minus the sum of the K.

        Σ_k q_k (log q_k - log p_k) + q_rest (log q_rest - log p_rest)

    The result never exceeds the KL over all tokens and equals it if the K are the whole vocabulary.
    It is differentiable in both arguments. A rest below 1e-6 counts as 1e-6.

    Args:
        log_q, log_p: float `[..., K]`, logprobs of the same K distinct tokens.

    Returns:
        `[...]`, float32 or wider.

    Source: Agarwal et al., "On-Policy Distillation of Language Models" (2024) for the reverse KL on
    the student's own samples.
    """
    if log_q.shape != log_p.shape:
        raise ValueError(f"log_q has shape {tuple(log_q.shape)}, log_p {tuple(log_p.shape)}")
    wide = torch.promote_types(log_q.dtype, torch.float32)
    log_q, log_p = log_q.to(wide), log_p.to(wide)
    rest_q, rest_p = ((1 - x.exp().sum(-1)).clamp(min=MIN_REST) for x in (log_q, log_p))
    return (log_q.exp() * (log_q - log_p)).sum(-1) + rest_q * (rest_q.log() - rest_p.log())


def divergence(
    log_p: torch.Tensor, log_q: torch.Tensor, mask: torch.Tensor, estimator: str
) -> torch.Tensor:
    """Estimate KL(q‖p) = E_q[log q - log p] per token, for tokens **sampled from q**.

    - `k1` = log q - log p: unbiased; a single estimate may be negative.
    - `k2` = (log q - log p)² / 2: never negative, biased, of low variance.
    - `k3` = p/q - 1 - log(p/q): unbiased and never negative.
    - `abs` = |log q - log p|: not an estimate of the KL, but the distance of the two logprobs.

    Sign: k1 is positive where q gives the sampled token more probability than p does. The KL
    penalty of a policy against its reference samples from the policy: log_q = policy,
    log_p = reference, and the loss adds +beta times the estimate. The gap between rollout and
    trainer samples from the engine: log_q = rollout, log_p = train.

    In a loss, an estimator is differentiated in log_q. That is not the gradient of the KL that it
    estimates, since the samples depend on q, too. Expected gradients, for tokens sampled from the q
    that is trained:

    - `k1`: E_q[∇log q] = 0, whatever p is. In a loss it is mere noise; use it in the reward.
    - `k2`: E_q[(log q - log p) ∇log q] = ∇KL(q‖p), the gradient of the KL penalty itself.
    - `k3`: E_q[(1 - p/q) ∇log q] = -E_p[∇log q] = ∇KL(p‖q), the other direction; the two agree
      where q is close to p.
    - `abs`: E_q[sign(log q - log p) ∇log q] = ∇‖q - p‖₁, twice the total variation: as strong near
      p as far from it.

    Args:
        log_p, log_q: float `[T]` or `[B, T]`, logprobs of the sampled tokens; the result is
            differentiable in both.
        mask: bool, same shape.

    Returns:
        Same shape, float32 or wider, 0 outside the mask. `k3` caps log(p/q) at `MAX_LOG_RATIO`.

    Raises:
        ValueError: unknown estimator, shapes that differ.

    Sources: Schulman, "Approximating KL Divergence" (2020); Tang and Munos, "On a few pitfalls in
    KL divergence gradient estimation for RL" (2025).
    """
    check_allowed("estimator", estimator, DIVERGENCE_ESTIMATORS)
    check_shapes(mask, log_p=log_p, log_q=log_q)
    log_ratio = zero_outside(log_p, mask) - zero_outside(log_q, mask)
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    if estimator == "abs":
        return log_ratio.abs()
    log_ratio = log_ratio.clamp(max=MAX_LOG_RATIO)
    # expm1 keeps k3 >= 0 near p = q, where exp(x) - 1 - x cancels in float32.
    return log_ratio.expm1() - log_ratio
