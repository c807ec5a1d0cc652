"""The policy-gradient loss per token, and the importance weights for what the engine sampled otherwise than the trainer."""

import math

import torch

from rlinf_vl.algorithms.aggregation import check_allowed, check_shapes, segment_sums, zero_outside
from rlinf_vl.algorithms.divergence import MAX_LOG_RATIO, divergence

RATIO_LEVELS = ("token", "geometric")
IMPORTANCE_LEVELS = ("token", "sequence", "geometric")


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float | None = None,
    weights: torch.Tensor | None = None,
    level: str = "token",
    segment_ids: torch.Tensor | None = None,
    n_segments: int | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The clipped surrogate of PPO, optionally dual-clipped and importance-weighted.

        Δ = logprobs - old_logprobs;  ρ = exp(Δ) of each token (level "token": PPO), or
        ρ = exp(mean of Δ over the sequence), the same for each of its tokens (level "geometric": GSPO)
        L = max(-A·ρ, -A·clip(ρ, 1 - clip_low, 1 + clip_high))
        with clip_c, where A < 0:  L = min(L, -A·clip_c)
        result: weights · L

    Where clipping binds the gradient is 0; elsewhere ∂L/∂Δ = -A·ρ·weights. With "geometric", sequences must not be split over
    calls, and ρ stays so close to 1 that GSPO clips at a few 1e-4.

    Args:
        logprobs: float `[T]` or `[B, T]`, of the policy being trained; the only input that gets a gradient.
        old_logprobs: same shape, of the policy at the start of the step.
        advantages: anything that broadcasts to that shape: `[T]`, `[B, T]`, or `[B, 1]` for one per row.
        mask: bool, same shape as `logprobs`.
        clip_low, clip_high: >= 0; ρ is clipped to [1 - clip_low, 1 + clip_high].
        clip_c: > 1, or None for no dual clip.
        weights: broadcasts like `advantages`; None is 1.
        segment_ids, n_segments: see `aggregate`.

    Returns:
        The loss per token (same shape, float32 or wider, 0 outside the mask), and detached scalar tensors over the
        masked tokens (all 0 if there are none): `clip_fraction`, the share whose clipped branch is the larger;
        `dual_clip_fraction`, the share capped by clip_c; `ratio_mean`; `ratio_max`; `approx_kl`, the mean k3 estimate of
        KL(old‖new). The log of ρ is capped at 20 (`MAX_LOG_RATIO`).

    Raises:
        ValueError: shapes that don't fit, a clip out of range, an unknown level.

    Sources: Schulman et al., "Proximal Policy Optimization Algorithms" (2017); Ye et al., "Mastering Complex Control in
    MOBA Games with Deep Reinforcement Learning" (2020) for the dual clip; Yu et al., "DAPO" (2025) for two bounds; Zheng et
    al., "Group Sequence Policy Optimization" (2025) for the ratio of a sequence.
    """
    check_allowed("level", level, RATIO_LEVELS)
    check_shapes(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    if not (clip_low >= 0 and clip_high >= 0):
        raise ValueError(f"clip_low and clip_high must be >= 0, got {clip_low} and {clip_high}")
    if clip_c is not None and not clip_c > 1:
        raise ValueError(f"clip_c must be > 1 or None, got {clip_c}")
    new = zero_outside(logprobs, mask)
    old = zero_outside(old_logprobs.detach(), mask)
    advantage = zero_outside(_broadcast("advantages", advantages, mask), mask)

    log_ratio = new - old
    if level == "geometric":
        index, sums, tokens = segment_sums(log_ratio, mask, segment_ids, n_segments)
        log_ratio = (sums / tokens.clamp(min=1)).to(log_ratio.dtype)[index]
    ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
    unclipped = -advantage * ratio
    clipped = -advantage * ratio.clamp(1 - clip_low, 1 + clip_high)
    binds = clipped > unclipped
    loss = torch.where(binds, clipped, unclipped)
    dual = torch.zeros_like(mask)
    if clip_c is not None:
        cap = -advantage * clip_c
        dual = (advantage < 0) & (loss > cap)
        loss = torch.where(dual, cap, loss)
    if weights is not None:
        loss = loss * zero_outside(_broadcast("weights", weights, mask), mask)
    loss = loss.where(mask, 0.0)

    with torch.no_grad():
        count = mask.sum().clamp(min=1)
        masked_ratio = zero_outside(ratio, mask)
        stats = {
            "clip_fraction": (binds & mask).sum() / count,
            "dual_clip_fraction": (dual & mask).sum() / count,
            "ratio_mean": masked_ratio.sum() / count,
            "ratio_max": masked_ratio.max() if mask.numel() else masked_ratio.sum(),
            "approx_kl": divergence(logprobs, old_logprobs, mask, "k3").sum() / count,
        }
    return loss, stats


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
        index, sums, tokens = segment_sums(delta, mask, segment_ids, n_segments)
        exponent = sums / tokens.clamp(min=1) if level == "geometric" else sums
        delta = exponent.to(delta.dtype)[index]
    # One below the logarithm of the largest number: exp rounds, and must not round to infinity.
    weights = delta.clamp(max=math.log(torch.finfo(delta.dtype).max) - 1).exp()
    if clip is not None:
        weights = weights.clamp(max=clip)
    return zero_outside(weights, mask)


def _broadcast(name: str, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values`, detached, in the mask's shape; ValueError naming both shapes if they don't fit."""
    try:
        return values.detach().expand(mask.shape)
    except RuntimeError:
        raise ValueError(
            f"{name} of shape {tuple(values.shape)} do not broadcast to the mask's {tuple(mask.shape)}"
        ) from None
