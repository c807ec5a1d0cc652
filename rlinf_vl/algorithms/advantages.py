"""Advantages of trajectories, computed from their rewards."""

from collections.abc import Callable, Hashable, Iterable

import torch

#: Largest sum of rewards that counts as cancelled, relative to the sum of their sizes: well above
#: the rounding of float32.
_RESIDUE = 1e-5
#: An eps that changes no deviation of rewards, and still divides by no zero.
_NO_EPS = 1e-300


def group_advantages(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | Iterable[Hashable],
    *,
    normalize: bool = True,
    leave_one_out: bool = False,
    weights: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Subtract from each reward a baseline of its group.

    The baseline is the group's mean (GRPO), or the mean of the group's other rewards (RLOO), or,
    with `weights` w, the mean weighted by them (OPO).

        A_i = r_i - mean = r_i - (Σ_j r_j) / n
        weights:        A_i = r_i - (Σ_j w_j r_j) / (Σ_j w_j)
        leave_one_out:  A_i = r_i - (Σ_{j≠i} r_j) / (n - 1) = (r_i - mean) · n / (n - 1)
        normalize:      A_i / (std + eps),  std with n - 1

    A group whose rewards are all equal, a group of one included, gets exactly 0.

    Args:
        rewards: float `[N]`, finite.
        group_ids: `[N]`, the group of each reward: an integer tensor or any hashable values, in
            any order.
        weights: `[N]`, > 0; not with `leave_one_out`.

    Returns:
        `[N]`, dtype and device of `rewards`.

    Raises:
        ValueError: shapes differ, dtypes are wrong, or a reward is not finite.

    Sources: Shao et al., "DeepSeekMath" (2024), section 4.1; without the division, Liu et al.,
    "Understanding R1-Zero-Like Training" (2025); Ahmadian et al., "Back to Basics: Revisiting
    REINFORCE Style Optimization" (2024) for RLOO.
    """
    if rewards.ndim != 1 or not rewards.is_floating_point():
        raise ValueError(
            f"rewards must be a 1-D float tensor, got {rewards.dtype} of shape "
            f"{tuple(rewards.shape)}"
        )
    groups = listed("group_ids", group_ids, rewards)
    group_numbers: dict[Hashable, int] = {}
    index = torch.tensor(
        [group_numbers.setdefault(g, len(group_numbers)) for g in groups], dtype=torch.int64
    )
    if not torch.isfinite(rewards).all():
        raise ValueError(
            f"rewards must be finite, got {rewards[~torch.isfinite(rewards)].tolist()}"
        )

    # float64: the sums of a group then hardly depend on the order of its members.
    values, index = rewards.detach().double(), index.to(rewards.device)
    zeros = values.new_zeros(len(group_numbers))
    count = zeros.index_add(0, index, torch.ones_like(values))
    mass = torch.ones_like(values) if weights is None else weights.to(values)
    sums, totals = zeros.index_add(0, index, mass * values), zeros.index_add(0, index, mass)
    centered = values - (sums / totals.clamp(min=_NO_EPS))[index]
    # A group of one has no other rewards. A divisor of 1 keeps NaN out; the tie below makes it 0.
    n_others = (count - 1).clamp(min=1)
    advantages = centered * (count / n_others)[index] if leave_one_out else centered
    if normalize:
        variance = zeros.index_add(0, index, centered.square()) / n_others
        advantages = advantages / (variance.sqrt()[index] + eps)
    # Ties are detected by max == min: the mean of n equal floats need not be that float.
    highest = zeros.scatter_reduce(0, index, values, "amax", include_self=False)
    lowest = zeros.scatter_reduce(0, index, values, "amin", include_self=False)
    tied = (highest == lowest)[index]
    return advantages.masked_fill(tied, 0.0).to(rewards.dtype)


def decoupled_advantages(
    parts: torch.Tensor,
    weights: torch.Tensor,
    group_ids: torch.Tensor | Iterable[Hashable],
    *,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Normalize each reward in its group on its own, add them up, and normalize the sum (GDPO).

        A_{i,k} = (r_{i,k} - mean_k) / (std_k + eps),  mean_k and std_k of the group, std with n - 1
        S_i     = Σ_k w_k · A_{i,k}
        A_i     = (S_i - mean S) / (std S + eps),  over all trajectories, std with N - 1

    Rewards of different scale then count by their weights alone, and answers with equal sums of
    different rewards have different advantages. A reward that ties in its group adds exactly 0.
    Each group's S_i add up to 0, so mean S is 0: it is left out, and a tied group gets exactly 0.
    So does a trajectory whose rewards cancel.
    One that a trajectory does not have adds 0 to it, and is compared among those that have it. A
    trajectory without any reward gets 0, and is left out of mean S and std S.

    Args:
        parts: float `[N, K]`, the rewards; NaN where a trajectory does not have one.
        weights: float `[K]`.
        group_ids: `[N]`, see `group_advantages`.

    Returns:
        `[N]`, dtype and device of `parts`.

    Raises:
        ValueError: shapes differ, or a reward is infinite.

    Source: Liu et al., "GDPO: Group reward-Decoupled Normalization Policy Optimization for
    Multi-reward RL Optimization" (2026), arXiv 2601.05242, whose sum has no weights; with them,
    TRL's `multi_objective_aggregation="normalize_then_sum"` (its eps is 1e-4).
    """
    if parts.ndim != 2 or weights.shape != parts.shape[1:]:
        raise ValueError(
            f"parts must be [N, K] and weights [K], got {tuple(parts.shape)} and "
            f"{tuple(weights.shape)}"
        )
    groups = listed("group_ids", group_ids, parts[:, 0] if parts.shape[1] else parts.sum(1))
    values = parts.detach().double()
    sums, exact_sums, sizes = values.new_zeros(3, len(values))
    for weight, column in zip(weights.tolist(), values.unbind(1), strict=True):
        present = (~column.isnan()).nonzero().squeeze(1)
        compared_groups = [groups[n] for n in present.tolist()]
        sums[present] += weight * group_advantages(column[present], compared_groups, eps=eps)
        exact = weight * group_advantages(column[present], compared_groups, eps=_NO_EPS)
        exact_sums[present] += exact
        sizes[present] += exact.abs()
    # Of rewards that cancel, rounding and eps leave a residue, which the division by its own
    # deviation would bring to full size.
    sums = sums.masked_fill(exact_sums.abs() <= _RESIDUE * sizes, 0.0)
    n_rewarded = (~values.isnan().all(1)).sum()
    deviation = (sums.square().sum() / (n_rewarded - 1).clamp(min=1)).sqrt()
    return (sums / (deviation + eps).clamp(min=_NO_EPS)).to(parts.dtype)


def token_normalized(
    values: torch.Tensor, tokens: torch.Tensor, *, normalize: bool = True
) -> torch.Tensor:
    """Normalize values of samples by mean and deviation over all tokens of the batch (REINFORCE++).

        μ = Σ_i n_i·x_i / Σ_i n_i;  σ² = Σ_i n_i·(x_i - μ)² / (Σ_i n_i - 1)
        A_i = (x_i - μ) / √(σ² + 1e-8)

    If all values are equal, the result is exactly 0. Without `normalize`, nothing is divided.

    Args:
        values: float `[N]`: rewards, or, for REINFORCE++ with baseline, rewards minus their groups'
            means.
        tokens: `[N]`, n_i: the number of sampled tokens of each sample.

    Returns:
        `[N]`, dtype and device of `values`.

    Source: Hu et al., "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global
    Advantage Normalization" (2025).
    """
    x, n = values.detach().double(), tokens.double()
    # The deviation of equal values is rounding error: dividing by it would give large advantages.
    if not len(x) or x.max() == x.min():
        return torch.zeros_like(values)
    mean, deviation = token_moments(
        n.sum(), (n * x).sum(), lambda mean: (n * (x - mean).square()).sum()
    )
    return ((x - mean) / (deviation if normalize else 1.0)).to(values.dtype)


def token_moments(
    n: torch.Tensor, total: torch.Tensor, squares: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and standard deviation of a value over `n` tokens.

    The variance is divided by n - 1; 1e-8 is added to it before the root is taken.

    Args:
        n: the number of tokens.
        total: the sum of the value over the tokens.
        squares: takes the mean, returns the sum over the tokens of the squared distance to it.
    """
    mean = total / n.clamp(min=1)
    return mean, (squares(mean) / (n - 1).clamp(min=1) + 1e-8).sqrt()


def listed(
    name: str, ids: torch.Tensor | Iterable[Hashable], rewards: torch.Tensor
) -> list[Hashable]:
    """Return ids, one for each of `rewards`, as a list.

    Raises:
        ValueError: the numbers of ids and rewards differ, or the tensor `name` isn't of integers.
    """
    if isinstance(ids, torch.Tensor):
        if ids.is_floating_point() or ids.is_complex():
            raise ValueError(f"{name} must be integers, got {ids.dtype}")
        shape = tuple(ids.shape)
        ids = ids.flatten().tolist()
    else:
        ids = list(ids)
        shape = (len(ids),)
    if shape != tuple(rewards.shape):
        raise ValueError(f"rewards have shape {tuple(rewards.shape)}, {name} {shape}")
    return ids
