"""The plan of a step: from a rollout's summaries to the micro-batches and advantages of every rank.
A pure function of numbers, without tokens and without tensors on devices."""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from rlinf_vl.actor.batch_types import RankMiniBatch, TurnKl
from rlinf_vl.algorithms import (
    advantages,
    discounted_returns,
    gigpo_advantages,
    turn_advantages,
)
from rlinf_vl.algorithms.estimators import (
    Estimator,
    estimated,
    takes_inputs,
    token_kl_of,
)
from rlinf_vl.algorithms.measurements import Measurements
from rlinf_vl.config.schema import AlgorithmConfig
from rlinf_vl.controller.turns import Advantages, Turns, as_double, reward_parts, trainable
from rlinf_vl.errors import RunError
from rlinf_vl.packing.planner import Item, Plan, plan_micro_batches
from rlinf_vl.types import GroupSummary, Prices

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The plan of a step.

    Attributes:
        minibatches: by number of the mini-batch and share of the trajectories (`Mesh.data_rank`).
        advantages: by group, trajectory and turn, or by token of a turn; 0 for a trajectory that is
            not trained on.
        kl_scale: see `advantages_of`.
    """

    minibatches: tuple[tuple[RankMiniBatch, ...], ...]
    advantages: Advantages
    metrics: dict[str, float]
    kl_scale: float = 0.0


def ties(summary: GroupSummary, reward_weights: Sequence[float] | None = None) -> bool:
    """Return whether all rewards of a group are equal, so that comparing them teaches nothing.

    With `reward_weights`, the weights of `reward.functions`, each function's values are compared
    on their own (GDPO): equal sums may be of different values. Different rewards of single tokens
    are no tie either.
    """
    compared = [summary.trajectories[i] for i in trainable(summary)]
    if len({value for t in compared for _, _, value in t.token_rewards}) > 1:
        return False
    if reward_weights is None:
        return len({trajectory.reward for trajectory in compared}) < 2
    rows = [reward_parts(trajectory, reward_weights) for trajectory in compared]
    return all(map(_is_tied, zip(*rows, strict=True)))


def _is_tied(values: Sequence[float]) -> bool:
    """Return whether the values of a reward function, NaN where it gave none, are all equal."""
    return len({value for value in values if not math.isnan(value)}) < 2


def overlong_penalty(tokens: int, algorithm: AlgorithmConfig) -> float:
    """Return DAPO's soft punishment of a response, >= 0. It grows from 0 at max_new_tokens - buffer
    to `penalty` at max_new_tokens (Yu et al., 2025, equation 13)."""
    overlong, longest = algorithm.overlong, algorithm.sampling_params.max_new_tokens or 0
    share = max(0, tokens + overlong.buffer - longest) / max(1, overlong.buffer)
    return overlong.penalty * min(1.0, share) if overlong.buffer else 0.0


def advantages_of(
    summaries: Sequence[GroupSummary],
    algorithm: AlgorithmConfig,
    kl: TurnKl | None = None,
    estimator: Estimator | None = None,
    reward_weights: Sequence[float] = (1.0,),
    step: int = 0,
    measurements: Measurements | None = None,
) -> tuple[Advantages, float]:
    """Return the advantage of each turn of each trajectory, and the `kl_scale` of the per-token KL.

    Advantages compare the trajectories of a group that carry loss (`algorithm.adv_type`); the
    others get 0. Rewards are reduced by `algorithm.overlong`'s penalty and, with `kl`, by kl_beta
    times the KL of the turn. An estimator with `token_kl` gives every token its own return
    instead: the KL of the tokens from this one to the trajectory's end, times `kl_scale`, is yet to
    be subtracted from its advantage. In all other cases `kl_scale` is 0.

    Args:
        kl: by (group, trajectory), the sums of KL of each turn.
        estimator: the user's code that `algorithm.adv_type` names.
        reward_weights: the weights of `reward.functions`, for `reward_normalization: per_reward`,
            which normalizes their values one by one.
        step: the number of the step, for the estimator.
        measurements: gets what the estimator logs.

    Raises:
        RunError: states are to be compared, and no turn has one; or the estimator fails, or its
            result can't be used.
    """
    discount, normalize = algorithm.turn_discount, bool(algorithm.normalize_advantages)
    kind, kl_scale = estimator or algorithm.adv_type, 0.0
    token_kl = token_kl_of(kind) if kl is not None else None
    turns = Turns(summaries)
    sees_all = estimator is not None and takes_inputs(estimator)
    if not sees_all:
        turns.check_token_rewards(algorithm.credit)
    kl_sums = turns.kl_sums(kl)
    penalties = as_double([overlong_penalty(n, algorithm) for n in turns.tokens.tolist()])
    if token_kl is None:
        penalties = penalties + algorithm.kl_beta * kl_sums[:, 0]
    rewards, totals = turns.rewards - penalties, turns.totals(penalties)
    compare = partial(_estimated, kind, tokens=turns.tokens, normalize=normalize)
    if algorithm.reward_normalization == "per_reward":
        # The rules of the config refuse it with whatever changes the sum of the rewards.
        assert kl is None and not algorithm.turns_are_sequences and not algorithm.overlong.buffer
        values = turns.decoupled_advantages(reward_weights)
    elif token_kl is not None:
        returns = (
            discounted_returns(rewards, turns.trajectories, discount)
            if algorithm.credit == "turn"
            else totals[turns.numbers]
        )
        values, kl_scale = token_kl(
            returns,
            turns.tokens,
            kl_sums[:, 1],
            kl_sums[:, 2],
            beta=algorithm.kl_beta,
            normalize=normalize,
        )
    elif estimator is not None and sees_all:
        # It compares by itself, so `credit` only says what a sequence is.
        inputs = turns.estimator_inputs(rewards, totals, step, normalize)
        values = _called(estimator, lambda: estimated(estimator, inputs)) if len(totals) else totals
        if measurements is not None:
            measurements |= inputs.measurements
    else:
        values = _by_credit(turns, rewards, totals, algorithm, compare)
    return turns.by_group(values, summaries), kl_scale


def _by_credit(
    turns: Turns,
    rewards: torch.Tensor,
    totals: torch.Tensor,
    algorithm: AlgorithmConfig,
    compare: Callable[..., torch.Tensor],
) -> torch.Tensor | Sequence[torch.Tensor]:
    """Return the values of turns, or of tokens, that `algorithm.credit` gives.

    Args:
        rewards, totals: by turn and by trajectory.
        compare: the estimator, called with values, their groups and `tokens`.
    """
    groups, lengths = turns.groups_of_trajectories, turns.lengths_of_trajectories
    if algorithm.credit == "token":
        return turns.token_advantages(compare(totals, groups, tokens=lengths), compare)
    if algorithm.credit == "turn":
        return turn_advantages(
            rewards,
            turns.trajectories,
            turns.groups,
            discount=algorithm.turn_discount,
            compare=compare,
        )
    if weight := algorithm.state_advantage_weight:
        return gigpo_advantages(
            rewards,
            turns.trajectories,
            turns.groups,
            turns.states(weight),
            weight=weight,
            discount=algorithm.turn_discount,
            compare=compare,
        )
    return compare(totals, groups, tokens=lengths)[turns.numbers]


def _estimated(
    kind: str | Estimator, rewards: torch.Tensor, group_ids: Any, **options: Any
) -> torch.Tensor:
    """Call `advantages`; raises RunError if code of the user fails in it."""
    if not callable(kind):
        return advantages(kind, rewards, group_ids, **options)
    return _called(kind, lambda: advantages(kind, rewards, group_ids, **options))


def _called(estimator: Estimator, call: Callable[[], Result]) -> Result:
    """Return the result of a call of the user's estimator; raises RunError if it fails."""
    try:
        return call()
    except Exception as error:  # code of the user may raise anything
        name = getattr(estimator, "__name__", "the code")
        raise RunError(
            f"algorithm.adv_type: {name} failed: {type(error).__name__}: {error}"
        ) from error


