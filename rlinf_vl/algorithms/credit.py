"""Advantages of single turns of multi-turn episodes.

Turns are the elements of 1-D tensors. The turns of one trajectory stand in order of time; turns of
different trajectories may be interleaved.
"""

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch

from rlinf_vl.algorithms.advantages import group_advantages, listed

Ids = torch.Tensor | Iterable[Hashable]


def discounted_returns(rewards: torch.Tensor, trajectory_ids: Ids, discount: float) -> torch.Tensor:
    """Return the discounted return of each turn: G_t = r_t + discount · G_{t+1}.

    Args:
        rewards: float `[N]`, the reward of each turn.
        trajectory_ids: `[N]`, the trajectory of each turn: an integer tensor or any hashable
            values.
        discount: 0 (only a turn's own reward counts) … 1 (later rewards count in full).

    Returns:
        float64 `[N]`, on the device of `rewards`.

    Raises:
        ValueError: shapes or dtypes don't fit, or the discount is out of range.
    """
    if rewards.ndim != 1 or not rewards.is_floating_point():
        raise ValueError(
            f"rewards must be a 1-D float tensor, got {rewards.dtype} of shape "
            f"{tuple(rewards.shape)}"
        )
    if not 0 <= discount <= 1:
        raise ValueError(f"discount must lie in [0, 1], got {discount}")
    trajectories = listed("trajectory_ids", trajectory_ids, rewards)
    # Backward in time; one next return per trajectory, since trajectories may be interleaved.
    next_returns: dict[Hashable, float] = {}
    returns = rewards.detach().double().tolist()
    for t in range(len(returns) - 1, -1, -1):
        returns[t] += discount * next_returns.get(trajectories[t], 0.0)
        next_returns[trajectories[t]] = returns[t]
    return torch.tensor(returns, dtype=torch.float64, device=rewards.device)


def turn_advantages(
    rewards: torch.Tensor,
    trajectory_ids: Ids,
    group_ids: Ids,
    *,
    discount: float = 1.0,
    compare: Callable[..., torch.Tensor] = group_advantages,
    **options: Any,
) -> torch.Tensor:
    """Compare each turn's return with those of the same turn of its group's other trajectories.

        G_{i,t} = Σ_{l≥t} discount^(l-t) · r_{i,l}
        A_{i,t} = (G_{i,t} - mean_j G_{j,t}) / (std_j G_{j,t} + eps)

    Mean and deviation are over the trajectories of the group that have a turn number t. A turn
    that no other trajectory reached gets exactly 0, like any tie. `compare` and its options choose
    other baselines (see `group_advantages`).

    With one turn per trajectory this is `group_advantages`.

    Args:
        rewards, trajectory_ids, discount: see `discounted_returns`.
        group_ids: `[N]`, the group of each turn's trajectory.
        compare: computes the advantages; called with the returns, an id of each turn's group and
            turn number, and `options`.

    Returns:
        `[N]`, dtype and device of `rewards`.

    Raises:
        ValueError: see `discounted_returns` and `group_advantages`.

    Sources: Baronio et al., "Kevin: Multi-Turn RL for Generating CUDA Kernels" (2025), where every
    turn is a sample of its own, with the discounted sum of the scores from there on as its reward,
    compared with all turns of the group. Here, as in MT-GRPO (Zeng et al., "Reinforcing Multi-Turn
    Reasoning in LLM Agents via Turn-Level Credit Assignment", 2025), only turns of the same number
    are compared: a later turn has fewer rewards ahead of it, which says nothing of its quality.
    """
    returns = discounted_returns(rewards, trajectory_ids, discount)
    # Turns are compared if both their group and their number are equal.
    last_turns: dict[Hashable, int] = {}
    keys = []
    groups = listed("group_ids", group_ids, rewards)
    for trajectory, group in zip(
        listed("trajectory_ids", trajectory_ids, rewards), groups, strict=True
    ):
        last_turns[trajectory] = turn_number = last_turns.get(trajectory, -1) + 1
        keys.append((group, turn_number))
    return compare(returns, keys, **options).to(rewards.dtype)


