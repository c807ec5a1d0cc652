"""From a rollout's summaries to what each rank trains: a pure function of numbers, no tokens and no tensors on devices."""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from rlinf_vl.actor.messages import RankMiniBatch, TurnKl
from rlinf_vl.algorithms import advantages, discounted_returns, gigpo_advantages, token_moments, turn_advantages
from rlinf_vl.config.schema import AlgorithmConfig
from rlinf_vl.errors import RunError
from rlinf_vl.packing.planner import Item, plan_micro_batches
from rlinf_vl.types import GroupSummary, Prices

Advantages = tuple[tuple[tuple[float, ...], ...], ...]
#: (rewards, group_ids, tokens) → advantages.
Estimator = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class StepPlan:
    minibatches: tuple[tuple[RankMiniBatch, ...], ...]  #: by number and share of the trajectories (`Mesh.data_rank`)
    #: Of each turn of each trajectory of each group; 0 where it is not trained on.
    advantages: Advantages
    metrics: dict[str, float]
    kl_scale: float = 0.0  #: see `advantages_of`


def trainable(summary: GroupSummary, without_cut: bool = False) -> list[int]:
    """Trajectories of a group that are compared, and carry loss: no error, and at least one sampled token; `without_cut`: and none
    that max_new_tokens has cut."""
    return [
        i
        for i, error in enumerate(summary.errors)
        if error is None and summary.response_tokens[i] > 0 and not (without_cut and summary.statuses[i] == "length")
    ]


def ties(summary: GroupSummary) -> bool:
    """Whether all rewards of a group are equal, so that it teaches nothing."""
    return len({summary.rewards[i] for i in trainable(summary)}) < 2


def overlong_penalty(tokens: int, algorithm: AlgorithmConfig) -> float:
    """DAPO's soft punishment of a response, >= 0: it grows from 0 at max_new_tokens - buffer to `penalty` at max_new_tokens (Yu et
    al., 2025, equation 13)."""
    overlong, longest = algorithm.overlong, algorithm.sampling_params.max_new_tokens or 0
    share = max(0, tokens + overlong.buffer - longest) / max(1, overlong.buffer)
    return overlong.penalty * min(1.0, share) if overlong.buffer else 0.0


def advantages_of(
    summaries: Sequence[GroupSummary],
    algorithm: AlgorithmConfig,
    kl: TurnKl | None = None,
    estimator: Estimator | None = None,
) -> tuple[Advantages, float]:
    """Advantage of each turn of each trajectory, as `algorithm` says, among the trajectories of its group that carry loss; 0 for
    the others. And, but for `reinforce_plus_plus` with `kl` 0, how much of the KL from a token on to its trajectory's end is yet to
    be subtracted from the token's advantage.

    Rewards are less `algorithm.overlong`'s penalty and, with `kl`, less kl_beta times the turn's KL. `estimator` is the code that
    `algorithm.adv_type` names.

    Raises:
        RunError: states are to be compared, and no turn has one; or the estimator's result can't be used.
    """
    weight, discount, normalize = (
        algorithm.state_advantage_weight, algorithm.turn_discount, bool(algorithm.normalize_advantages)
    )  # fmt: skip
    kind, scale = estimator or algorithm.adv_type, 0.0
    per_token = kind == "reinforce_plus_plus" and kl is not None
    trained = [(g, i) for g, summary in enumerate(summaries) for i in trainable(summary)]
    turns = [(g, i, k) for g, i in trained for k in range(len(summaries[g].turn_rewards[i]))]
    whose, groups = [(g, i) for g, i, _ in turns], [g for g, _, _ in turns]
    number = {trajectory: n for n, trajectory in enumerate(trained)}
    of = torch.tensor([number[trajectory] for trajectory in whose], dtype=torch.int64)
    tokens = torch.tensor([summaries[g].turn_tokens[i][k] for g, i, k in turns], dtype=torch.int64)
    less = _double([overlong_penalty(n, algorithm) for n in tokens.tolist()])
    spent = _double([kl[g, i][k] if kl else (0.0,) * 3 for g, i, k in turns]).reshape(-1, 3)
    if not per_token:
        less = less + algorithm.kl_beta * spent[:, 0]
    rewards = _double([summaries[g].turn_rewards[i][k] for g, i, k in turns]) - less
    totals = _double([summaries[g].rewards[i] for g, i in trained])
    totals = totals - torch.zeros_like(totals).index_add(0, of, less)
    compare = partial(_estimated, kind, tokens=tokens, normalize=normalize)
    if per_token:
        returns = discounted_returns(rewards, whose, discount) if algorithm.credit == "turn" else totals[of]
        beta, later, squares = algorithm.kl_beta, spent[:, 1], spent[:, 2]

        def distance(mean: torch.Tensor) -> torch.Tensor:
            far = returns - mean
            return (tokens * far.square() - 2 * beta * far * later + beta**2 * squares).sum()

        mean, deviation = token_moments(tokens.sum(), (tokens * returns - beta * later).sum(), distance)
        deviation = deviation if normalize else torch.ones_like(deviation)
        values, scale = (returns - mean) / deviation, float(beta / deviation)
    elif algorithm.credit == "turn":
        values = turn_advantages(rewards, whose, groups, discount=discount, compare=compare)
    elif weight:
        states = [summaries[g].turn_states[i][k] or None for g, i, k in turns]
        if turns and not any(states):
            raise RunError(
                f"algorithm.state_advantage_weight: {weight:g} compares turns that answer to the same state, but the environment "
                "names none (`state` in StepResult.info); name them there, or set it 0"
            )
        options: Any = {"normalize": normalize, "leave_one_out": kind == "rloo"}
        values = gigpo_advantages(rewards, whose, groups, states, weight=weight, discount=discount, **options)
    else:
        lengths = torch.tensor([summaries[g].response_tokens[i] for g, i in trained], dtype=torch.int64)
        values = compare(totals, [g for g, _ in trained], tokens=lengths)[of]
    out = [[[0.0] * len(tokens) for tokens in summary.turn_tokens] for summary in summaries]
    for (g, i, k), value in zip(turns, values.tolist(), strict=True):
        out[g][i][k] = value
    return tuple(tuple(map(tuple, row)) for row in out), scale


