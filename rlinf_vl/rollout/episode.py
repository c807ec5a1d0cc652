"""Episodes before they start, and trajectories that grow with each answer and observation."""

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
    """An episode that is about to be played: its seeds, its environment and its first request."""

    seed: int
    group_seed: int = 0
    #: Name under which an engine may keep keys and values between turns; "" for a single turn.
    session: str = ""
    stage: Stage | None = None  # None before the start and after the end
    start_time: float | None = None  # in seconds of the event loop's clock; None: not started
    #: The start of the environment, which returns the first observation.
    starting: "asyncio.Task[Observation] | None" = None
    first_observation: Observation | None = None  # as the model sees it, perhaps cut
    #: Index in `Opening.requests` of the request for the first answer; None: the episode started
    #: too late for those, and has a request of its own.
    request_index: int | None = None
    sample_index: int = 0  # which sample of that request is the first answer
    error: Exception | None = None  # the reason why it can't be played
    corrupted_images: Shown | None = None  # replace those of the problem; None: no corruption


@dataclass(eq=False)
class Opening:
    """The episodes of a group, and the requests for their first answers.

    Episodes that started in time and with the same messages share a request.
    """

    problem: Problem
    sampling: SamplingParams
    episodes: list[Episode]
    requests: list[Request] = field(default_factory=list)
    #: The answers to `requests`; empty until these are submitted.
    answers: list["asyncio.Future[Completion]"] = field(default_factory=list)
    corrupted_images: Shown | None = None  # of the episodes that see corrupted images
    trained: bool = True  # whether the group is sampled for training