def process_advantages(
    values: torch.Tensor,
    positions: torch.Tensor,
    trajectory_ids: torch.Tensor,
    group_ids: Ids,
    tokens: torch.Tensor,
    *,
    compare: Callable[..., torch.Tensor] = group_advantages,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    """Return the advantage of each token from rewards of single tokens (process supervision).

        ṽ_j = (v_j - mean v) / (std v + eps)
        A_{i,t} = Σ_{j of trajectory i, at token t or later} ṽ_j

    Mean and deviation are over all rewards of tokens of the group. `compare` and its options choose
    other baselines (see `group_advantages`).

    Args:
        values: float `[K]`, the rewards.
        positions: int64 `[K]`, the token of each reward, counted in its trajectory from 0 on.
        trajectory_ids: int64 `[K]`, the trajectory of each reward, 0 … N-1.
        group_ids: `[K]`, the group of each reward.
        tokens: int64 `[N]`, the number of tokens of each trajectory.

    Returns:
        For each of the N trajectories the advantages of its tokens, float64.

    Raises:
        ValueError: see `group_advantages`.

    Source: Shao et al., "DeepSeekMath" (2024), section 4.1.3.
    """
    compared = compare(values, group_ids, **options).double()
    starts = tokens.cumsum(0) - tokens
    rewards = torch.zeros(int(tokens.sum()), dtype=torch.float64)
    rewards.index_add_(0, starts[trajectory_ids] + positions, compared)
    return tuple(part.flip(0).cumsum(0).flip(0) for part in rewards.split(tokens.tolist()))


def gigpo_advantages(
    rewards: torch.Tensor,
    trajectory_ids: Ids,
    group_ids: Ids,
    states: Iterable[Hashable | None],
    *,
    weight: float,
    discount: float = 1.0,
    compare: Callable[..., torch.Tensor] = group_advantages,
    **options: Any,
) -> torch.Tensor:
    """Return GiGPO advantages: the episode's in its group plus the turn's among turns of one state.

        A(i,t)   = A_E(i) + weight · A_S(i,t)
        A_E(i)   = (R_i - mean_j R_j) / (std_j R_j + eps)
        A_S(i,t) = (G_{i,t} - mean G) / (std G + eps)
        R_i      = Σ_t r_{i,t};  G_{i,t} = Σ_{l≥t} discount^(l-t) · r_{i,l}

    Mean and deviation of R are over the trajectories j of the group; those of G are over all turns
    of the group in the state of turn (i, t).

    A trajectory that returned to a state has several turns in the mean G. If a state has one turn
    only, or no name, A_S is exactly 0. Without `normalize`, both terms are plain differences: the
    paper's F_norm = 1.

    Args:
        rewards, trajectory_ids, group_ids, discount: see `turn_advantages`.
        states: `[N]`, the name of the state in which each turn was taken, or None. Equal names in
            different groups are different states.
        weight: the paper's ω, >= 0 (in the paper 1, with a discount of 0.95).
        compare, options: see `turn_advantages`.

    Returns:
        `[N]`, dtype and device of `rewards`.

    Raises:
        ValueError: see `turn_advantages`; or weight < 0; or a trajectory is in two groups.

    Source: Feng et al., "Group-in-Group Policy Optimization for LLM Agent Training" (2025),
    equations 3, 6, 7 and 8. Their code takes mean and deviation of R over turns, which counts long
    trajectories more; here, as in the paper's text, they are over trajectories.
    """
    if not weight >= 0:
        raise ValueError(f"weight must be >= 0, got {weight}")
    returns = discounted_returns(rewards, trajectory_ids, discount)
    trajectories, groups, state_names = (
        listed(name, ids, rewards)
        for name, ids in (
            ("trajectory_ids", trajectory_ids),
            ("group_ids", group_ids),
            ("states", states),
        )
    )
    pairs = list(dict.fromkeys(zip(trajectories, groups, strict=True)))
    trajectory_numbers = {trajectory: n for n, (trajectory, _) in enumerate(pairs)}
    if len(trajectory_numbers) < len(pairs):
        raise ValueError("a trajectory is in two groups")
    trajectory_index = torch.tensor(
        [trajectory_numbers[t] for t in trajectories], dtype=torch.int64, device=rewards.device
    )
    # One total per trajectory: each counts once in the episode's mean, however many turns it has.
    totals = returns.new_zeros(len(pairs)).index_add(0, trajectory_index, rewards.detach().double())
    # A turn without a state's name is a group of its own, and so adds exactly 0. Its key, a
    # 1-tuple, never equals a pair of group and state.
    keys = [
        (t,) if state is None else (group, state)
        for t, (group, state) in enumerate(zip(groups, state_names, strict=True))
    ]
    episode = compare(totals, [group for _, group in pairs], **options)[trajectory_index]
    return (episode + weight * compare(returns, keys, **options)).to(rewards.dtype)
