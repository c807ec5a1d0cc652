"""Estimators of the KL divergence from the logprobs of sampled tokens."""

import torch

from rlinf_vl.algorithms.aggregation import check_allowed, check_shapes, zero_outside

DIVERGENCE_ESTIMATORS = ("k1", "k2", "k3", "abs")

#: Log-ratios above this are lowered to it before exp (and carry no gradient): e^20 is 5e8, and a few of those would
#: drown a batch or overflow.
MAX_LOG_RATIO = 20.0
#: Least probability that `reverse_kl` gives to all tokens but its K together: what float32 leaves of 1.
MIN_REST = 1e-6


def reverse_kl(log_q: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    """KL(q‖p) per token of two distributions over K tokens and "any other", whose probability is what is left of 1.

        Σ_k q_k (log q_k - log p_k) + q_rest (log q_rest - log p_rest)

    Never more than the KL over all tokens, and equal to it if the K are all. Differentiable in both; a rest below 1e-6 counts as
    that.

    Args:
        log_q, log_p: float `[..., K]`, logprobs of the same K distinct tokens.

    Returns:
        `[...]`, float32 or wider.

    Source: Agarwal et al., "On-Policy Distillation of Language Models" (2024) for the reverse KL on the student's own samples.
    """
    if log_q.shape != log_p.shape:
        raise ValueError(f"log_q has shape {tuple(log_q.shape)}, log_p {tuple(log_p.shape)}")
    wide = torch.promote_types(log_q.dtype, torch.float32)
    log_q, log_p = log_q.to(wide), log_p.to(wide)
    rest_q, rest_p = ((1 - x.exp().sum(-1)).clamp(min=MIN_REST) for x in (log_q, log_p))
    return (log_q.exp() * (log_q - log_p)).sum(-1) + rest_q * (rest_q.log() - rest_p.log())


def divergence(log_p: torch.Tensor, log_q: torch.Tensor, mask: torch.Tensor, estimator: str) -> torch.Tensor:
    """Estimates KL(q‖p) = E_q[log q - log p] per token, for tokens **sampled from q**.

    - `k1` = log q - log p: unbiased; a single estimate may be negative.
    - `k2` = (log q - log p)² / 2: never negative, biased, of low variance.
    - `k3` = p/q - 1 - log(p/q): unbiased and never negative.
    - `abs` = |log q - log p|: not an estimate of the KL; how far the two are apart.

    Sign: positive where q gives the sampled token more probability than p does (k1). The KL penalty of a policy against
    its reference samples from the policy: log_q = policy, log_p = reference, and the loss adds +beta times this. The
    rollout-train gap samples from the engine: log_q = rollout, log_p = train.

    As a loss, an estimator is differentiated in log_q, which is not the same as differentiating what it estimates: the
    samples depend on q, too. Expected gradients, for tokens sampled from the q that is trained:

    - `k1`: E_q[∇log q] = 0, whatever p is. It pulls nowhere; as a loss it is noise. It belongs into the reward.
    - `k2`: E_q[(log q - log p) ∇log q] = ∇KL(q‖p), the gradient of what is wanted.
    - `k3`: E_q[(1 - p/q) ∇log q] = -E_p[∇log q] = ∇KL(p‖q), the other direction; the two agree where q is close to p.
    - `abs`: E_q[sign(log q - log p) ∇log q] = ∇‖q - p‖₁, twice the total variation: as strong near p as far from it.

    Args:
        log_p, log_q: float `[T]` or `[B, T]`, logprobs of the sampled tokens; the result is differentiable in both.
        mask: bool, same shape.

    Returns:
        Same shape, float32 or wider, 0 outside the mask. `k3` caps log(p/q) at 20 (see `MAX_LOG_RATIO`).

    Raises:
        ValueError: unknown estimator, shapes that differ.

    Sources: Schulman, "Approximating KL Divergence" (2020); Tang and Munos, "On a few pitfalls in KL divergence gradient
    estimation for RL" (2025).
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
    return log_ratio.expm1() - log_ratio