@dataclass(slots=True)
class Played:
    """A trajectory being sampled: the answers, observations and rewards so far."""

    sequences: list[TokenSequence] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)  # the reply to each answer
    parts: dict[str, float] = field(default_factory=dict)  # components of the reward, by name
    metrics: dict[str, float] = field(default_factory=dict)
    correct: bool = False
    status: str = "error"
    cuts: int = 0  # the number of its prompts and observations that were cut to fit
    ungraded: str = ""  # why reward functions could not grade the answer
    #: The answer to be scored by the run's reward functions; None: the environment scored it.
    answer_to_score: str | None = None
    fault: str | None = None  # "kind: reason" why it failed
    penalized: bool = False  # whether it failed and is trained on with the least reward

    def add(
        self, request: Request, sample: Sample, processor: Processor, piece: bool = False
    ) -> None:
        """Add an answer, or (`piece`) a further piece of the last answer.

        If the request's prompt extends the last sequence, that sequence is extended. Otherwise the
        history was rewritten and a new sequence begins. Earlier answers carry no loss in the new
        one: each sampled token carries loss once, in the context in which it was sampled.
        """
        sequence = TokenSequence.of_sample(request, sample)
        sequence.assert_images_placed(processor.image_token_id, processor.merge_size)
        if self._extends_last(sequence, processor.image_token_id):
            last = self.sequences.pop()
            for name, array in last.arrays().items():
                # Every token keeps the values with which it was sampled, although the engine may
                # report others for the prompt, under newer weights. Only the routes of the last
                # token are unknown (zeros) until the engine has it in a prompt.
                is_known = array.any(axis=1, keepdims=True) if name == "routes" else True
                np.copyto(sequence.arrays()[name][: len(last.ids)], array, where=is_known)
        self.sequences.append(sequence)
        start = self.turns.pop().start if piece else len(request.ids)
        self.turns.append(
            Turn(len(self.sequences) - 1, start, len(sequence.ids), sample.finish_reason, 0.0)
        )

    def _extends_last(self, sequence: TokenSequence, image_token_id: int) -> bool:
        """Return whether a sequence begins with the whole last one."""
        if not self.sequences:
            return False
        last = self.sequences[-1]
        return last.shared_length(sequence, image_token_id) == len(last.ids)

    def tokens(self, request: Request, image_token_id: int) -> int:
        """Return the length of the trajectory with this request's prompt, in tokens.

        A prefix that several sequences share counts once.
        """
        no_sample = Sample(
            np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), ""
        )
        prompt = TokenSequence.of_sample(request, no_sample)
        n_unchanged = -1 if self._extends_last(prompt, image_token_id) else None
        return distinct_tokens([*self.sequences[:n_unchanged], prompt], image_token_id)

    @property
    def answer(self) -> np.ndarray:
        """The ids of the last answer, int32 [R], including the tokens that closed its thoughts."""
        return self.answers[-1]

    @property
    def answers(self) -> list[np.ndarray]:
        """The ids of each answer, int32 [R]."""
        return [self.sequences[turn.sequence].ids[turn.start : turn.end] for turn in self.turns]

    def add_result(self, result: StepResult) -> None:
        """Record the environment's reward and facts for the last answer."""
        self.turns[-1] = replace(self.turns[-1], reward=result.reward, info=result.info["facts"])
        for name, part in result.info["reward_parts"].items():
            self.parts[name] = self.parts.get(name, 0.0) + part
        self.metrics |= result.info["metrics"]
        self.correct, self.status = result.info["correct"], self.turns[-1].finish_reason
        self.answer_to_score = result.info["answer"]

    def scorable_answer(self, processor: Processor) -> Answer:
        """Return the last answer in the form that reward functions read."""
        answer_text = self.answer_to_score
        assert answer_text is not None
        full_text, turn = processor.decode(self.answer), self.turns[-1]
        # Tokens that closed a thought were not sampled, and carry no loss.
        sampled = self.sequences[turn.sequence].loss_mask[turn.start : turn.end]
        # The environment may have returned another text than the answer's end.
        response = full_text if full_text.endswith(answer_text) else answer_text
        return Answer(
            response, answer_text, tuple(self.answer[sampled].tolist()), self.status == "length"
        )

    def add_score(self, score: Score) -> None:
        """Add the score of reward functions for the last answer to its reward."""
        self.turns[-1] = replace(self.turns[-1], reward=self.turns[-1].reward + score.reward)
        self.parts |= score.parts | (
            {UNGRADABLE: float(len(score.ungraded))} if score.ungraded else {}
        )
        self.correct, self.ungraded = score.correct, "; ".join(score.ungraded)

    def trajectory(self, logprobs: bool, reward_min: float) -> Trajectory:
        """Return the finished trajectory.

        Args:
            logprobs: whether to keep the engine's logprobs.
            reward_min: the reward if the trajectory is penalized.
        """
        sequences = tuple(s if logprobs else replace(s, logprobs=None) for s in self.sequences)
        if self.fault is not None and self.penalized:
            # Earlier rewards are dropped: the last turn carries the whole reward.
            rewards = [0.0] * (len(self.turns) - 1) + [reward_min]
            turns = tuple(
                replace(turn, reward=reward)
                for turn, reward in zip(self.turns, rewards, strict=True)
            )
            return Trajectory(
                sequences,
                turns,
                reward_min,
                {},
                "error",
                metrics=self.metrics,
                cuts=self.cuts,
                penalized=self.fault,
            )
        if self.fault is not None:
            return Trajectory(
                sequences, tuple(self.turns), 0.0, {}, "error", False, self.fault, cuts=self.cuts
            )
        return Trajectory(
            sequences,
            tuple(self.turns),
            sum(turn.reward for turn in self.turns),
            self.parts,
            self.status,
            self.correct,
            metrics=self.metrics,
            cuts=self.cuts,
            ungraded=self.ungraded,
        )


def random_stream(seed: int, position: str) -> int:
    """Return the seed of a later turn, or of a later piece of an answer.

    Args:
        seed: of the episode, or of the answer.
        position: names the turn or piece within it.
    """
    # Python's own hash of a text differs between processes.
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
