"""Importance correction for the gap between the engine that sampled and the trainer that learns."""

import math

import torch

from rlinf_vl.algorithms.aggregation import check_allowed, check_shapes, segment_index, segment_sum, zero_outside

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
        train_logprobs: float `[T]` or `[B, T]`, the trainer's logprobs of the sampled tokens, under the weights that
            the engine was given.
        rollout_logprobs: same shape, the engine's logprobs.
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
    check_allowed("level", level, IMPORTANCE_LEVELS)
    check_shapes(mask, train_logprobs=train_logprobs, rollout_logprobs=rollout_logprobs)
    if clip is not None and not clip > 0:
        raise ValueError(f"clip must be > 0 or None, got {clip}")
    delta = zero_outside(train_logprobs, mask) - zero_outside(rollout_logprobs, mask)
    if level != "token":
        index, n_segments = segment_index(mask, segment_ids, n_segments)
        exponent = segment_sum(delta, index, n_segments)
        if level == "geometric":
            exponent = exponent / segment_sum(mask, index, n_segments).clamp(min=1)
        delta = exponent.to(delta.dtype)[index]
    # One below the logarithm of the largest number: exp rounds, and must not round to infinity.
    weights = delta.clamp(max=math.log(torch.finfo(delta.dtype).max) - 1).exp()
    if clip is not None:
        weights = weights.clamp(max=clip)
    return zero_outside(weights, mask)
