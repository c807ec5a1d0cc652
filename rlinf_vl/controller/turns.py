"""The turns of a rollout's trajectories, in the flat lists and tensors that advantages are computed
from."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from rlinf_vl.actor.batch_types import TurnKl
from rlinf_vl.algorithms import decoupled_advantages, process_advantages
from rlinf_vl.algorithms.estimators import EstimatorInputs
from rlinf_vl.errors import RunError
from rlinf_vl.types import GroupSummary, TrajectorySummary, TurnAdvantages

Advantages = tuple[tuple[TurnAdvantages, ...], ...]


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


class Turns:
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
        self.numbers = as_whole([numbers[trajectory] for trajectory in self.trajectories])
        self.tokens = as_whole([self._summaries[g, i].turn_tokens[k] for g, i, k in self._turns])
        self.rewards = as_double([self._summaries[g, i].turn_rewards[k] for g, i, k in self._turns])
        self.groups_of_trajectories = [g for g, _ in self._summaries]
        self.lengths_of_trajectories = as_whole(
            [trajectory.response_tokens for trajectory in self._summaries.values()]
        )

        self.token_rewards = [
            (n, sum(trajectory.turn_tokens[:turn]) + index, value)
            for n, trajectory in enumerate(self._summaries.values())
            for turn, index, value in trajectory.token_rewards
        ]

    def check_token_rewards(self, credit: str) -> None:
        """Raise RunError if there are rewards of tokens that `algorithm.credit` does not use."""
        if self.token_rewards and credit != "token":
            raise RunError(
                "reward.functions: one returned rewards by span (`spans`), which "
                f"algorithm.credit={credit} does not use; set credit=token, or return no spans"
            )

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
        trajectories = as_whole([n for n, _, _ in self.token_rewards])
        by_trajectory = process_advantages(
            as_double([value for _, _, value in self.token_rewards]),
            as_whole([token for _, token, _ in self.token_rewards]),
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
        return as_double(sums).reshape(-1, 3)

    def totals(self, penalties: torch.Tensor) -> torch.Tensor:
        """Return the reward of each trajectory, less the penalties of its turns."""
        totals = as_double([trajectory.reward for trajectory in self._summaries.values()])
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
            group_ids=as_whole([number_of_group[g] for g in self.groups_of_trajectories]),
            problem_ids=[group.problem_id for group in groups],
            tokens=self.lengths_of_trajectories.clone(),
            parts={
                name: as_double([t.reward_parts.get(name, math.nan) for t in trajectories])
                for name in names
            },
            columns=[group.labels for group in groups],
            statuses=[t.status for t in trajectories],
            correct=torch.tensor([t.correct for t in trajectories], dtype=torch.bool),
            turn_trajectories=self.numbers.clone(),
            turn_rewards=rewards.clone(),
            turn_tokens=self.tokens.clone(),
            turn_versions=as_whole(versions),
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
        trajectories = as_whole([n for n, _, _ in self.token_rewards])
        tokens = as_whole([token for _, token, _ in self.token_rewards])
        values = as_double([value for _, _, value in self.token_rewards])
        first_tokens = lengths.cumsum(0) - lengths
        rewards = torch.zeros(int(lengths.sum()), dtype=torch.float64)
        rewards.index_add_(0, first_tokens[trajectories] + tokens, values)
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
            as_double(parts).reshape(len(parts), len(reward_weights) + 1),
            as_double([*reward_weights, 1.0]),
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


def as_whole(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def as_double(values: Sequence[Any]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)
