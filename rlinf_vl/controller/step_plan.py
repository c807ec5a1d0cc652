"""From a rollout's summaries to what each rank trains: a pure function of numbers, no tokens and no tensors on devices."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlinf_vl.actor.batches import RankMiniBatch
from rlinf_vl.algorithms import gigpo_advantages, group_advantages, turn_advantages
from rlinf_vl.config.schema import AlgorithmConfig
from rlinf_vl.errors import RunError
from rlinf_vl.packing.planner import Item, plan_micro_batches
from rlinf_vl.types import GroupSummary, Prices


@dataclass(frozen=True, slots=True)
class StepPlan:
    minibatches: tuple[tuple[RankMiniBatch, ...], ...]  #: by number and share of the trajectories (`Mesh.data_rank`)
    #: Of each turn of each trajectory of each group; 0 where it is not trained on.
    advantages: tuple[tuple[tuple[float, ...], ...], ...]
    metrics: dict[str, float]


def trainable(summary: GroupSummary) -> list[int]:
    """Trajectories of a group that carry loss: no error, and at least one sampled token."""
    return [i for i, error in enumerate(summary.errors) if error is None and summary.response_tokens[i] > 0]


def advantages_of(
    summaries: Sequence[GroupSummary], algorithm: AlgorithmConfig
) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """Advantage of each turn of each trajectory, as `algorithm` says, among the trajectories of its group that carry loss; 0 for
    the others.

    Raises:
        RunError: states are to be compared, and no turn has one.
    """
    trained = [(g, i) for g, summary in enumerate(summaries) for i in trainable(summary)]
    turns = [(g, i, k) for g, i in trained for k in range(len(summaries[g].turn_rewards[i]))]
    rewards = torch.tensor([summaries[g].turn_rewards[i][k] for g, i, k in turns], dtype=torch.float64)
    whose, groups = [(g, i) for g, i, _ in turns], [g for g, _, _ in turns]
    options: Any = {"normalize": algorithm.normalize_advantages, "leave_one_out": algorithm.adv_type == "rloo"}
    weight, discount = algorithm.state_advantage_weight, algorithm.turn_discount
    if algorithm.credit == "turn":
        values = turn_advantages(rewards, whose, groups, discount=discount, **options).tolist()
    elif weight:
        states = [summaries[g].turn_states[i][k] or None for g, i, k in turns]
        if turns and not any(states):
            raise RunError(
                f"algorithm.state_advantage_weight: {weight:g} compares turns that answer to the same state, but the environment "
                "names none (`state` in StepResult.info); name them there, or set it 0"
            )
        values = gigpo_advantages(rewards, whose, groups, states, weight=weight, discount=discount, **options).tolist()
    else:
        totals = torch.tensor([summaries[g].rewards[i] for g, i in trained], dtype=torch.float64)
        found = group_advantages(totals, [g for g, _ in trained], **options).tolist()
        of_trajectory = dict(zip(trained, found, strict=True))
        values = [of_trajectory[trajectory] for trajectory in whose]
    out = [[[0.0] * len(tokens) for tokens in summary.turn_tokens] for summary in summaries]
    for (g, i, k), value in zip(turns, values, strict=True):
        out[g][i][k] = value
    return tuple(tuple(map(tuple, row)) for row in out)


def item_of(group: int, index: int, summary: GroupSummary) -> Item:
    """A trajectory as the planner sees it."""
    prompt = summary.prompt_tokens
    return Item(group, index, prompt, summary.tokens[index] - prompt, summary.response_tokens[index], summary.patches)


def plan_step(
    summaries: Sequence[GroupSummary],
    algorithm: AlgorithmConfig,
    *,
    ranks: int,
    budget: int,
    micro_batch_size: int | None,
    share_prompts: bool = True,
    prices: Prices = Prices(),  # noqa: B008 (frozen)
) -> StepPlan:
    """Split a rollout into mini-batches of whole groups, and each into micro-batches for every rank.

    The loss denominators are global: all response tokens of the mini-batch for `token-mean`, all its sequences for the
    `seq-*` modes, trajectories or their turns. `share_prompts` and `prices` are `plan_micro_batches`'.
    """
    minibatches, plans = [], []
    for part in np.array_split(np.arange(len(summaries)), algorithm.n_minibatches):
        items = [item_of(int(g), i, summaries[g]) for g in part for i in trainable(summaries[g])]
        plan = plan_micro_batches(
            items, ranks=ranks, budget=budget, size=micro_batch_size, share_prompts=share_prompts, prices=prices
        )
        tokens = [n for item in items for n in summaries[item.group].turn_tokens[item.index] if n]
        sequences = len(tokens) if algorithm.turns_are_sequences else len(items)
        denominator = max(1, sum(tokens) if algorithm.loss_agg_func == "token-mean" else sequences)
        minibatches.append(tuple(RankMiniBatch(micro, plan.run_vision, denominator) for micro in plan.micro_batches))
        plans.append(plan)
    metrics = {}
    for name in ("fill", "imbalance", "repeated"):
        metrics[f"packing/{name}"] = float(np.mean([getattr(plan, name) for plan in plans]))
    metrics["packing/micro_batches"] = float(sum(plan.steps for plan in plans))
    if algorithm.state_advantage_weight:
        metrics["reward/shared_states"] = shared_states(summaries)
    return StepPlan(tuple(minibatches), advantages_of(summaries, algorithm), metrics)


def shared_states(summaries: Sequence[GroupSummary]) -> float:
    """Share of the turns that are trained on whose state another turn of their group answered to."""
    turns = [(g, state) for g, s in enumerate(summaries) for i in trainable(s) for state in s.turn_states[i]]
    seen = Counter(turns)
    return sum(bool(state) and seen[g, state] > 1 for g, state in turns) / max(1, len(turns))
