"""The policy-gradient loss per token."""

import math
from collections.abc import Callable

import torch

from rlinf_vl.algorithms.aggregation import check_allowed, check_shapes, segment_sums, zero_outside
from rlinf_vl.algorithms.divergence import MAX_LOG_RATIO, divergence

LOSS_TYPES = ("actor", "gspo", "cispo", "sapo")


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float | None = None,
    clip_high: float | None = None,
    clip_c: float | None = None,
    weights: torch.Tensor | None = None,
    loss_type: str | Callable[..., torch.Tensor] = "actor",
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    segment_ids: torch.Tensor | None = None,
    n_segments: int | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the policy-gradient loss per token, optionally importance-weighted.

        Δ = logprobs - old_logprobs;  ρ = exp(Δ);  c(ρ) = clip(ρ, 1 - clip_low, 1 + clip_high)

        actor:  L = max(-A·ρ, -A·c(ρ));  with clip_c, where A < 0:  L = min(L, -A·clip_c)
        gspo:   the same with ρ = exp(mean of Δ over the sequence) for each of its tokens
        cispo:  L = -A·c(ρ)·logprobs, c(ρ) without a gradient
        sapo:   L = -A·(4/τ)·sigmoid(τ·(ρ - 1)),  τ = tau_pos where A > 0, else tau_neg
        result: weights · L

    At ρ = 1, all of them have the gradient -A·weights. Where `actor` or `gspo` clips, the gradient
    is 0; `cispo` bounds it; `sapo` lets it fade as ρ leaves 1. For "gspo", sequences must not be
    split over calls.

    Args:
        logprobs: float `[T]` or `[B, T]`, of the policy being trained; the only input that gets a
            gradient.
        old_logprobs: same shape, of the policy at the start of the step.
        advantages: of a shape that broadcasts to it: `[T]`, `[B, T]`, or `[B, 1]` for one per row.
        mask: bool, same shape as `logprobs`.
        clip_low, clip_high: >= 0; required by all types but "sapo".
        clip_c: > 1, or None for no dual clip; used by "actor" and "gspo".
        weights: broadcasts like `advantages`; None is 1.
        loss_type: one of `LOSS_TYPES`, or a function `(logprobs, old_logprobs, advantages,
            segment_ids, clip_low, clip_high)` that returns L in the shape of `logprobs`. Its values
            outside the mask do not count.
        tau_pos, tau_neg: temperatures τ of "sapo".
        segment_ids, n_segments: see `aggregate`.

    Returns:
        The loss per token (same shape, float32 or wider, 0 outside the mask), and detached scalar
        tensors over the masked tokens (all 0 if there are none): `clip_fraction`, the share of
        tokens that the clip changed; `dual_clip_fraction`, the share that clip_c capped;
        `ratio_mean`; `ratio_max`; `approx_kl`, the mean k3 estimate of KL(old‖new). "sapo" and
        functions have no `clip_fraction`; only "actor" and "gspo" have a `dual_clip_fraction`. The
        log of ρ is capped at 20 (`MAX_LOG_RATIO`).

    Raises:
        ValueError: shapes that don't fit, a clip out of range, an unknown loss.

    Sources: Schulman et al., "Proximal Policy Optimization Algorithms" (2017); Ye et al.,
    "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning" (2020) for the dual
    clip; Yu et al., "DAPO" (2025) for two bounds; Zheng et al., "Group Sequence Policy
    Optimization" (2025); MiniMax, "MiniMax-M1" (2025) for CISPO; Gao et al., "Soft Adaptive Policy
    Optimization" (2025).
    """
    check_shapes(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    if not callable(loss_type):
        check_allowed("loss_type", loss_type, LOSS_TYPES)
        if loss_type != "sapo" and not (
            clip_low is not None and clip_low >= 0 and clip_high is not None and clip_high >= 0
        ):
            raise ValueError(f"clip_low and clip_high must be >= 0, got {clip_low} and {clip_high}")
    if clip_c is not None and not clip_c > 1:
        raise ValueError(f"clip_c must be > 1 or None, got {clip_c}")
    new = zero_outside(logprobs, mask)
    old = zero_outside(old_logprobs.detach(), mask)
    advantage = zero_outside(_broadcast("advantages", advantages, mask), mask)

    log_ratio = new - old
    if loss_type == "gspo":
        index, sums, tokens = segment_sums(log_ratio, mask, segment_ids, n_segments)
        # Every token of a sequence has the same ratio, the geometric mean of its tokens' ratios.
        log_ratio = (sums / tokens.clamp(min=1)).to(log_ratio.dtype)[index]
    ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
    # Name of a metric → mask of the tokens that it counts.
    clip_masks: dict[str, torch.Tensor] = {}
    if callable(loss_type):
        loss = loss_type(new, old, advantage, segment_ids, clip_low, clip_high)
        if not isinstance(loss, torch.Tensor) or loss.shape != mask.shape:
            returned = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(
                f"must return the loss of each token, a tensor of shape {tuple(mask.shape)}; "
                f"returned {returned}"
            )
    elif loss_type == "sapo":
        tau = torch.where(
            advantage > 0, advantage.new_full((), tau_pos), advantage.new_full((), tau_neg)
        )
        loss = -advantage * (4 / tau) * torch.sigmoid(tau * (ratio - 1))
    else:
        assert clip_low is not None and clip_high is not None
        clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
        if loss_type == "cispo":
            # The ratio is a constant weight: every token keeps a gradient, through `new` alone.
            loss, clip_masks["clip_fraction"] = (
                -advantage * clipped.detach() * new,
                clipped != ratio,
            )
        else:
            # PPO is pessimistic: the larger of the two losses counts.
            clip_masks["clip_fraction"] = is_clipped = -advantage * clipped > -advantage * ratio
            loss = -advantage * torch.where(is_clipped, clipped, ratio)
            # Dual clip: with A < 0 the loss grows with ρ without bound; the cap is one.
            cap = -advantage * (math.inf if clip_c is None else clip_c)
            clip_masks["dual_clip_fraction"] = is_capped = (advantage < 0) & (loss > cap)
            loss = torch.where(is_capped, cap, loss)
    if weights is not None:
        loss = loss * zero_outside(_broadcast("weights", weights, mask), mask)
    loss = loss.where(mask, 0.0)

    with torch.no_grad():
        count = mask.sum().clamp(min=1)
        masked_ratio = zero_outside(ratio, mask)
        stats = {
            name: (clip_mask & mask).sum() / count for name, clip_mask in clip_masks.items()
        } | {
            "ratio_mean": masked_ratio.sum() / count,
            # An empty tensor has no maximum; its sum is 0.
            "ratio_max": masked_ratio.max() if mask.numel() else masked_ratio.sum(),
            "approx_kl": divergence(logprobs, old_logprobs, mask, "k3").sum() / count,
        }
    return loss, stats


def _broadcast(name: str, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return `values`, detached and expanded to the mask's shape.

    Raises:
        ValueError: the shapes don't fit; the message has both.
    """
    try:
        return values.detach().expand(mask.shape)
    except RuntimeError:
        raise ValueError(
            f"{name} of shape {tuple(values.shape)} do not broadcast to the mask's "
            f"{tuple(mask.shape)}"
        ) from None
