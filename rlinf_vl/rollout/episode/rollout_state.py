"""Holds the state of a group's episodes: each one's environment, request and trajectory so far.

`Player` moves an episode on; `RequestBuilder` reads its state. No Ray and no engine.
"""

import asyncio
import bisect
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rlinf_vl.data.corruption import Shown
from rlinf_vl.envs import StepResult
from rlinf_vl.models.processing import Processor
from rlinf_vl.rewards.scoring import Answer, Score
from rlinf_vl.rollout.episode.env_executor import EnvHandle
from rlinf_vl.rollout.episode.observation import Observation
from rlinf_vl.types import (
    UNGRADABLE,
    Completion,
    Group,
    Problem,
    Request,
    Sample,
    SamplingParams,
    TokenIds,
    TokenSequence,
    Trajectory,
    Turn,
    shared_prefix,
)


@dataclass(eq=False, slots=True)
class RolloutState:
    """An episode from the start of its environment to its finished trajectory."""

    problem: Problem
    seed: int
    group_seed: int = 0
    #: Name under which an engine may keep keys and values between turns; "" for a single turn.
    session: str = ""
    corrupted_images: Shown | None = None  # replace those of the problem; None: no corruption

    # The environment.
    env: EnvHandle | None = None  # None before the start and after the end
    start_time: float | None = None  # in seconds of the event loop's clock; None: not started
    #: The start of the environment, which returns the first observation.
    starting: "asyncio.Task[Observation] | None" = None
    error: Exception | None = None  # the reason why it can't be played

    # The current turn.
    first_observation: Observation | None = None  # as the model sees it, perhaps cut
    #: The request for the current answer. None: the environment started too late to share the
    #: first request of other episodes.
    request: Request | None = None
    completion: "asyncio.Future[Completion] | None" = None  # None: the request is not submitted
    sample_index: int = 0  # which sample of the completion is this episode's

    # The trajectory so far.
    sequences: list[TokenSequence] = field(default_factory=list)
    #: Size of the sequences' prefix tree, as `types.distinct_tokens`, kept up to date: to count it
    #: anew for each of an agent's thousand calls takes the square of their number.
    distinct_tokens: int = 0
    turns: list[Turn] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)  # after each reply
    parts: dict[str, float] = field(default_factory=dict)  # components of the reward, by name
    metrics: dict[str, float] = field(default_factory=dict)
    correct: bool = False
    status: str = "error"
    cuts: int = 0  # the number of its prompts and observations that were cut to fit
    ungraded: str = ""  # why reward functions could not grade the answer
    #: The answer to be scored by the run's reward functions; None: the environment scored it.
    answer_to_score: str | None = None
    scores: tuple[float | None, ...] = ()  # the values of the reward functions, if they were asked
    environment_reward: float | None = None  # before the reward functions added to it
    token_rewards: tuple[tuple[int, int, float], ...] = ()  # see `Trajectory.token_rewards`
    teacher_prompt: tuple[int, ...] = ()  # see `Trajectory.teacher_prompt`
    fault: str | None = None  # "kind: reason" why it failed
    penalized: bool = False  # whether it failed and is trained on with the least reward

    def add_sample(
        self, request: Request, sample: Sample, processor: Processor, piece: bool = False
    ) -> None:
        """Add an answer, or (`piece`) a further piece of the last answer.

        If the request's prompt extends a sequence, that sequence is extended. Otherwise the history
        was rewritten and a new sequence begins. Earlier answers carry no loss in the new one: each
        sampled token carries loss once, in the context in which it was sampled.
        """
        start = self.turns.pop().start if piece else len(request.ids)
        sequence = TokenSequence.of_sample(request, sample)
        turn = Turn(0, start, len(sequence.ids), sample.finish_reason, 0.0)
        self.add_turn(sequence, turn, processor, len(request.ids))

    def add_turn(
        self, sequence: TokenSequence, turn: Turn, processor: Processor, prompt_length: int
    ) -> None:
        """Add an answer as `turn`, the end of `sequence`, which may extend an earlier sequence.

        Args:
            prompt_length: the number of the sequence's first tokens that were not sampled now.
        """
        processor.image_tokens.assert_placed(sequence)
        shared = self._shared_lengths(sequence, processor.placeholder_ids)
        self.distinct_tokens += len(sequence.ids) - max(shared, default=0)
        # The earlier sequences with which the prompt begins; this one extends the last of them. One
        # that is equal beyond the prompt was sampled apart, and its tokens count for themselves.
        prefix_numbers = [
            n
            for n, earlier in enumerate(self.sequences)
            if shared[n] == len(earlier.ids) <= prompt_length
        ]
        number = prefix_numbers[-1] if prefix_numbers else len(self.sequences)
        if not prefix_numbers:
            self.sequences.append(sequence)
        else:
            earlier = self.sequences[number]
            for name, array in earlier.arrays().items():
                # Every token keeps the values with which it was sampled, although the engine may
                # report others for the prompt, under newer weights. Only where a column is 0 the
                # engine reported nothing, such as experts of the last token: that comes later.
                value_axes = tuple(range(1, array.ndim))
                is_known = array.any(value_axes, keepdims=True) if name in earlier.columns else True
                np.copyto(sequence.arrays()[name][: len(earlier.ids)], array, where=is_known)
            self.sequences[number] = sequence
        self.turns.append(replace(turn, sequence=number))

    def tokens(self, request: Request, placeholder_ids: TokenIds) -> int:
        """Return the length of the trajectory with this request's prompt, in tokens.

        A prefix that several sequences share counts once.
        """
        return (
            self.distinct_tokens + len(request.ids) - self.shared_tokens(request, placeholder_ids)
        )

    def shared_tokens(self, request: Request, placeholder_ids: TokenIds) -> int:
        """Return how many of a request's tokens the trajectory has already."""
        no_sample = Sample(
            np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), ""
        )
        prompt = TokenSequence.of_sample(request, no_sample)
        return max(self._shared_lengths(prompt, placeholder_ids), default=0)

    def _shared_lengths(self, sequence: TokenSequence, placeholder_ids: TokenIds) -> list[int]:
        """Return how many tokens a sequence shares with each of those so far."""
        return [earlier.shared_length(sequence, placeholder_ids) for earlier in self.sequences]

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
        self.environment_reward = sum(turn.reward for turn in self.turns)
        self.scores = score.values
        self.turns[-1] = replace(self.turns[-1], reward=self.turns[-1].reward + score.reward)
        self.parts |= score.parts | (
            {UNGRADABLE: float(len(score.ungraded))} if score.ungraded else {}
        )
        self.correct, self.ungraded = score.correct, "; ".join(score.ungraded)

    def add_spans(
        self, spans: Sequence[tuple[int, int, float]], response: str, processor: Processor
    ) -> None:
        """Give the reward of each part of the last answer to the part's last sampled token.

        Args:
            spans: (start, end, value) in characters of `response`.
            response: the text that the reward functions have read.

        Raises:
            ValueError: a span ends behind the response, or the response is not the answer's text.
        """
        ids, turn = self.answer, self.turns[-1]
        if spans and processor.decode(ids) != response:
            raise ValueError(
                "it returned spans, but the environment gave reward functions another text than "
                "the policy's answer"
            )
        sampled = np.flatnonzero(self.sequences[turn.sequence].loss_mask[turn.start : turn.end])
        rewards = []
        for start, end, value in spans:
            if end > len(response):
                raise ValueError(
                    f"it returned the span ({start}, {end}) of a response of {len(response)} "
                    "characters"
                )
            # The first token with which the text reaches the end of the span.
            last = bisect.bisect_left(
                range(1, len(ids)), end, key=lambda n: len(processor.decode(ids[:n]))
            )
            index = max(0, int(np.searchsorted(sampled, last, side="right")) - 1)
            rewards.append((len(self.turns) - 1, index, value))
        self.token_rewards = tuple(rewards)

    def trajectory(self, logprobs: bool, reward_min: float) -> Trajectory:
        """Return the finished trajectory.

        Args:
            logprobs: whether to keep the engine's logprobs.
            reward_min: the reward if the trajectory is penalized, or is scored 0.
        """
        sequences = tuple(s if logprobs else replace(s, logprobs=None) for s in self.sequences)
        if self.fault is not None and self.penalized:
            # Earlier rewards are dropped: the last turn carries the whole reward.
            turns = [replace(turn, reward=0.0) for turn in self.turns]
            turns[-1] = replace(turns[-1], reward=reward_min)
            return Trajectory(
                sequences,
                tuple(turns),
                reward_min,
                {},
                "error",
                metrics=self.metrics,
                cuts=self.cuts,
                penalized=self.fault,
                base_reward=reward_min,
                teacher_prompt=self.teacher_prompt,
            )
        if self.fault is not None:
            return Trajectory(
                sequences,
                tuple(self.turns),
                0.0,
                {UNGRADABLE: 1.0} if self.ungraded else {},
                "error",
                False,
                self.fault,
                cuts=self.cuts,
                ungraded=self.ungraded,
            )
        reward = base_reward = sum(turn.reward for turn in self.turns)
        if self.environment_reward is not None:
            base_reward = self.environment_reward + reward_min
        return Trajectory(
            sequences,
            tuple(self.turns),
            reward,
            self.parts,
            self.status,
            self.correct,
            metrics=self.metrics,
            cuts=self.cuts,
            ungraded=self.ungraded,
            scores=self.scores,
            base_reward=base_reward,
            teacher_prompt=self.teacher_prompt,
            token_rewards=self.token_rewards,
        )


