"""Advantages of single turns: which of an episode's answers was better than the others.

Turns are the elements of 1-D tensors, those of a trajectory in order of time; trajectories may stand in any order.
"""

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch

from rlinf_vl.algorithms.advantages import group_advantages, listed

Ids = torch.Tensor | Iterable[Hashable]


def discounted_returns(rewards: torch.Tensor, trajectory_ids: Ids, discount: float) -> torch.Tensor:
    """What is paid from each turn on, later rewards for less: G_t = r_t + discount · G_{t+1}.

    Args:
        rewards: float `[N]`, paid for each turn.
        trajectory_ids: `[N]`, whose turn each is: an integer tensor or any hashable values.
        discount: 0 (a turn's own reward counts) … 1 (all later ones, too).

    Returns:
        float64 `[N]`, on the device of `rewards`.

    Raises:
        ValueError: shapes or dtypes don't fit, or the discount is out of range.
    """
    if rewards.ndim != 1 or not rewards.is_floating_point():
        raise ValueError(f"rewards must be a 1-D float tensor, got {rewards.dtype} of shape {tuple(rewards.shape)}")
    if not 0 <= discount <= 1:
        raise ValueError(f"discount must lie in [0, 1], got {discount}")
    trajectories = listed("trajectory_ids", trajectory_ids, rewards)
    after: dict[Hashable, float] = {}
    returns = rewards.detach().double().tolist()
    for t in range(len(returns) - 1, -1, -1):
        returns[t] += discount * after.get(trajectories[t], 0.0)
        after[trajectories[t]] = returns[t]
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
    """Each turn's return against those of the same turn of its group's other trajectories.

        G_{i,t} = Σ_{l≥t} discount^(l-t) · r_{i,l}
        A_{i,t} = (G_{i,t} - mean_j G_{j,t}) / (std_j G_{j,t} + eps)

    Mean and deviation are over the trajectories of the group that have a turn number t. One that alone lasted so long gets
    exactly 0 from there on, as any tie does (`group_advantages`, which has the variants too).

    With one turn per trajectory this is `group_advantages`.

    Args:
        rewards, trajectory_ids, discount: see `discounted_returns`.
        group_ids: `[N]`, the group of each turn's trajectory.
        compare: gets the returns, an id of each turn's group and number, and `options`.

    Returns:
        `[N]`, dtype and device of `rewards`.

    Raises:
        ValueError: as `discounted_returns` and `group_advantages`.

    Sources: Baronio et al., "Kevin: Multi-Turn RL for Generating CUDA Kernels" (2025), where every turn is a sample of its own,
    paid the discounted sum of the scores from there on (theirs is compared with all turns of the group). That only equal turn
    numbers are compared is as in MT-GRPO (Zeng et al., "Reinforcing Multi-Turn Reasoning in LLM Agents via Turn-Level Credit
    Assignment", 2025): later turns have less ahead of them, which is no merit or fault of theirs.
    """
    returns = discounted_returns(rewards, trajectory_ids, discount)
    seen: dict[Hashable, int] = {}
    keys = []
    groups = listed("group_ids", group_ids, rewards)
    for trajectory, group in zip(listed("trajectory_ids", trajectory_ids, rewards), groups, strict=True):
        seen[trajectory] = number = seen.get(trajectory, -1) + 1
        keys.append((group, number))
    return compare(returns, keys, **options).to(rewards.dtype)


def gigpo_advantages(
    rewards: torch.Tensor,
    trajectory_ids: Ids,
    group_ids: Ids,
    states: Iterable[Hashable | None],
    *,
    weight: float,
    discount: float = 1.0,
    **options: Any,
) -> torch.Tensor:
    """GiGPO: how good the episode was in its group, plus how good the turn was among those that answered to the same state.

        A_E(i)   = (R_i - mean_j R_j) / (std_j R_j + eps),  R_i = Σ_t r_{i,t}  over the trajectories j of the group
        A_S(i,t) = (G_{i,t} - mean G) / (std G + eps)       over all turns of the group with the state of turn (i, t)
        A(i,t)   = A_E(i) + weight · A_S(i,t),              G_{i,t} = Σ_{l≥t} discount^(l-t) · r_{i,l}

    A trajectory that came back to a state has several turns in that mean. A state that nobody else answered to, or that has no
    name, adds exactly 0. Without `normalize` both are plain differences, the paper's F_norm = 1.

    Args:
        rewards, trajectory_ids, group_ids, discount: see `turn_advantages`.
        states: `[N]`, the state that each turn answered to; None for one without a name. Equal states of different groups are
            different ones.
        weight: the paper's ω, >= 0 (there: 1, with a discount of 0.95).
        options: of `group_advantages`.

    Returns:
        `[N]`, dtype and device of `rewards`.

    Raises:
        ValueError: as `turn_advantages`; or weight < 0; or a trajectory is in two groups.

    Source: Feng et al., "Group-in-Group Policy Optimization for LLM Agent Training" (2025), equations 3, 6, 7 and 8. Their code
    takes mean and deviation of R over turns, which counts long trajectories more; here it is over trajectories, as in the text.
    """
    if not weight >= 0:
        raise ValueError(f"weight must be >= 0, got {weight}")
    returns = discounted_returns(rewards, trajectory_ids, discount)
    trajectories, groups, named = (
        listed(name, ids, rewards)
        for name, ids in (("trajectory_ids", trajectory_ids), ("group_ids", group_ids), ("states", states))
    )
    pairs = list(dict.fromkeys(zip(trajectories, groups, strict=True)))
    number = {trajectory: n for n, (trajectory, _) in enumerate(pairs)}
    if len(number) < len(pairs):
        raise ValueError("a trajectory is in two groups")
    whose = torch.tensor([number[t] for t in trajectories], dtype=torch.int64, device=rewards.device)
    totals = returns.new_zeros(len(pairs)).index_add(0, whose, rewards.detach().double())
    keys = [
        (t,) if state is None else (group, state) for t, (group, state) in enumerate(zip(groups, named, strict=True))
    ]
    episode = group_advantages(totals, [group for _, group in pairs], **options)[whose]
    return (episode + weight * group_advantages(returns, keys, **options)).to(rewards.dtype)
