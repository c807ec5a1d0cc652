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
    decoupled_advantages,
    discounted_returns,
    gigpo_advantages,
    process_advantages,
    turn_advantages,
)
from rlinf_vl.algorithms.estimators import (
    Estimator,
    EstimatorInputs,
    estimated,
    takes_inputs,
    token_kl_of,
)
from rlinf_vl.algorithms.measurements import Measurements
from rlinf_vl.config.schema import AlgorithmConfig
from rlinf_vl.errors import RunError
from rlinf_vl.packing.planner import Item, plan_micro_batches
from rlinf_vl.types import GroupSummary, Prices, TrajectorySummary, TurnAdvantages

Result = TypeVar("Result")
Advantages = tuple[tuple[TurnAdvantages, ...], ...]


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


def trainable(summary: GroupSummary, without_cut: bool = False) -> list[int]:
    """Return the trajectories of a group that are compared, and carry loss: those without an error
    and with at least one sampled token; `without_cut`: nor any that max_new_tokens has cut."""
    return [
        i
        for i, trajectory in enumerate(summary.trajectories)
        if trajectory.error is None
        and trajectory.response_tokens > 0
        and not (without_cut and trajectory.status == "length")
    ]


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


def reward_parts(
    trajectory: TrajectorySummary, reward_weights: Sequence[float]
) -> tuple[float, ...]:
    """Return the rewards of a trajectory that GDPO normalizes: one of each reward function, and
    `base_reward`.

    NaN stands for a function that gave no value, was not asked, or weighs 0. A penalized
    trajectory counts as one that every function scored 0.
    """
    scores = trajectory.scores
    if not scores:
        scores = (0.0 if trajectory.penalized else None,) * len(reward_weights)
    values = [
        math.nan if score is None or not weight else score
        for score, weight in zip(scores, reward_weights, strict=True)
    ]
    return (*values, trajectory.base_reward)


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
    turns = _Turns(summaries)
    sees_all = estimator is not None and takes_inputs(estimator)
    if turns.token_rewards and algorithm.credit != "token" and not sees_all:
        raise RunError(
            "reward.functions: one returned rewards by span (`spans`), which "
            f"algorithm.credit={algorithm.credit} does not use; set credit=token, or return no spans"
        )
    kl_sums = turns.kl_sums(kl)
    penalties = _double([overlong_penalty(n, algorithm) for n in turns.tokens.tolist()])
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
    elif algorithm.credit == "token":
        groups, lengths = turns.groups_of_trajectories, turns.lengths_of_trajectories
        values = turns.token_advantages(compare(totals, groups, tokens=lengths), compare)
    elif algorithm.credit == "turn":
        values = turn_advantages(
            rewards, turns.trajectories, turns.groups, discount=discount, compare=compare
        )
    elif weight := algorithm.state_advantage_weight:
        values = gigpo_advantages(
            rewards,
            turns.trajectories,
            turns.groups,
            turns.states(weight),
            weight=weight,
            discount=discount,
            compare=compare,
        )
    else:
        groups, lengths = turns.groups_of_trajectories, turns.lengths_of_trajectories
        values = compare(totals, groups, tokens=lengths)[turns.numbers]
    return turns.by_group(values, summaries), kl_scale