@dataclass(eq=False)
class RolloutGroup:
    """The episodes of a group, and the requests for their first answers.

    Episodes that started in time and with the same messages share a request, so that the engine
    prefills their prompt once.
    """

    problem: Problem
    sampling: SamplingParams
    episodes: list[RolloutState]
    #: (request, the episodes that share it: one for each of the request's samples)
    first_requests: list[tuple[Request, list[RolloutState]]] = field(default_factory=list)
    corrupted_images: Shown | None = None  # of the episodes that see corrupted images
    trained: bool = True  # whether the group is sampled for training

    def share_request(
        self, request: Request, observation: Observation, episodes: list[RolloutState]
    ) -> None:
        """Add a request for the first answers of episodes, with their seeds and sessions.

        Args:
            observation: the first observation as the request shows it.
        """
        seeds = tuple(episode.seed for episode in episodes)
        sessions = tuple(episode.session for episode in episodes if episode.session)
        request = replace(request, seeds=seeds, sessions=sessions)
        self.first_requests.append((request, episodes))
        for index, episode in enumerate(episodes):
            episode.first_observation = observation
            episode.request, episode.sample_index = request, index

    def finished(
        self, group_id: str, placeholder_ids: TokenIds, *, logprobs: bool, reward_min: float
    ) -> Group:
        """Return the group of the finished trajectories.

        Args:
            logprobs, reward_min: as in `RolloutState.trajectory`.
        """
        trajectories: list[Trajectory] = []
        for episode in self.episodes:
            trajectory = episode.trajectory(logprobs, reward_min)
            # Trained on the original images, whatever the policy saw.
            if episode.corrupted_images:
                trajectory = episode.corrupted_images.undone(trajectory)
            trajectories.append(trajectory)
        return Group(
            group_id,
            self.problem.id,
            shared_prefix(trajectories, placeholder_ids),
            tuple(trajectories),
            self.problem.answer,
            self.corrupted_images.by_hash if self.corrupted_images else {},
            self.problem.labels,
        )


def by_first_observation(
    episodes: Sequence[RolloutState],
) -> list[tuple[Observation, list[RolloutState]]]:
    """Return the first observations of episodes that have started, with those that begin so."""
    by_observation: list[tuple[Observation, list[RolloutState]]] = []
    for episode in episodes:
        starting = episode.starting
        if starting is None or starting.cancelled() or starting.exception():
            continue
        observation = starting.result()
        # Compared, not hashed: messages are mappings, and most groups have one start.
        for first_observation, sharers in by_observation:
            if first_observation.messages == observation.messages:
                sharers.append(episode)
                break
        else:
            by_observation.append((observation, [episode]))
    return by_observation


def random_stream(seed: int, position: str) -> int:
    """Return the seed of a later turn, or of a later piece of an answer.

    Args:
        seed: of the episode, or of the answer.
        position: names the turn or piece within it.
    """
    # Python's own hash of a text differs between processes.
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
