"""Advantages from rewards."""

from collections.abc import Callable, Hashable, Iterable

import torch


def group_advantages(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | Iterable[Hashable],
    *,
    normalize: bool = True,
    leave_one_out: bool = False,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Reward against a baseline of its group: the mean (GRPO), or the mean of the other rewards (RLOO).

        A_i = r_i - mean = r_i - (Σ_j r_j) / n
        leave_one_out:  A_i = r_i - (Σ_{j≠i} r_j) / (n - 1) = (r_i - mean) · n / (n - 1)
        normalize:      A_i / (std + eps),  std with n - 1

    A group whose rewards all tie, a group of one included, gets exactly 0: ties are found by max == min, since the mean
    of n equal float32 numbers need not be that number.

    Args:
        rewards: float `[N]`, finite.
        group_ids: `[N]`, which group each reward belongs to: an integer tensor or any hashable values, in any order.

    Returns:
        `[N]`, dtype and device of `rewards`.

    Raises:
        ValueError: shapes differ, dtypes are wrong, or a reward is not finite.

    Sources: Shao et al., "DeepSeekMath" (2024), section 4.1; without the division, Liu et al., "Understanding R1-Zero-Like
    Training" (2025); Ahmadian et al., "Back to Basics: Revisiting REINFORCE Style Optimization" (2024) for RLOO.
    """
    if rewards.ndim != 1 or not rewards.is_floating_point():
        raise ValueError(f"rewards must be a 1-D float tensor, got {rewards.dtype} of shape {tuple(rewards.shape)}")
    groups = listed("group_ids", group_ids, rewards)
    number: dict[Hashable, int] = {}
    index = torch.tensor([number.setdefault(g, len(number)) for g in groups], dtype=torch.int64)
    if not torch.isfinite(rewards).all():
        raise ValueError(f"rewards must be finite, got {rewards[~torch.isfinite(rewards)].tolist()}")

    r, index = rewards.detach().double(), index.to(rewards.device)
    zeros = r.new_zeros(len(number))
    count = zeros.index_add(0, index, torch.ones_like(r))
    centered = r - (zeros.index_add(0, index, r) / count)[index]
    others = (count - 1).clamp(min=1)
    advantages = centered * (count / others)[index] if leave_one_out else centered
    if normalize:
        variance = zeros.index_add(0, index, centered.square()) / others
        advantages = advantages / (variance.sqrt()[index] + eps)
    highest = zeros.scatter_reduce(0, index, r, "amax", include_self=False)
    lowest = zeros.scatter_reduce(0, index, r, "amin", include_self=False)
    tied = (highest == lowest)[index]
    return advantages.masked_fill(tied, 0.0).to(rewards.dtype)


def token_normalized(values: torch.Tensor, tokens: torch.Tensor, *, normalize: bool = True) -> torch.Tensor:
    """REINFORCE++: values of samples against mean and deviation over all tokens of the batch.

        μ = Σ_i n_i·x_i / Σ_i n_i;  σ² = Σ_i n_i·(x_i - μ)² / (Σ_i n_i - 1);  A_i = (x_i - μ) / √(σ² + 1e-8)

    Values that all tie get exactly 0. Without `normalize`, nothing is divided.

    Args:
        values: float `[N]`: rewards, or rewards minus their groups' means (REINFORCE++ with baseline).
        tokens: `[N]`, n_i: sampled tokens of each.

    Returns:
        `[N]`, dtype and device of `values`.

    Source: Hu et al., "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization" (2025).
    """
    x, n = values.detach().double(), tokens.double()
    if not len(x) or x.max() == x.min():
        return torch.zeros_like(values)
    mean, deviation = token_moments(n.sum(), (n * x).sum(), lambda mean: (n * (x - mean).square()).sum())
    return ((x - mean) / (deviation if normalize else 1.0)).to(values.dtype)


def token_moments(
    n: torch.Tensor, total: torch.Tensor, squares: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation (n - 1, with 1e-8 below the root) over `n` tokens; `squares` sums their squared distances to the mean."""
    mean = total / n.clamp(min=1)
    return mean, (squares(mean) / (n - 1).clamp(min=1) + 1e-8).sqrt()


def advantages(
    kind: str | Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    rewards: torch.Tensor,
    group_ids: torch.Tensor | Iterable[Hashable],
    tokens: torch.Tensor,
    *,
    normalize: bool,
) -> torch.Tensor:
    """The advantages that `algorithm.adv_type` names, or that a function `(rewards, group_ids, tokens)` returns.

    Args:
        rewards, group_ids: see `group_advantages`. A function gets group ids as int64 numbers from 0 on, by first appearance.
        tokens: int64 `[N]`, sampled tokens of each.

    Returns:
        `[N]`, dtype and device of `rewards`.

    Raises:
        ValueError: as `group_advantages`; or a function's result isn't one finite number for each reward.
    """
    if callable(kind):
        number: dict[Hashable, int] = {}
        index = torch.tensor([number.setdefault(g, len(number)) for g in listed("group_ids", group_ids, rewards)])
        found = torch.as_tensor(kind(rewards.clone(), index, tokens.clone())).to(rewards)
        if found.shape != rewards.shape or not torch.isfinite(found).all():
            raise ValueError(f"must return {len(rewards)} finite numbers, one for each reward; returned {found}")
        return found.detach()
    if kind == "reinforce_plus_plus":
        return token_normalized(rewards, tokens, normalize=normalize)
    if kind == "reinforce_plus_plus_baseline":
        centered = group_advantages(rewards, group_ids, normalize=False)
        return token_normalized(centered, tokens, normalize=normalize)
    return group_advantages(rewards, group_ids, normalize=normalize, leave_one_out=kind == "rloo")


def listed(name: str, ids: torch.Tensor | Iterable[Hashable], rewards: torch.Tensor) -> list[Hashable]:
    """One id for each of `rewards`; ValueError if there are more or fewer, or `name` is a tensor of other than integers."""
    if isinstance(ids, torch.Tensor):
        if ids.is_floating_point() or ids.is_complex():
            raise ValueError(f"{name} must be integers, got {ids.dtype}")
        found = tuple(ids.shape)
        ids = ids.flatten().tolist()
    else:
        ids = list(ids)
        found = (len(ids),)
    if found != tuple(rewards.shape):
        raise ValueError(f"rewards have shape {tuple(rewards.shape)}, {name} {found}")
    return ids