class _Turns:
    """The turns of the trajectories that carry loss, in flat lists and tensors.

    Attributes:
        trajectories: (group, index) of each turn's trajectory.
        groups: of each turn.
        numbers: int64, of each turn's trajectory, counted from 0 over all that carry loss.
        tokens: int64, sampled in each turn.
        token_rewards: (trajectory, token, value) of each reward of a token; the trajectory by
            `numbers`, the token counted in it from 0 on.
        rewards: float64, of each turn.
    """

    def __init__(self, summaries: Sequence[GroupSummary]) -> None:
        self._groups = summaries
        self._summaries = {
            (g, i): summary.trajectories[i]
            for g, summary in enumerate(summaries)
            for i in trainable(summary)
        }
        self._turns = [(g, i, k) for (g, i), t in self._summaries.items() for k in range(t.turns)]
        self.trajectories = [(g, i) for g, i, _ in self._turns]
        self.groups = [g for g, _, _ in self._turns]
        numbers = {trajectory: n for n, trajectory in enumerate(self._summaries)}
        self.numbers = _whole([numbers[trajectory] for trajectory in self.trajectories])
        self.tokens = _whole([self._summaries[g, i].turn_tokens[k] for g, i, k in self._turns])
        self.rewards = _double([self._summaries[g, i].turn_rewards[k] for g, i, k in self._turns])
        self.groups_of_trajectories = [g for g, _ in self._summaries]
        self.lengths_of_trajectories = _whole(
            [trajectory.response_tokens for trajectory in self._summaries.values()]
        )

        self.token_rewards = [
            (n, sum(trajectory.turn_tokens[:turn]) + index, value)
            for n, trajectory in enumerate(self._summaries.values())
            for turn, index, value in trajectory.token_rewards
        ]

    def token_advantages(
        self, of_trajectories: torch.Tensor, compare: Callable[..., torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Return for each turn the advantages of its tokens: those of the trajectories, and of the
        rewards of single tokens; RunError: no token has a reward."""
        if len(of_trajectories) and not self.token_rewards:
            raise RunError(
                "algorithm.credit: token compares rewards by span of text, but no reward function "
                "returned any (`spans` beside its score); return them, or set credit=trajectory"
            )
        trajectories = _whole([n for n, _, _ in self.token_rewards])
        by_trajectory = process_advantages(
            _double([value for _, _, value in self.token_rewards]),
            _whole([token for _, token, _ in self.token_rewards]),
            trajectories,
            [self.groups_of_trajectories[n] for n in trajectories.tolist()],
            self.lengths_of_trajectories,
            # A reward of a token is compared as what one token was paid.
            compare=partial(compare, tokens=torch.ones_like(trajectories)),
        )
        totals = of_trajectories.repeat_interleave(self.lengths_of_trajectories)
        if not len(totals):
            return ()
        return (torch.cat(by_trajectory) + totals).split(self.tokens.tolist())

    def kl_sums(self, kl: TurnKl | None) -> torch.Tensor:
        """Return the sums of KL of each turn, float64 [turns, 3], 0 without a KL."""
        sums = [kl[g, i][k] if kl else (0.0,) * 3 for g, i, k in self._turns]
        return _double(sums).reshape(-1, 3)

    def totals(self, penalties: torch.Tensor) -> torch.Tensor:
        """Return the reward of each trajectory, less the penalties of its turns."""
        totals = _double([trajectory.reward for trajectory in self._summaries.values()])
        return totals - torch.zeros_like(totals).index_add(0, self.numbers, penalties)

    def estimator_inputs(
        self, rewards: torch.Tensor, totals: torch.Tensor, step: int, normalize: bool
    ) -> EstimatorInputs:
        """Return the inputs of a user's estimator.

        Args:
            rewards, totals: float64, of each turn and of each trajectory, less penalties.
        """
        trajectories = list(self._summaries.values())
        groups = [self._groups[g] for g in self.groups_of_trajectories]
        names = sorted({name for t in trajectories for name in t.reward_parts})
        number_of_group = {g: n for n, g in enumerate(dict.fromkeys(self.groups_of_trajectories))}
        versions = [
            self._summaries[g, i].turn_versions[k] if self._summaries[g, i].turn_versions else -1
            for g, i, k in self._turns
        ]
        states = [self._summaries[g, i].turn_states for g, i, _ in self._turns]
        return EstimatorInputs(
            rewards=totals.clone(),
            group_ids=_whole([number_of_group[g] for g in self.groups_of_trajectories]),
            problem_ids=[group.problem_id for group in groups],
            tokens=self.lengths_of_trajectories.clone(),
            parts={
                name: _double([t.reward_parts.get(name, math.nan) for t in trajectories])
                for name in names
            },
            columns=[group.labels for group in groups],
            statuses=[t.status for t in trajectories],
            correct=torch.tensor([t.correct for t in trajectories], dtype=torch.bool),
            turn_trajectories=self.numbers.clone(),
            turn_rewards=rewards.clone(),
            turn_tokens=self.tokens.clone(),
            turn_versions=_whole(versions),
            turn_states=[
                names_of_turns[k] if names_of_turns else ""
                for names_of_turns, (_, _, k) in zip(states, self._turns, strict=True)
            ],
            token_rewards=self._rewards_of_tokens(),
            step=step,
            normalize=normalize,
        )

    def _rewards_of_tokens(self) -> Sequence[torch.Tensor]:
        """Return the reward of each token of each trajectory, float64; 0 without one."""
        lengths = self.lengths_of_trajectories
        rewards = torch.zeros(int(lengths.sum()), dtype=torch.float64)
        for n, token, value in self.token_rewards:
            rewards[int(lengths[:n].sum()) + token] += value
        return rewards.split(lengths.tolist())

    def states(self, weight: float) -> list[str | None]:
        """Return the state that each turn answers to; RunError: no turn has one."""
        states = [self._summaries[g, i].turn_states[k] or None for g, i, k in self._turns]
        if states and not any(states):
            raise RunError(
                f"algorithm.state_advantage_weight: {weight:g} compares turns that answer to the "
                "same state, but the environment names none (`state` in StepResult.info); name "
                "them there, or set it 0"
            )
        return states

    def decoupled_advantages(self, reward_weights: Sequence[float]) -> torch.Tensor:
        """Return the advantage of each turn where each reward is normalized by itself (GDPO)."""
        parts = [reward_parts(t, reward_weights) for t in self._summaries.values()]
        return decoupled_advantages(
            _double(parts).reshape(len(parts), len(reward_weights) + 1),
            _double([*reward_weights, 1.0]),
            self.groups_of_trajectories,
        )[self.numbers]

    def by_group(
        self, values: torch.Tensor | Sequence[torch.Tensor], summaries: Sequence[GroupSummary]
    ) -> Advantages:
        """Return the values by group, trajectory and turn; 0 where none carries loss.

        Args:
            values: of each turn a number, or those of its tokens.
        """
        by_turn: list[Any] = (
            values.tolist()
            if isinstance(values, torch.Tensor)
            else [tokens.float().numpy() for tokens in values]
        )
        value_of_turn = dict(zip(self._turns, by_turn, strict=True))
        groups = []
        for g, summary in enumerate(summaries):
            rows = []
            for i, trajectory in enumerate(summary.trajectories):
                turns = range(trajectory.turns)
                rows.append(tuple(value_of_turn.get((g, i, k), 0.0) for k in turns))
            groups.append(tuple(rows))
        return tuple(groups)


def _whole(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _double(values: Sequence[Any]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


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
