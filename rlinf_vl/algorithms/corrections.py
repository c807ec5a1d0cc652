"""Corrections for tokens sampled by other weights or other arithmetic than the trainer's.

They are importance weights, rejection of tokens, and interpolated old logprobs.
"""

import math

import torch

from rlinf_vl.algorithms.aggregation import check_allowed, check_shapes, segment_sums, zero_outside

#: Definitions of the ratio ρ, with Δ = train - rollout logprob of a token: exp(Δ) for each token,
#: or one ratio for all tokens of a sequence, exp(ΣΔ) or exp(mean Δ).
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
    """Return truncated importance weights of the trainer's distribution over the engine's.

        w_t = min(exp(Δ_t), clip),  Δ = train_logprobs - rollout_logprobs

    - `token`: a token's weight is its own ratio.
    - `sequence`: the weight of every token is the ratio of its sequence, exp(Σ_t Δ_t): unbiased, of
      high variance.
    - `geometric`: the weight of every token is the geometric mean of its sequence's ratios,
      exp(mean_t Δ_t).

    Sums and means are over the masked tokens of a sequence, which must not be split over calls.

    Args:
        train_logprobs: float `[T]` or `[B, T]`, the trainer's logprobs of the sampled tokens.
        rollout_logprobs: same shape, the engine's logprobs, by the weights that sampled the token.
        mask: bool, same shape: the sampled tokens.
        clip: upper bound of a weight, > 0; None doesn't truncate.
        segment_ids, n_segments: see `aggregate`.

    Returns:
        Weights of the same shape, float32 or wider, detached; 0 outside the mask. An exponent whose
        exp overflows the dtype is lowered, so a weight is finite even without `clip`.

    Raises:
        ValueError: unknown level, shapes that differ, clip <= 0.

    Sources: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
    (2025) for the truncated token weights; Ionides, "Truncated Importance Sampling" (2008); Zheng
    et al., "Group Sequence Policy Optimization" (2025) for the geometric mean.
    """
    if clip is not None and not clip > 0:
        raise ValueError(f"clip must be > 0 or None, got {clip}")
    delta = log_ratios(train_logprobs, rollout_logprobs, mask, level, segment_ids, n_segments)
    # One below the logarithm of the largest number, since exp must not round to infinity.
    weights = delta.clamp(max=math.log(torch.finfo(delta.dtype).max) - 1).exp()
    if clip is not None:
        weights = weights.clamp(max=clip)
    return zero_outside(weights, mask)


@torch.no_grad()
def weight_totals(
    weights: torch.Tensor,
    mask: torch.Tensor,
    *,
    level: str,
    owners: torch.Tensor,
    n_owners: int,
    segment_ids: torch.Tensor | None = None,
    n_segments: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum and number of each owner's importance weights, to normalize them by a mean.

        w̄ = Σ_t w_t / n over tokens at the level `token`, over sequences at the others

    A weight divided by w̄ has the mean 1 over what w̄ is over: a mini-batch (self-normalized
    importance sampling), or a group.

    Args:
        weights, mask, segment_ids, n_segments: see `importance_weights`.
        level: the level of the weights; a sequence counts once where its tokens share one.
        owners: int64, of the mask's shape: 0 … n_owners-1, such as the trajectory of each token.
            The tokens of a sequence have one owner.

    Returns:
        Sums and counts, float64 `[n_owners]`.

    Raises:
        ValueError: unknown level, shapes that differ.

    Source: Owen, "Monte Carlo theory, methods and examples" (2013), section 9.2; over a batch,
    verl's `rollout_is_batch_normalize`.
    """
    check_allowed("level", level, IMPORTANCE_LEVELS)
    check_shapes(mask, weights=weights, owners=owners)
    values, counted = zero_outside(weights, mask).double(), mask.double()
    if level != "token":
        index, _, tokens = segment_sums(values, mask, segment_ids, n_segments)
        # The share of a token in its sequence, so that the sequence counts once.
        counted = counted / tokens.clamp(min=1)[index]
        values = values * counted
    zeros = values.new_zeros(n_owners)
    flat = owners.flatten()
    return zeros.index_add(0, flat, values.flatten()), zeros.index_add(0, flat, counted.flatten())


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
    """Return the mask of tokens whose sampling distribution is close enough to train on them.

    A token is accepted if low <= ρ <= high, with ρ of the level as in `importance_weights`, but not
    truncated, and if no token of its sequence has exp(Δ_t) < veto. At the levels `sequence` and
    `geometric`, a sequence is accepted or rejected as a whole. NaN is rejected.

    Args:
        train_logprobs, rollout_logprobs, mask, segment_ids, n_segments: see `importance_weights`.
        level: the level of ρ; None rejects by `veto` only.
        low, high: inclusive bounds of ρ = exp(train - rollout); 0 and infinity don't bound. Systems
            that bound exp(rollout - train) use the reciprocals.
        veto: the least ratio of a single token; None is off.

    Returns:
        bool, of the mask's shape; False outside the mask.

    Raises:
        ValueError: unknown level, shapes that differ, bounds that leave nothing between them.

    Sources: Liu et al., "When Speed Kills Stability: Demystifying RL Collapse from the
    Training-Inference Mismatch" (2025) for masked importance sampling (MIS), the geometric mean and
    the veto; Ling Team, "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale
    Thinking Model" (2025) for tokens (IcePop).
    """
    if not 0 <= low < high:
        raise ValueError(f"low and high must be 0 <= low < high, got {low} and {high}")
    accepted = mask
    if level is not None:
        delta = log_ratios(train_logprobs, rollout_logprobs, mask, level, segment_ids, n_segments)
        # NaN compares false with both bounds, so it is rejected.
        accepted = accepted & (delta >= _log(low)) & (delta <= _log(high))
    if veto is not None:
        token_log_ratios = log_ratios(train_logprobs, rollout_logprobs, mask, "token")
        # "not >=" instead of "<": NaN must be vetoed, too.
        vetoed = mask & ~(token_log_ratios >= _log(veto))
        index, vetoed_tokens, _ = segment_sums(vetoed, mask, segment_ids, n_segments)
        accepted = accepted & (vetoed_tokens == 0)[index]
    return accepted


def log_ratios(
    train_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    mask: torch.Tensor,
    level: str,
    segment_ids: torch.Tensor | None = None,
    n_segments: int | None = None,
) -> torch.Tensor:
    """Return log ρ of each token at a `level` of `importance_weights`.

    The result has the mask's shape and is float32 or wider; values outside the mask mean nothing.
    """
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
    """Interpolate old logprobs between the engine's and the trainer's, without a forward pass.

    The staler a token, the closer its old logprob is to the trainer's.

        log π_old = log π_rollout + α·(log π_train - log π_rollout),  α = d / (d + 1)

    Args:
        train_logprobs: float `[T]` or `[B, T]`, of the weights being trained.
        rollout_logprobs: same shape, of the weights that sampled each token.
        staleness: integers, same shape, d >= 0: the number of steps between the weights that
            sampled the token and the weights at the start of the training step.

    Returns:
        Same shape, detached.

    Source: Li et al., "A-3PO: Accelerating Asynchronous LLM Training with Staleness-aware Proximal
    Policy Approximation" (2025), as AReaL computes it: versions of the old policy and of the policy
    being trained differ by one.
    """
    d = staleness.to(rollout_logprobs.dtype)
    return rollout_logprobs + d / (d + 1) * (train_logprobs.detach() - rollout_logprobs)


def _log(bound: float) -> float:
    """Return the logarithm of a bound; minus infinity for 0, where `math.log` raises."""
    return math.log(bound) if bound else -math.inf
