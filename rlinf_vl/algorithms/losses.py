"""Policy-gradient losses, per token."""

import torch

from rlinf_vl.algorithms.aggregation import check_allowed, check_shapes, segment_index, segment_sum, zero_outside
from rlinf_vl.algorithms.divergence import MAX_LOG_RATIO, divergence

RATIO_LEVELS = ("token", "geometric")


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
        index, n_segments = segment_index(mask, segment_ids, n_segments)
        mean = segment_sum(log_ratio, index, n_segments) / segment_sum(mask, index, n_segments).clamp(min=1)
        log_ratio = mean.to(log_ratio.dtype)[index]
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


def _broadcast(name: str, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values`, detached, in the mask's shape; ValueError naming both shapes if they don't fit."""
    try:
        return values.detach().expand(mask.shape)
    except RuntimeError:
        raise ValueError(
            f"{name} of shape {tuple(values.shape)} do not broadcast to the mask's {tuple(mask.shape)}"
        ) from None
