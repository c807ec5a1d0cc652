"""Plays groups of episodes side by side: their limits, scores and faults. No Ray.

`Player` plays environments, `AgentPlayer` lets agents play. An error is data: if a row, image,
engine request or environment fails, the trajectory ends, carries the reason, is counted and never
trained on. Only `EngineDied` is raised.
"""

import asyncio
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from rlinf_vl.config.schema.data import VideoConfig
from rlinf_vl.data.corruption import Corruption
from rlinf_vl.data.unusable import kind_and_reason
from rlinf_vl.engines.base import EngineDied
from rlinf_vl.errors import never_reported
from rlinf_vl.rewards.scoring import Answer, Score
from rlinf_vl.rollout.episode.env_executor import CallTimeout, Semaphore
from rlinf_vl.rollout.episode.faults import FaultLog, RolloutFault
from rlinf_vl.rollout.episode.generation_client import GenerationClient
from rlinf_vl.rollout.episode.loop_bridge import cancel_all
from rlinf_vl.rollout.episode.privileged import privileged_text, with_text
from rlinf_vl.rollout.episode.rollout_state import RolloutGroup, RolloutState
from rlinf_vl.types import ENVIRONMENT_FAULT, UNGRADABLE, Group, Problem, SamplingParams

log = logging.getLogger(__name__)

#: (problem, the group's answers that environments left to reward functions) → their scores.
ScoreAnswers = Callable[[Problem, Sequence[Answer]], Awaitable[Sequence[Score]]]


@dataclass(frozen=True, slots=True)
class EpisodeSettings:
    """Limits of episodes, and how their trajectories are recorded.

    Attributes:
        reward_min: reward of an episode whose response can't be graded, or that is penalized.
        return_logprobs: whether trajectories have the engine's logprobs.
        max_turns: limit on the answers of an episode.
        max_concurrent: limit on the episodes at a time. A group acquires the permits for all its
            members at once.
        turn_timeout_s: limit on a call of an environment.
        episode_timeout_s: limit on an episode, from its start to its end, without the start of its
            environment's process.
        mask_ungraded: whether a training episode that reward functions came to no verdict on is an
            error (`reward.ungradable`). Otherwise they score 0.
        penalize_faults: whether an episode whose environment failed is trained on with
            `reward_min` (`rollout.faults`). Otherwise, and in groups that are not trained on, it
            is an error.
        privileged_template: `algorithm.distillation.privileged_template`.
        video: `data.video`, for videos that environments and agents show.
    """

    reward_min: float = 0.0
    return_logprobs: bool = True
    max_turns: int | None = None
    max_concurrent: int | None = None
    turn_timeout_s: float = 60.0
    episode_timeout_s: float | None = None
    mask_ungraded: bool = False
    penalize_faults: bool = False
    privileged_template: str | None = None
    video: VideoConfig = field(default_factory=VideoConfig)

    @property
    def call_timeout_s(self) -> float:
        """Limit on a call of an environment: it can't be given more time than its episode has."""
        return min(self.turn_timeout_s, self.episode_timeout_s or self.turn_timeout_s)


