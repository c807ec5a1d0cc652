"""From a rollout's summaries to what each rank trains: a pure function of numbers, no tokens and no tensors on devices."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlinf_vl.actor.batches import RankMiniBatch
from rlinf_vl.algorithms import group_advantages
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
    summaries: Sequence[GroupSummary], *, normalize: bool, leave_one_out: bool = False
) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """Advantage of each turn of each trajectory: the trajectory's in its group, among those that carry loss; 0 for the others."""
    trained = [(g, i) for g, summary in enumerate(summaries) for i in trainable(summary)]
    rewards = torch.tensor([summaries[g].rewards[i] for g, i in trained], dtype=torch.float64)
    values = group_advantages(rewards, [g for g, _ in trained], normalize=normalize, leave_one_out=leave_one_out)
    out = [[0.0] * len(summary.rewards) for summary in summaries]
    for (g, i), value in zip(trained, values.tolist(), strict=True):
        out[g][i] = value
    turns = (zip(row, summary.turn_tokens, strict=True) for row, summary in zip(out, summaries, strict=True))
    return tuple(tuple((value,) * len(tokens) for value, tokens in row) for row in turns)


def item_of(group: int, index: int, summary: GroupSummary) -> Item:
    """A trajectory as the planner sees it."""
    prompt = summary.prompt_tokens
    return Item(group, index, prompt, summary.tokens[index] - prompt, summary.response_tokens[index], summary.patches)


def plan_step(
    summaries: Sequence[GroupSummary],
    *,
    ranks: int,
    n_minibatches: int,
    budget: int,
    micro_batch_size: int | None,
    normalize_advantages: bool,
    leave_one_out: bool = False,
    aggregation: str,
    share_prompts: bool = True,
    prices: Prices = Prices(),  # noqa: B008 (frozen)
) -> StepPlan:
    """Split a rollout into mini-batches of whole groups, and each into micro-batches for every rank.

    The loss denominators are global: all response tokens of the mini-batch for `token-mean`, all its sequences for the
    `seq-*` modes. `share_prompts` and `prices` are `plan_micro_batches`'.
    """
    minibatches, plans = [], []
    for part in np.array_split(np.arange(len(summaries)), n_minibatches):
        items = [item_of(int(g), i, summaries[g]) for g in part for i in trainable(summaries[g])]
        plan = plan_micro_batches(
            items, ranks=ranks, budget=budget, size=micro_batch_size, share_prompts=share_prompts, prices=prices
        )
        tokens = sum(item.loss_tokens for item in items)
        denominator = max(1, tokens if aggregation == "token-mean" else len(items))
        minibatches.append(tuple(RankMiniBatch(micro, plan.run_vision, denominator) for micro in plan.micro_batches))
        plans.append(plan)
    metrics = {}
    for name in ("fill", "imbalance", "repeated"):
        metrics[f"packing/{name}"] = float(np.mean([getattr(plan, name) for plan in plans]))
    metrics["packing/micro_batches"] = float(sum(plan.steps for plan in plans))
    advantages = advantages_of(summaries, normalize=normalize_advantages, leave_one_out=leave_one_out)
    return StepPlan(tuple(minibatches), advantages, metrics)
