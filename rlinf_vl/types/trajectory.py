"""What an episode leaves: token sequences with their images, and turns."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlinf_vl.types.engine import Request, Sample
from rlinf_vl.types.problem import Grid, ImageRef


@dataclass(frozen=True, slots=True, repr=False)
class TokenSequence:
    """One row that a trainer could train on alone, from the first prompt token on. Arrays have one value per token, [T]."""

    ids: np.ndarray  # int32, image placeholders expanded
    loss_mask: np.ndarray  # bool, True where the policy sampled the token (False: prompt or observation)
    #: float32, log-probability at the sampling temperature with banned ids left out (top-k and top-p restrict the draw and
    #: don't change it), 0 where not sampled; None if `rollout.return_logprobs` is off.
    logprobs: np.ndarray | None
    versions: np.ndarray  # int32, version of the weights that sampled the token, -1 where not sampled
    images: tuple[tuple[ImageRef, Grid], ...] = ()  # in order of their placeholders; one shown twice is listed twice
    columns: dict[str, np.ndarray] = field(default_factory=dict)  # further arrays by name
    #: Experts that the engine computed each token with, uint8 or int16 [T, L·k] (`Mixture.dtype`): k of each of the L mixtures. All
    #: 0 for a token that it did not report, such as the last. None if it reports none (`actor.routing_replay`).
    routes: np.ndarray | None = None

    def __post_init__(self) -> None:
        for name, array in self.arrays().items():
            assert len(array) == len(self.ids) and array.ndim == 1 + (name == "routes"), (
                f"{name} has shape {array.shape}, ids {self.ids.shape}"
            )
        assert not self.loss_mask[:1].any(), "nothing predicts the first token, so it can't be a sampled one"

    @classmethod
    def of_sample(cls, request: Request, sample: Sample) -> "TokenSequence":
        """A prompt followed by one sample drawn from it; `sample.columns` are 0 on the prompt."""
        prompt = len(request.ids)
        grids = [(t, h, w) for t, h, w in request.image_grids.tolist()]
        return cls(
            ids=np.concatenate([request.ids, sample.ids]).astype(np.int32, copy=False),
            loss_mask=np.arange(prompt + len(sample.ids)) >= prompt,
            logprobs=np.concatenate([np.zeros(prompt, np.float32), sample.logprobs]),
            versions=np.concatenate([np.full(prompt, -1, np.int32), sample.versions]),
            images=tuple(zip(request.images, grids, strict=True)),
            columns={n: np.concatenate([np.zeros(prompt, c.dtype), c]) for n, c in sample.columns.items()},
            routes=sample.routes,
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """Every per-token array by name."""
        arrays = {"ids": self.ids, "loss_mask": self.loss_mask, "versions": self.versions} | self.columns
        may_lack = {"logprobs": self.logprobs, "routes": self.routes}
        return arrays | {name: array for name, array in may_lack.items() if array is not None}

    def with_images(self, images: Mapping[str, Any]) -> "TokenSequence":
        """The same sequence with these objects in place of its images, by hash."""
        return replace(self, images=tuple((images.get(image.hash, image), grid) for image, grid in self.images))

    def assert_images_placed(self, image_token_id: int, merge_size: int) -> None:
        """Assert that there are as many placeholder ids as the images need."""
        found = int((self.ids == image_token_id).sum())
        needed = sum(math.prod(grid) for _, grid in self.images) // merge_size**2
        assert found == needed, f"{found} image placeholder ids for {len(self.images)} images that need {needed}"

    def shared_length(self, other: "TokenSequence", image_token_id: int) -> int:
        """How many leading tokens two sequences have in common, images included; an image counts whole or not at all."""
        n = min(len(self.ids), len(other.ids))
        differing = np.flatnonzero(self.ids[:n] != other.ids[:n])
        n = int(differing[0]) if len(differing) else n
        pairs = zip(self.images, other.images, strict=False)
        for k, ((ours, our_grid), (theirs, their_grid)) in enumerate(pairs):
            if ours.hash != theirs.hash or our_grid != their_grid:
                patches = np.cumsum([0, *(math.prod(grid) for _, grid in self.images)])
                placeholders = np.flatnonzero(self.ids == image_token_id)
                return min(n, int(placeholders[len(placeholders) * patches[k] // patches[-1]]))
        return n


def distinct_tokens(sequences: Sequence[TokenSequence], image_token_id: int) -> int:
    """Tokens of the tree of prefixes that these share: a sequence adds what no sequence before it has."""
    total = 0
    for j, sequence in enumerate(sequences):
        shared = (sequence.shared_length(earlier, image_token_id) for earlier in sequences[:j])
        total += len(sequence.ids) - max(shared, default=0)
    return total


@dataclass(frozen=True, slots=True)
class Turn:
    """What the policy answered: tokens `start` … `end` of the trajectory's `sequences[sequence]`, all of them sampled but those that
    closed a thought for it (`rollout.thinking.budget`)."""

    sequence: int
    start: int
    end: int
    finish_reason: str
    reward: float
    #: JSON object of the environment's `tool_calls` and `state` (`envs.base.StepResult`); "" if it gave neither.
    info: str = ""
    thought: int = 0  # how many of its tokens, from the first on, are thoughts with their marks

    @property
    def state(self) -> str:
        """Name of the state that it answered to; "" where the environment gave none."""
        return json.loads(self.info).get("state", "") if self.info else ""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode: a sequence, or several where the context was rewritten on the way."""

    sequences: tuple[TokenSequence, ...] = field(repr=False)  # none if it failed before a token was sampled
    turns: tuple[Turn, ...]
    reward: float  # what the environment and the reward functions paid, scaled to reward_min_val … reward_max_val
    reward_parts: dict[str, float]  # what the environment and the reward functions say it is made of, by name
    status: str  # "stop" (an end token), "length" (cut by max_new_tokens) or "error"
    correct: bool = False  # whether the answer was graded right, before scaling; validation accuracy is its mean
    #: "kind: reason" if the row, the engine or the environment failed (`ENGINE_FAULT`, `ENVIRONMENT_FAULT`; any other kind is
    #: the row's); such a trajectory is masked and counted, never trained on.
    error: str | None = None
    metrics: dict[str, float] = field(
        default_factory=dict
    )  # what the environment measured, by name: the last value of each
    cuts: int = 0  # prompts and observations of it that were cut to fit
    #: Whether its answers were drawn on corrupted images (`algorithm.image_corruption`), which `Group.shown` has. Its sequences have
    #: the images as they are, on which it is trained; their logprobs are those that it was sampled with.
    corrupted: bool = False
    ungraded: str = ""  # why reward functions came to no verdict on its answer, and score it 0
    #: "environment: reason" if its environment failed and it is trained on with the least reward (`rollout.faults: penalize`);
    #: `error` is None then.
    penalized: str = ""

    def __post_init__(self) -> None:
        for turn in self.turns:
            assert turn.start <= turn.end <= len(self.sequences[turn.sequence].ids), turn

    @property
    def n_response_tokens(self) -> int:
        """Sampled tokens: those that carry loss, in every sequence that has them."""
        return sum(int(sequence.loss_mask.sum()) for sequence in self.sequences)

    def turn_numbers(self) -> list[np.ndarray]:
        """Of each sequence, which turn each sampled token is of: int64 [sampled tokens]."""
        numbers = [np.full(len(sequence.ids), -1) for sequence in self.sequences]
        for k, turn in enumerate(self.turns):
            numbers[turn.sequence][turn.start : turn.end] = k
        sampled = [own[s.loss_mask] for own, s in zip(numbers, self.sequences, strict=True)]
        assert all((own >= 0).all() for own in sampled), "a sampled token is of no turn"
        return sampled

    @property
    def turn_thoughts(self) -> tuple[tuple[int, int, int], ...]:
        """Of each turn: tokens sampled in its thoughts, tokens sampled behind them, and tokens that closed them unsampled."""
        found = []
        for turn in self.turns:
            sampled = self.sequences[turn.sequence].loss_mask[turn.start : turn.end]
            n = turn.thought
            found.append((int(sampled[:n].sum()), int(sampled[n:].sum()), int((~sampled).sum())))
        return tuple(found)

    @property
    def turn_tokens(self) -> tuple[int, ...]:
        """Sampled tokens of each turn."""
        numbers = np.concatenate([np.zeros(0, np.int64), *self.turn_numbers()])
        return tuple(np.bincount(numbers, minlength=len(self.turns)).tolist())