class GroupPlayer(ABC):
    """Plays groups of episodes with one engine.

    Attributes:
        client: asks the engine.
        settings: limits of episodes.
    """

    def __init__(
        self,
        client: GenerationClient,
        settings: EpisodeSettings,
        score_answers: ScoreAnswers | None = None,
        first_report: Callable[[str], bool] = never_reported,
    ) -> None:
        """
        Args:
            score_answers: None if every episode has its score already.
            first_report: as in `FaultLog`.
        """
        self.client = client
        self.settings = settings
        self._score_answers = score_answers
        self._permits = Semaphore(settings.max_concurrent)
        self._faults = FaultLog(first_report)
        self._session_numbers = itertools.count()

    @abstractmethod
    def close(self) -> None:
        """End what the player has started for its episodes."""

    @property
    @abstractmethod
    def hung(self) -> int:
        """The number of calls of users' code that hang, each in a thread."""

    @abstractmethod
    async def start_group(
        self,
        problem: Problem,
        seeds: Sequence[int],
        sampling: SamplingParams,
        group_seed: int = 0,
        corruption: Corruption | None = None,
        trained: bool = True,
    ) -> RolloutGroup:
        """Start a group with an episode per seed. `corruption`: as in `Task`; `trained`: as in
        `RolloutGroup`."""

    @abstractmethod
    def submit_first_requests(self, groups: Sequence[RolloutGroup]) -> None:
        """Send the first requests of these groups to the engine, in one batch and in order.

        Raises:
            EngineDied.
        """

    @abstractmethod
    async def _wait_for_start(self, episode: RolloutState) -> None:
        """Wait until an episode has a permit and has begun."""

    @abstractmethod
    async def _play_turns(self, group: RolloutGroup, episode: RolloutState) -> None:
        """Play an episode until it is over."""

    @abstractmethod
    async def _end_episode(self, episode: RolloutState) -> None:
        """Free what an episode holds. Does nothing when called again."""

    @abstractmethod
    def _fault(self, problem: Problem, failure: str) -> RolloutFault:
        """Return the fault of what plays a problem; `failure` says how it failed."""

    @abstractmethod
    def _too_slow(self, problem: Problem) -> RolloutFault:
        """Return the fault of a call that took too long."""

    async def close_group(self, group: RolloutGroup) -> None:
        """End the episodes of a group that are still open."""
        await asyncio.gather(*map(self._end_episode, group.episodes))

    async def play_group(self, group_id: str, group: RolloutGroup) -> Group:
        """Play the episodes of a group, and return the group.

        Raises:
            EngineDied: all episodes end.
        """
        # Several episodes may share one; those who leave early must not cancel it for the others.
        first_completions = [episode.completion for episode in group.episodes]
        plays = [asyncio.ensure_future(self._play(group, episode)) for episode in group.episodes]
        try:
            await asyncio.gather(*plays)
            await self._score(group)
            if group.trained and self.settings.privileged_template is not None:
                await asyncio.to_thread(self._add_teacher_prompts, group)
        finally:
            await cancel_all(itertools.chain(plays, first_completions))
        return group.finished(
            group_id,
            self.client.renderer.processor.placeholder_ids,
            logprobs=self.settings.return_logprobs,
            reward_min=self.settings.reward_min,
        )

    def _add_teacher_prompts(self, group: RolloutGroup) -> None:
        """Render the prompts that the teacher sees: the episodes' own, and the privileged text."""
        text = privileged_text(group.problem, self.settings.privileged_template or "")
        prompts: dict[int, tuple[int, ...]] = {}  # by observation, which episodes share
        for episode in group.episodes:
            observation = episode.first_observation
            if observation is None or not episode.turns:
                continue
            if id(observation) not in prompts:
                messages = with_text(observation.messages, text)
                ids, _ = self.client.renderer.prompt(
                    messages, observation.images, observation.tools
                )
                prompts[id(observation)] = tuple(ids.tolist())
            episode.teacher_prompt = prompts[id(observation)]

    async def _score(self, group: RolloutGroup) -> None:
        """Score the answers that environments have left to the run's reward functions.

        A group at once, because a reward function may compare its answers.
        """
        to_score = [e for e in group.episodes if e.fault is None and e.answer_to_score is not None]
        if not to_score:
            return
        assert self._score_answers is not None, (
            "an environment leaves its answer to reward functions, and there are none"
        )
        processor = self.client.renderer.processor
        answers = [episode.scorable_answer(processor) for episode in to_score]
        # Together: a function that compares answers, or a judge that takes many, gets the group.
        scores = await self._score_answers(group.problem, answers)
        for episode, answer, score in zip(to_score, answers, scores, strict=True):
            for reason in score.ungraded:
                log.info("%s: no verdict: %s", group.problem.id, reason)
            if score.fault is not None:
                episode.fault = f"{ENVIRONMENT_FAULT}: the reward function {score.fault}"
                log.warning("%s: %s", group.problem.id, episode.fault)
            episode.add_score(score)
            try:
                episode.add_spans(score.spans, answer.response, processor)
            except ValueError as error:
                episode.fault = episode.fault or f"{ENVIRONMENT_FAULT}: a reward function: {error}"
                log.warning("%s: %s", group.problem.id, episode.fault)
            if episode.ungraded and group.trained and self.settings.mask_ungraded:
                episode.fault = episode.fault or f"{UNGRADABLE}: {episode.ungraded}"

    async def _play(self, group: RolloutGroup, episode: RolloutState) -> None:
        """Play one episode to its end, within its time limit; a failure is recorded in it."""
        timeout_s = self.settings.episode_timeout_s
        try:
            # Before the clock starts: an episode that waits for a permit is not slow.
            await self._wait_for_start(episode)
            # Counted from the start: waiting for a permit takes nothing off.
            deadline = None if timeout_s is None else (episode.start_time or 0.0) + timeout_s
            limit = asyncio.timeout_at(deadline)
            try:
                async with limit:
                    await self._play_turns(group, episode)
            except TimeoutError as error:
                if not limit.expired():
                    raise
                reason = f"was not done within rollout.episode_timeout={timeout_s:g} s"
                raise self._fault(group.problem, reason) from error
        except EngineDied:
            raise
        except Exception as error:
            self._record_fault(group, episode, error)
        finally:
            await self._end_episode(episode)

    def _record_fault(self, group: RolloutGroup, episode: RolloutState, error: Exception) -> None:
        """Record the error that ended an episode."""
        if isinstance(error, CallTimeout):
            error = self._too_slow(group.problem)
        # The log has the first of each kind; the controller counts them all.
        self._faults.add(group.problem.id, error)
        episode.fault = (
            str(error) if isinstance(error, RolloutFault) else ": ".join(kind_and_reason(error))
        )
        environment_failed = episode.fault.startswith(f"{ENVIRONMENT_FAULT}: ")
        # Without a turn there is no token to train on.
        can_train = group.trained and environment_failed and bool(episode.turns)
        episode.penalized = self.settings.penalize_faults and can_train
