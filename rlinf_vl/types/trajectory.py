"""The record of an episode: token sequences with their images, and turns."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlinf_vl.types.engine import Request, Sample
from rlinf_vl.types.problem import Grid, ImageRef, TokenIds


@dataclass(frozen=True, slots=True, repr=False)
class TokenSequence:
    """A conversation as T tokens, from the first prompt token on; it can be trained on alone.

    Arrays have one value per token, [T].
    """

    ids: np.ndarray  # int32, image placeholders expanded
    # Bool, True where the policy sampled the token (False: prompt or observation)
    loss_mask: np.ndarray
    #: float32, log-probability at the sampling temperature over all ids that are not banned (top-k
    #: and top-p restrict the sampling, not this distribution), 0 where not sampled; None if
    #: `rollout.return_logprobs` is off.
    logprobs: np.ndarray | None
    # Int32, version of the weights that sampled the token, -1 where not sampled.
    versions: np.ndarray
    images: tuple[tuple[ImageRef, Grid], ...] = ()  # in order of placeholders, repeats included
    #: Further arrays by name, [T] or [T, …]; 0 for a token of which the engine reported nothing.
    columns: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, array in self.arrays().items():
            assert len(array) == len(self.ids) and (array.ndim == 1 or name in self.columns), (
                f"{name} has shape {array.shape}, ids {self.ids.shape}"
            )
        assert not self.loss_mask[:1].any(), (
            "nothing predicts the first token, so it can't be a sampled one"
        )

    @classmethod
    def of_sample(cls, request: Request, sample: Sample) -> "TokenSequence":
        """Join a prompt and one sample drawn for it.

        Columns of the sampled tokens alone are 0 on the prompt.
        """
        prompt = len(request.ids)
        columns = {}
        for name, column in sample.columns.items():
            n_unreported = prompt + len(sample.ids) - len(column)
            zeros = np.zeros((n_unreported, *column.shape[1:]), column.dtype)
            columns[name] = np.concatenate([zeros, column])
        grids = [(t, h, w) for t, h, w in request.image_grids.tolist()]
        return cls(
            ids=np.concatenate([request.ids, sample.ids]).astype(np.int32, copy=False),
            loss_mask=np.arange(prompt + len(sample.ids)) >= prompt,
            logprobs=np.concatenate([np.zeros(prompt, np.float32), sample.logprobs]),
            versions=np.concatenate([np.full(prompt, -1, np.int32), sample.versions]),
            images=tuple(zip(request.images, grids, strict=True)),
            columns=columns,
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """Return every per-token array by name."""
        arrays = {"ids": self.ids, "loss_mask": self.loss_mask, "versions": self.versions}
        if self.logprobs is not None:
            arrays["logprobs"] = self.logprobs
        return arrays | self.columns

    def with_images(self, images: Mapping[str, Any]) -> "TokenSequence":
        """Return the sequence with its images replaced by `images`, a mapping by hash."""
        return replace(
            self, images=tuple((images.get(image.hash, image), grid) for image, grid in self.images)
        )

    def shared_length(self, sequence: "TokenSequence", placeholder_ids: TokenIds) -> int:
        """Return the length of the longest common prefix of two sequences, in tokens.

        Placeholders are common only if their images are equal, and an image is common as a whole or
        not at all.
        """
        n = min(len(self.ids), len(sequence.ids))
        differs = self.ids[:n] != sequence.ids[:n]
        # `argmax` stops at the first difference; without any it is 0.
        if n and differs[first := int(differs.argmax())]:
            n = first
        pairs = zip(self.images, sequence.images, strict=False)
        for k, ((ours, our_grid), (theirs, their_grid)) in enumerate(pairs):
            if ours.hash != theirs.hash or our_grid != their_grid:
                # The ids of placeholders are equal although the images differ: the common prefix
                # ends before the first placeholder of image k. An image has as many placeholders
                # as patches, up to one constant factor.
                patches = np.cumsum([0, *(math.prod(grid) for _, grid in self.images)])
                placeholders = np.flatnonzero(np.isin(self.ids, placeholder_ids))
                return min(n, int(placeholders[len(placeholders) * patches[k] // patches[-1]]))
        return n


def distinct_tokens(sequences: Sequence[TokenSequence], placeholder_ids: TokenIds) -> int:
    """Return the number of tokens in the prefix tree of `sequences`.

    Each sequence adds the tokens behind its longest prefix shared with an earlier one.
    """
    total = 0
    for j, sequence in enumerate(sequences):
        shared = (sequence.shared_length(earlier, placeholder_ids) for earlier in sequences[:j])
        total += len(sequence.ids) - max(shared, default=0)
    return total


def shared_prefix(trajectories: "Sequence[Trajectory]", placeholder_ids: TokenIds) -> int:
    """Return the length of the prefix that all sequences share and that lies within every first
    prompt, in tokens; 0 without any."""
    sequences = [sequence for trajectory in trajectories for sequence in trajectory.sequences]
    lengths = [trajectory.turns[0].start for trajectory in trajectories if trajectory.turns]
    for sequence in sequences[1:]:
        lengths.append(sequences[0].shared_length(sequence, placeholder_ids))
    return min(lengths, default=0)


#: Names, among a trajectory's metrics, of the numbers of its calls of tools that could be read and
#: that could not.
READ_CALLS, UNREAD_CALLS = "read_tool_calls", "unread_tool_calls"


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of the policy: tokens `start` … `end` of `Trajectory.sequences[sequence]`.

    All of them are sampled, except tokens inserted to close a thought (`rollout.thinking.budget`).
    """

    sequence: int
    start: int
    end: int
    finish_reason: str
    reward: float
    #: JSON object of the environment's `tool_calls` and `state` (`envs.base.StepResult`); "" if it
    #: has neither.
    info: str = ""
    thought: int = 0  # the number of its leading tokens that are thoughts, marks included

    @property
    def state(self) -> str:
        """The name of the state in which the turn was taken; "" if the environment gives none."""
        return json.loads(self.info).get("state", "") if self.info else ""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode: one sequence, or several if the context was rewritten during the episode."""

    #: Empty if the episode failed before a token was sampled.
    sequences: tuple[TokenSequence, ...] = field(repr=False)
    turns: tuple[Turn, ...]
    #: Reward of environment and reward functions, scaled to reward_min_val … reward_max_val.
    reward: float
    reward_parts: dict[str, float]  # components of the reward, by name
    status: str  # "stop" (an end token), "length" (cut by max_new_tokens) or "error"
    #: Whether the answer was graded right, before scaling; validation accuracy is its mean.
    correct: bool = False
    #: "kind: reason" if the row, the engine or the environment failed (`ENGINE_FAULT`,
    #: `ENVIRONMENT_FAULT`; any other kind is a fault of the row). Such a trajectory is masked and
    #: counted, never trained on.
    error: str | None = None
    #: The last value of each metric of the environment, by name.
    metrics: dict[str, float] = field(default_factory=dict)
    cuts: int = 0  # the number of its prompts and observations that were cut to fit
    #: Whether its answers were sampled on corrupted images (`algorithm.image_corruption`), which
    #: are in `Group.corrupted_images`. Its sequences have the original images, on which it is
    #: trained, but the logprobs with which it was sampled.
    corrupted: bool = False
    ungraded: str = ""  # why reward functions could not grade the answer, which then scores 0
    #: "environment: reason" if its environment failed and it is trained on with the least reward
    #: (`rollout.faults: penalize`); `error` is None then.
    penalized: str = ""
    #: The value of each of `reward.functions` for the answer, unweighted; None where one gave none.
    #: () if they were not asked.
    scores: tuple[float | None, ...] = ()
    #: `reward` without what the scores add to it: what the environment paid, and reward_min_val
    #: where there are scores.
    base_reward: float = 0.0
    #: The ids of the prompt that the teacher sees in place of the policy's, with the same images;
    #: () if it sees the policy's.
    teacher_prompt: tuple[int, ...] = field(default=(), repr=False)
    #: Rewards of single tokens by reward functions: (turn, number among the turn's sampled tokens,
    #: value). They are not in `reward`.
    token_rewards: tuple[tuple[int, int, float], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for turn in self.turns:
            assert turn.start <= turn.end <= len(self.sequences[turn.sequence].ids), turn

    @property
    def n_response_tokens(self) -> int:
        """The number of sampled tokens, which carry loss, summed over all sequences."""
        return sum(int(sequence.loss_mask.sum()) for sequence in self.sequences)

    def turn_numbers(self) -> list[np.ndarray]:
        """Return for each sequence the turn of each sampled token, int64 [sampled tokens]."""
        numbers = [np.full(len(sequence.ids), -1) for sequence in self.sequences]
        for k, turn in enumerate(self.turns):
            numbers[turn.sequence][turn.start : turn.end] = k
        sampled = [
            token_turns[s.loss_mask] for token_turns, s in zip(numbers, self.sequences, strict=True)
        ]
        assert all((token_turns >= 0).all() for token_turns in sampled), (
            "a sampled token is of no turn"
        )
        return sampled

    @property
    def turn_thoughts(self) -> tuple[tuple[int, int, int], ...]:
        """Token counts of each turn: sampled in thoughts, sampled after them, and not sampled.

        The tokens that are not sampled were inserted to close the thoughts.
        """
        counts = []
        for turn in self.turns:
            sampled = self.sequences[turn.sequence].loss_mask[turn.start : turn.end]
            thought = turn.thought
            counts.append(
                (int(sampled[:thought].sum()), int(sampled[thought:].sum()), int((~sampled).sum()))
            )
        return tuple(counts)

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """The reward of each turn."""
        return tuple(float(turn.reward) for turn in self.turns)

    @property
    def turn_versions(self) -> tuple[int, ...]:
        """The oldest version of the weights that sampled a token of each turn; -1 without one."""
        oldest = []
        for turn in self.turns:
            versions = self.sequences[turn.sequence].versions[turn.start : turn.end]
            oldest.append(min((x for x in versions.tolist() if x >= 0), default=-1))
        return tuple(oldest)

    @property
    def turn_states(self) -> tuple[str, ...]:
        """The `Turn.state` of each turn."""
        return tuple(turn.state for turn in self.turns)

    @property
    def turn_tokens(self) -> tuple[int, ...]:
        """The number of sampled tokens of each turn."""
        numbers = np.concatenate([np.zeros(0, np.int64), *self.turn_numbers()])
        return tuple(np.bincount(numbers, minlength=len(self.turns)).tolist())