def _double(values: Sequence[Any]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _estimated(kind: str | Estimator, rewards: torch.Tensor, group_ids: Any, **options: Any) -> torch.Tensor:
    """`advantages`; RunError if code of the user fails in it."""
    if not callable(kind):
        return advantages(kind, rewards, group_ids, **options)
    try:
        return advantages(kind, rewards, group_ids, **options)
    except Exception as error:  # whatever that code does
        name = getattr(kind, "__name__", "the code")
        raise RunError(f"algorithm.adv_type: {name} failed: {type(error).__name__}: {error}") from error


def item_of(group: int, index: int, summary: GroupSummary) -> Item:
    """A trajectory as the planner sees it."""
    prompt = summary.prompt_tokens
    return Item(group, index, prompt, summary.tokens[index] - prompt, summary.response_tokens[index], summary.patches)


def minibatch_groups(n_groups: int, n_minibatches: int, shuffle_key: str | None) -> list[np.ndarray]:
    """Return the group numbers of each mini-batch, int64 arrays of about equal length.

    Groups come sorted by the step that requested them. Split in that order, the first optimizer step would get all stale
    groups, which are the long ones, too. So they are shuffled, with `shuffle_key` as the seed: the same key gives the same
    split, in a resumed run as well. None keeps their order.
    """
    groups = np.arange(n_groups)
    if n_minibatches > 1 and shuffle_key is not None:
        seed = int.from_bytes(hashlib.blake2b(shuffle_key.encode(), digest_size=8).digest(), "little")
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
    shuffle_key: str | None = None,
) -> StepPlan:
    """Split a rollout into mini-batches of whole groups, and each into micro-batches for every rank.

    The loss denominators are global: all response tokens of the mini-batch for `token-mean`, all its sequences for the
    `seq-*` modes, trajectories or their turns (times max_new_tokens for `seq-mean-token-sum-norm`). `shuffle_key` is
    `minibatch_groups`', `share_prompts` and `prices` are `plan_micro_batches`', `estimator` is `advantages_of`'s.
    With a KL in the reward, the advantages are not yet those to train on (`with_kl`).
    """
    minibatches, plans = [], []
    for groups in minibatch_groups(len(summaries), algorithm.n_minibatches, shuffle_key):
        items = [
            item_of(int(g), i, summaries[g]) for g in groups for i in trainable(summaries[g], algorithm.overlong.filter)
        ]
        plan = plan_micro_batches(
            items, ranks=ranks, budget=budget, size=micro_batch_size, share_prompts=share_prompts, prices=prices
        )
        tokens = [n for item in items for n in summaries[item.group].turn_tokens[item.index] if n]
        sequences = len(tokens) if algorithm.turns_are_sequences else len(items)
        denominator = max(1, sum(tokens) if algorithm.loss_agg_func == "token-mean" else sequences)
        if algorithm.loss_agg_func == "seq-mean-token-sum-norm":
            assert algorithm.sampling_params.max_new_tokens is not None
            denominator *= algorithm.sampling_params.max_new_tokens
        minibatches.append(tuple(RankMiniBatch(micro, plan.run_vision, denominator) for micro in plan.micro_batches))
        plans.append(plan)
    metrics = {}
    for name in ("fill", "imbalance", "repeated"):
        metrics[f"packing/{name}"] = float(np.mean([getattr(plan, name) for plan in plans]))
    metrics["packing/micro_batches"] = float(sum(plan.steps for plan in plans))
    if algorithm.state_advantage_weight:
        metrics["reward/shared_states"] = shared_states(summaries)
    if algorithm.overlong.buffer:
        turns = [n for s in summaries for i in trainable(s) for n in s.turn_tokens[i]]
        metrics["reward/overlong_penalty"] = float(np.mean([overlong_penalty(n, algorithm) for n in turns] or [0.0]))
    values, _ = advantages_of(summaries, algorithm, estimator=estimator)
    return StepPlan(tuple(minibatches), values, metrics)


def with_kl(
    plan: StepPlan,
    summaries: Sequence[GroupSummary],
    algorithm: AlgorithmConfig,
    kl: TurnKl,
    estimator: Estimator | None = None,
) -> StepPlan:
    """The plan with advantages of rewards that are less the KL of what is trained on."""
    values, scale = advantages_of(summaries, algorithm, kl, estimator)
    tokens = sum(summaries[g].response_tokens[i] for g, i in kl)
    total = sum(turn[0] for turns in kl.values() for turn in turns)
    metrics = plan.metrics | {"actor/ref_kl": total / max(1, tokens)}
    return replace(plan, advantages=values, kl_scale=scale, metrics=metrics)


def shared_states(summaries: Sequence[GroupSummary]) -> float:
    """Share of the turns that are trained on whose state another turn of their group answered to."""
    turns = [(g, state) for g, s in enumerate(summaries) for i in trainable(s) for state in s.turn_states[i]]
    seen = Counter(turns)
    return sum(bool(state) and seen[g, state] > 1 for g, state in turns) / max(1, len(turns))