def item_of(group: int, index: int, summary: GroupSummary) -> Item:
    """Return a trajectory in the form of the planner."""
    prompt, trajectory = summary.prompt_tokens, summary.trajectories[index]
    return Item(
        group,
        index,
        prompt,
        trajectory.tokens - prompt,
        trajectory.response_tokens,
        summary.patches,
    )


def minibatch_groups(
    n_groups: int, n_minibatches: int, shuffle_key: str | None
) -> list[np.ndarray]:
    """Return the group numbers of each mini-batch, int64 arrays of about equal length.

    Groups come sorted by the step that requested them. Split in that order, the first optimizer
    step would get all stale groups, which are the long ones, too. So they are shuffled, with
    `shuffle_key` as the seed: the same key gives the same split, in a resumed run as well. None
    keeps their order.
    """
    groups = np.arange(n_groups)
    if n_minibatches > 1 and shuffle_key is not None:
        seed = int.from_bytes(
            hashlib.blake2b(shuffle_key.encode(), digest_size=8).digest(), "little"
        )
        groups = np.random.default_rng(seed).permutation(n_groups)
    return [np.sort(minibatch) for minibatch in np.array_split(groups, n_minibatches)]


def plan_step(
    summaries: Sequence[GroupSummary],
    algorithm: AlgorithmConfig,
    *,
    ranks: int,
    budget: int,
    micro_batch_size: int | None,
    share_prompts: bool = True,
    prices: Prices = Prices(),  # noqa: B008 (frozen)
    estimator: Estimator | None = None,
    reward_weights: Sequence[float] = (1.0,),
    shuffle_key: str | None = None,
    step: int = 0,
) -> StepPlan:
    """Split a rollout into mini-batches of whole groups, and each into micro-batches for every
    rank.

    The loss denominators are global: all response tokens of the mini-batch for `token-mean`, all
    its sequences for the `seq-*` modes, trajectories or their turns (times max_new_tokens for
    `seq-mean-token-sum-norm`). `shuffle_key` is `minibatch_groups`', `share_prompts` and `prices`
    are `plan_micro_batches`', `estimator`, `reward_weights` and `step` are `advantages_of`'s. With a KL
    in the reward, the advantages are not yet those to train on (`with_kl`).
    """
    minibatches, plans = [], []
    for groups in minibatch_groups(len(summaries), algorithm.n_minibatches, shuffle_key):
        # With `overlong.filter`, responses that were cut are compared, but carry no loss.
        items = [
            item_of(int(g), i, summaries[g])
            for g in groups
            for i in trainable(summaries[g], algorithm.overlong.filter)
        ]
        plan = plan_micro_batches(
            items,
            ranks=ranks,
            budget=budget,
            size=micro_batch_size,
            share_prompts=share_prompts,
            prices=prices,
        )
        trained = [summaries[item.group].trajectories[item.index] for item in items]
        tokens = [n for trajectory in trained for n in trajectory.turn_tokens if n]
        sequences = len(tokens) if algorithm.turns_are_sequences else len(items)
        denominator = max(1, sum(tokens) if algorithm.loss_agg_func == "token-mean" else sequences)
        if algorithm.loss_agg_func == "seq-mean-token-sum-norm":
            assert algorithm.sampling_params.max_new_tokens is not None
            denominator *= algorithm.sampling_params.max_new_tokens
        minibatches.append(
            tuple(
                RankMiniBatch(micro, plan.run_vision, denominator) for micro in plan.micro_batches
            )
        )
        plans.append(plan)
    metrics = _plan_metrics(plans, summaries, algorithm)
    logged = Measurements()
    step_advantages, _ = advantages_of(
        summaries,
        algorithm,
        estimator=estimator,
        reward_weights=reward_weights,
        step=step,
        measurements=logged,
    )
    return StepPlan(tuple(minibatches), step_advantages, metrics | logged_metrics(logged))


