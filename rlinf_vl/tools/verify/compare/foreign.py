"""Formulas of other systems that no setting of ours gives: what `variants` tries."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

#: Switches that replace the group advantages of ours by `foreign_advantages`.
ADVANTAGE_SWITCHES = ("std", "eps", "eps_place", "baseline", "ties", "single", "whiten")


def group_means(
    rewards: torch.Tensor, groups: Sequence[Hashable], leave_one_out: bool
) -> torch.Tensor:
    """Return the mean reward of each sample's group; `leave_one_out`: of its other members."""
    means = torch.empty_like(rewards)
    for members in _members(groups):
        total, n = rewards[members].sum(), len(members)
        means[members] = (total - rewards[members]) / max(1, n - 1) if leave_one_out else total / n
    return means


def group_deviations(rewards: torch.Tensor, groups: Sequence[Hashable], kind: str) -> torch.Tensor:
    """Return the standard deviation of each sample's group.

    Args:
        kind: "sample" (n - 1), "population" (n), "batch" (of all samples, n - 1) or "none" (1).
    """
    if kind == "none":
        return torch.ones_like(rewards)
    if kind == "batch":
        return rewards.std().expand_as(rewards) if len(rewards) > 1 else torch.zeros_like(rewards)
    deviations = torch.zeros_like(rewards)
    for members in _members(groups):
        correction = 1 if kind == "sample" else 0
        if len(members) > correction:
            deviations[members] = rewards[members].std(correction=correction)
    return deviations


def foreign_advantages(
    rewards: torch.Tensor, groups: Sequence[Hashable], switches: Mapping[str, Any], ours: dict
) -> torch.Tensor:
    """Return advantages by the switches, and by our own choice where there is no switch.

    Args:
        switches: `std` (see `group_deviations`), `eps`, `eps_place` ("outside", "inside" the root,
            or "max": the larger of deviation and eps), `baseline` ("group", "others", "batch" or
            "none"), `ties` ("noise": float32 arithmetic without a guard), `single` ("reward": a
            group of one keeps its reward), `whiten` (mean 0 and deviation 1 over the samples).
        ours: the switches that are our settings.
    """
    switches = {**ours, **switches}
    # The noise of a tie is that of float32, in which other systems compute rewards.
    values = rewards.float() if switches["ties"] == "noise" else rewards
    baseline, eps = switches["baseline"], switches["eps"]
    if baseline == "batch":
        means = values.mean().expand_as(values)
    elif baseline == "none":
        means = torch.zeros_like(values)
    else:
        means = group_means(values, groups, baseline == "others")
    deviations = group_deviations(values, groups, switches["std"])
    centered = values - means
    if switches["std"] == "none":
        advantages = centered
    elif switches["eps_place"] == "inside":
        advantages = centered / (deviations.square() + eps).sqrt()
    elif switches["eps_place"] == "max":
        advantages = centered / deviations.clamp(min=max(eps, 1e-30))
    else:
        advantages = centered / (deviations + eps).clamp(min=1e-30)
    advantages = advantages.double()
    compared_in_groups = baseline in ("group", "others")
    for members in _members(groups):
        if len(members) == 1 and switches["single"] == "reward":
            advantages[members] = rewards[members]
        elif switches["ties"] == "zero" and compared_in_groups and _tied(rewards[members]):
            advantages[members] = 0.0
    if switches["whiten"] and len(advantages) > 1:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    return advantages


def tied_samples(rewards: torch.Tensor, groups: Sequence[Hashable]) -> torch.Tensor:
    """Return which samples are in a group whose rewards are all equal."""
    tied = torch.zeros(len(rewards), dtype=torch.bool)
    for members in _members(groups):
        tied[members] = _tied(rewards[members])
    return tied


def foreign_loss(
    values: torch.Tensor,
    mask: torch.Tensor,
    segment_ids: torch.Tensor,
    kind: str,
    *,
    micro_batches: Sequence[int],
    width: int,
) -> torch.Tensor:
    """Return a loss by an aggregation that no setting of ours has.

    Args:
        kind: "token-sum"; "padded-mean" (padding counts as tokens); "group-blind-sum" (the sums of
            sequences over all rows, masked ones included); or "micro:MODE", the mean over
            micro-batches of the means of each.
        micro_batches: the micro-batch of each sample.
        width: the longest response.
    """
    total = values.where(mask, 0.0).sum()
    n_samples = len(micro_batches)
    if kind == "token-sum":
        return total
    if kind == "padded-mean":
        return total / max(1, n_samples * width)
    numbers = torch.tensor(micro_batches)
    losses = []
    for number in numbers.unique():
        rows = (numbers == number)[segment_ids] & mask
        sums, counts = _sums(values, rows, segment_ids, n_samples)
        trained = counts > 0
        if kind == "micro:token-mean":
            losses.append(sums.sum() / counts.sum().clamp(min=1))
        else:
            losses.append((sums / counts.clamp(min=1)).sum() / trained.sum().clamp(min=1))
    return torch.stack(losses).mean()


def shifted(values: torch.Tensor, segment_ids: torch.Tensor, places: int) -> torch.Tensor:
    """Return the values of each sample moved by `places` tokens; what enters is 0 (or False)."""
    moved = torch.roll(values, places, 0)
    same = torch.roll(segment_ids, places) == segment_ids
    edge = torch.arange(len(values))
    same &= edge >= places if places > 0 else edge < len(values) + places
    same = same.reshape(-1, *[1] * (values.ndim - 1))
    return torch.where(same, moved, torch.zeros_like(values))


def _sums(
    values: torch.Tensor, mask: torch.Tensor, segment_ids: torch.Tensor, n: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sums and counts of each sample's masked values."""
    zeros = torch.zeros(n, dtype=values.dtype)
    sums = zeros.index_add(0, segment_ids, values.where(mask, 0.0))
    return sums, zeros.index_add(0, segment_ids, mask.to(values.dtype))


def _members(groups: Sequence[Hashable]) -> list[torch.Tensor]:
    """Return the sample numbers of each group."""
    numbers: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        numbers.setdefault(group, []).append(index)
    return [torch.tensor(members) for members in numbers.values()]


def _tied(rewards: torch.Tensor) -> bool:
    return bool(rewards.max() == rewards.min())
