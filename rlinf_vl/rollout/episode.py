"""An episode: what it is before it begins, and a trajectory in the making, in step with what the environment says."""

import asyncio
import hashlib
from dataclasses import dataclass, field, replace

import numpy as np

from rlinf_vl.data.corruption import Shown
from rlinf_vl.envs import StepResult
from rlinf_vl.models.processing import Processor
from rlinf_vl.rewards.scoring import Answer, Score
from rlinf_vl.rollout.calls import Stage
from rlinf_vl.rollout.observation import Observation
from rlinf_vl.types import (
    UNGRADABLE,
    Completion,
    Problem,
    Request,
    Sample,
    SamplingParams,
    TokenSequence,
    Trajectory,
    Turn,
    distinct_tokens,
)


@dataclass(eq=False)
class Episode:
    """One trajectory to be. Its first answer is sample `place` of its opening's request number `request`."""

    seed: int
    group_seed: int = 0
    session: str = ""  # name under which an engine may keep what it computed; "" if there is but one turn
    stage: Stage | None = None
    begun: float | None = None  # when, by the event loop's clock
    starting: "asyncio.Task[Observation] | None" = None
    opened: Observation | None = None  # what it began with, as the model sees it: perhaps cut
    request: int | None = None  # None: it was not among those that started in time
    place: int = 0
    error: Exception | None = None  # why it can't begin
    shown: Shown | None = None  # what it sees in place of images; None: the images


@dataclass(eq=False)
class Opening:
    """The episodes of a group, and requests for first answers: one request for all that begin alike and have started in time."""

    problem: Problem
    sampling: SamplingParams
    episodes: list[Episode]
    requests: list[Request] = field(default_factory=list)
    answers: list["asyncio.Future[Completion]"] = field(default_factory=list)  # once they are submitted
    shown: Shown | None = None  # of those episodes that see corrupted images
    trained: bool = True  # whether the group is sampled to be trained on


@dataclass(slots=True)
class Played:
    """A trajectory in the making."""

    sequences: list[TokenSequence] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    said: list[Observation] = field(default_factory=list)  # to each answer
    parts: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    correct: bool = False
    status: str = "error"
    cuts: int = 0  # of what was said
    ungraded: str = ""  # why there is no verdict on it
    left: str | None = None  # the answer that the environment leaves to the run's reward functions
    fault: str | None = None  # "kind: reason" why it failed
    penalized: bool = False  # it failed, and is trained on with the least reward

    def add(self, request: Request, sample: Sample, processor: Processor, piece: bool = False) -> None:
        """Add an answer, or a further piece of the last. Where its prompt goes on from the last sequence, so does that; otherwise
        another sequence begins, in which former answers carry no loss: each sampled token carries it where it was sampled."""
        sequence = TokenSequence.of_sample(request, sample)
        sequence.assert_images_placed(processor.image_token_id, processor.merge_size)
        if self._goes_on(sequence, processor.image_token_id):
            before = self.sequences.pop()
            for name, array in before.arrays().items():
                # the last token's routes come with this answer
                known = array.any(axis=1, keepdims=True) if name == "routes" else True
                np.copyto(sequence.arrays()[name][: len(before.ids)], array, where=known)
        self.sequences.append(sequence)
        begin = self.turns.pop().start if piece else len(request.ids)
        self.turns.append(Turn(len(self.sequences) - 1, begin, len(sequence.ids), sample.finish_reason, 0.0))

    def _goes_on(self, sequence: TokenSequence, image_token_id: int) -> bool:
        last = self.sequences[-1:]
        return any(before.shared_length(sequence, image_token_id) == len(before.ids) for before in last)

    def tokens(self, request: Request, image_token_id: int) -> int:
        """Tokens of the trajectory with the prompt of this request, in all sequences; what they share counts once."""
        nothing = Sample(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), "")
        prompt = TokenSequence.of_sample(request, nothing)
        others = self.sequences[: -1 if self._goes_on(prompt, image_token_id) else None]
        return distinct_tokens([*others, prompt], image_token_id)

    @property
    def answer(self) -> np.ndarray:
        """Ids of the last answer, what closed its thoughts included."""
        return self.answers[-1]

    @property
    def answers(self) -> list[np.ndarray]:
        """The ids of each answer."""
        return [self.sequences[turn.sequence].ids[turn.start : turn.end] for turn in self.turns]

    def pay(self, result: StepResult) -> None:
        """Note what the environment gave for the last answer."""
        self.turns[-1] = replace(self.turns[-1], reward=result.reward, info=result.info["facts"])
        for name, part in result.info["reward_parts"].items():
            self.parts[name] = self.parts.get(name, 0.0) + part
        self.metrics |= result.info["metrics"]
        self.correct, self.status = result.info["correct"], self.turns[-1].finish_reason
        self.left = result.info["answer"]

    def to_score(self, processor: Processor) -> Answer:
        """The answer that is left to reward functions."""
        assert self.left is not None
        whole, turn = processor.decode(self.answer), self.turns[-1]
        sampled = self.sequences[turn.sequence].loss_mask[turn.start : turn.end]
        response = whole if whole.endswith(self.left) else self.left  # an environment may have changed it
        return Answer(response, self.left, tuple(self.answer[sampled].tolist()), self.status == "length")

    def earn(self, score: Score) -> None:
        """Add what reward functions give for the last answer."""
        self.turns[-1] = replace(self.turns[-1], reward=self.turns[-1].reward + score.reward)
        self.parts |= score.parts | ({UNGRADABLE: float(len(score.ungraded))} if score.ungraded else {})
        self.correct, self.ungraded = score.correct, "; ".join(score.ungraded)

    def trajectory(self, logprobs: bool, reward_min: float) -> Trajectory:
        """Return the finished trajectory; `reward_min` is the reward of one that is penalized."""
        sequences = tuple(s if logprobs else replace(s, logprobs=None) for s in self.sequences)
        if self.fault is not None and self.penalized:
            # What its turns have earned is forfeit: the last one carries the whole reward.
            rewards = [0.0] * (len(self.turns) - 1) + [reward_min]
            turns = tuple(replace(turn, reward=reward) for turn, reward in zip(self.turns, rewards, strict=True))
            return Trajectory(
                sequences, turns, reward_min, {}, "error", metrics=self.metrics, cuts=self.cuts, penalized=self.fault
            )
        if self.fault is not None:
            return Trajectory(sequences, tuple(self.turns), 0.0, {}, "error", False, self.fault, cuts=self.cuts)
        reward = sum(turn.reward for turn in self.turns)
        facts = reward, self.parts, self.status, self.correct, None, self.metrics, self.cuts
        return Trajectory(sequences, tuple(self.turns), *facts, ungraded=self.ungraded)


def random_stream(seed: int, place: str) -> int:
    """The seed of a later turn, or of a later piece of an answer, of the episode with this seed."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{place}".encode(), digest_size=8).digest(), "little")
