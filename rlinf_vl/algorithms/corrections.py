"""What corrects for tokens that other weights, or another arithmetic, have sampled: old logprobs, importance weights, rejection."""

import math

import torch

from rlinf_vl.algorithms.aggregation import check_allowed, check_shapes, segment_sums, zero_outside

#: What has a ratio ρ of its own: exp(Δ) of a token, Δ = train - rollout logprob; of a sequence exp(ΣΔ), or exp(mean Δ).
IMPORTANCE_LEVELS = ("token", "sequence", "geometric")


@torch.no_grad()
def importance_weights(
    train_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip: float | None,
    level: str = "token",
    segment_ids: torch.Tensor | None = None,
    n_segments: int | None = None,
) -> torch.Tensor:
    """Truncated importance weights of the trainer's distribution over the engine's.

        w_t = min(exp(Δ_t), clip),  Δ = train_logprobs - rollout_logprobs

    - `token`: each token by its own ratio.
    - `sequence`: every token of a sequence by the ratio of the whole, exp(Σ_t Δ_t): unbiased, of high variance.
    - `geometric`: every token of a sequence by the geometric mean of its ratios, exp(mean_t Δ_t).

    Sums and means are over the masked tokens of a sequence, which must not be split over calls.

    Args:
        train_logprobs: float `[T]` or `[B, T]`, the trainer's logprobs of the sampled tokens.
        rollout_logprobs: same shape, the engine's logprobs, each of the weights that sampled the token.
        mask: bool, same shape: the sampled tokens.
        clip: upper bound of a weight, > 0; None doesn't truncate.
        segment_ids, n_segments: see `aggregate`.

    Returns:
        Weights of the same shape, float32 or wider, detached; 0 outside the mask. An exponent that the dtype can't hold
        is lowered to one it can, so a weight is finite even without `clip`.

    Raises:
        ValueError: unknown level, shapes that differ, clip <= 0.

    Sources: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025) for the
    truncated token weights; Ionides, "Truncated Importance Sampling" (2008); Zheng et al., "Group Sequence
    Policy Optimization" (2025) for the geometric mean.
    """
    if clip is not None and not clip > 0:
        raise ValueError(f"clip must be > 0 or None, got {clip}")
    delta = log_ratios(train_logprobs, rollout_logprobs, mask, level, segment_ids, n_segments)
    # One below the logarithm of the largest number: exp rounds, and must not round to infinity.
    weights = delta.clamp(max=math.log(torch.finfo(delta.dtype).max) - 1).exp()
    if clip is not None:
        weights = weights.clamp(max=clip)
    return zero_outside(weights, mask)


@torch.no_grad()
def rejection_mask(
    train_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    level: str | None,
    low: float = 0.0,
    high: float = math.inf,
    veto: float | None = None,
    segment_ids: torch.Tensor | None = None,
    n_segments: int | None = None,
) -> torch.Tensor:
    """The masked tokens that may be trained on, as what sampled them is close enough to the trainer.

    A token stays if low <= ρ <= high, with ρ of the level as in `importance_weights` before it is truncated; and if no token of its
    sequence has exp(Δ_t) < veto. At the levels `sequence` and `geometric` a sequence stays or goes as a whole. NaN goes.

    Args:
        level: None rejects nothing but by `veto`.
        low, high: bounds of ρ = exp(train - rollout), both included; 0 and infinity are none. Systems that bound
            exp(rollout - train) have their reciprocals.
        veto: least ratio of a single token; None is off.
        Others: see `importance_weights`.

    Returns:
        bool, of the mask's shape; False outside the mask.

    Raises:
        ValueError: unknown level, shapes that differ, bounds that leave nothing between them.

    Sources: Liu et al., "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch" (2025) for
    masked importance sampling (MIS), the geometric mean and the veto; Ling Team, "Every Step Evolves: Scaling Reinforcement Learning
    for Trillion-Scale Thinking Model" (2025) for tokens (IcePop).
    """
    if not 0 <= low < high:
        raise ValueError(f"low and high must be 0 <= low < high, got {low} and {high}")
    kept = mask
    if level is not None:
        delta = log_ratios(train_logprobs, rollout_logprobs, mask, level, segment_ids, n_segments)
        kept = kept & (delta >= _log(low)) & (delta <= _log(high))
    if veto is not None:
        tokens = log_ratios(train_logprobs, rollout_logprobs, mask, "token")
        vetoed = mask & ~(tokens >= _log(veto))
        index, count, _ = segment_sums(vetoed, mask, segment_ids, n_segments)
        kept = kept & (count == 0)[index]
    return kept


def log_ratios(
    train_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    mask: torch.Tensor,
    level: str,
    segment_ids: torch.Tensor | None = None,
    n_segments: int | None = None,
) -> torch.Tensor:
    """log ρ of each token at a `level` of `importance_weights`, of the mask's shape, float32 or wider; of no meaning outside it."""
    check_allowed("level", level, IMPORTANCE_LEVELS)
    check_shapes(mask, train_logprobs=train_logprobs, rollout_logprobs=rollout_logprobs)
    delta = zero_outside(train_logprobs, mask) - zero_outside(rollout_logprobs, mask)
    if level == "token":
        return delta
    index, sums, tokens = segment_sums(delta, mask, segment_ids, n_segments)
    exponent = sums / tokens.clamp(min=1) if level == "geometric" else sums
    return exponent.to(delta.dtype)[index]


def interpolated_logprobs(
    train_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, staleness: torch.Tensor
) -> torch.Tensor:
    """Old logprobs between the engine's and the trainer's: the staler a token, the closer to the latter. They need no pass.

        log π_old = log π_rollout + α·(log π_train - log π_rollout),  α = d / (d + 1)

    Args:
        train_logprobs: float `[T]` or `[B, T]`, of the weights being trained.
        rollout_logprobs: same shape, of the weights that sampled each token.
        staleness: integers, same shape, d >= 0: how many steps older those weights are than the weights at the step's start.

    Returns:
        Same shape, detached.

    Source: Li et al., "A-3PO: Accelerating Asynchronous LLM Training with Staleness-aware Proximal Policy Approximation" (2025), as
    AReaL computes it: versions of the old policy and of the policy being trained differ by one.
    """
    d = staleness.to(rollout_logprobs.dtype)
    return rollout_logprobs + d / (d + 1) * (train_logprobs.detach() - rollout_logprobs)


def _log(bound: float) -> float:
    return math.log(bound) if bound else -math.inf
