"""Advantages from rewards."""

from collections.abc import Hashable, Iterable

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