def _plan_metrics(
    plans: Sequence[Plan], summaries: Sequence[GroupSummary], algorithm: AlgorithmConfig
) -> dict[str, float]:
    """Return the metrics of packing, and of what changes rewards."""
    metrics = {}
    for name in ("fill", "imbalance", "repeated"):
        metrics[f"packing/{name}"] = float(np.mean([getattr(plan, name) for plan in plans]))
    metrics["packing/micro_batches"] = float(sum(plan.steps for plan in plans))
    if algorithm.state_advantage_weight:
        metrics["reward/shared_states"] = shared_states(summaries)
    if algorithm.overlong.buffer:
        turns = [n for s in summaries for i in trainable(s) for n in s.trajectories[i].turn_tokens]
        metrics["reward/overlong_penalty"] = float(
            np.mean([overlong_penalty(n, algorithm) for n in turns] or [0.0])
        )
    return metrics


def with_kl(
    plan: StepPlan,
    summaries: Sequence[GroupSummary],
    algorithm: AlgorithmConfig,
    kl: TurnKl,
    estimator: Estimator | None = None,
    step: int = 0,
) -> StepPlan:
    """Return the plan with advantages of rewards that are reduced by the KL of the trained
    tokens."""
    logged = Measurements()
    step_advantages, kl_scale = advantages_of(
        summaries, algorithm, kl, estimator, step=step, measurements=logged
    )
    tokens = sum(summaries[g].trajectories[i].response_tokens for g, i in kl)
    total = sum(turn_kl for turns in kl.values() for turn_kl, _, _ in turns)
    metrics = plan.metrics | logged_metrics(logged) | {"actor/ref_kl": total / max(1, tokens)}
    return replace(plan, advantages=step_advantages, kl_scale=kl_scale, metrics=metrics)


def logged_metrics(logged: Measurements) -> dict[str, float]:
    """Return the means of what an estimator has logged; one over nothing is left out."""
    return {
        f"advantage/{name}": float(total / count)
        for name, (total, count) in logged.items()
        if count
    }


def shared_states(summaries: Sequence[GroupSummary]) -> float:
    """Return the share of the trained turns whose state another turn of their group answered to."""
    turns = [
        (g, state)
        for g, s in enumerate(summaries)
        for i in trainable(s)
        for state in s.trajectories[i].turn_states
    ]
    counts = Counter(turns)
    return sum(bool(state) and counts[g, state] > 1 for g, state in turns) / max(1, len(turns))
