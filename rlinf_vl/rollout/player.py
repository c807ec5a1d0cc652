"""Plays episodes: the engine answers, the environment replies, until the trajectory is complete.

No Ray. Invariants:
- An error is data: if a row, image, engine request or environment fails, the trajectory ends,
  carries the reason, is counted and never trained on. Only `EngineDied` is raised. A response that
  can't be graded within the grader's limits is wrong, which is no error.
- Each turn's prompt begins with all ids before it, unless the chat template rewrites the history,
  and shows all images so far.
- Every environment that was made is closed and gets one call at a time, even after its episode was
  cancelled.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

from rlinf_vl.data.corruption import Corruption, Shown
from rlinf_vl.data.unusable import TRAJECTORY_TOO_LONG, ImageError, RowError, kind_and_reason
from rlinf_vl.engines.base import Engine, EngineDied
from rlinf_vl.envs import EnvMaker, StepResult
from rlinf_vl.envs.registry import SINGLE
from rlinf_vl.models.processing import Processor
from rlinf_vl.observe.spans import span
from rlinf_vl.rewards import GradingError
from rlinf_vl.rewards.scoring import Answer, Score
from rlinf_vl.rollout.answers import Answers, RolloutFault
from rlinf_vl.rollout.busy import BusyTime
from rlinf_vl.rollout.calls import Calls, CallTimeout, Places, Stage, described
from rlinf_vl.rollout.episode import Episode, Opening, Played
from rlinf_vl.rollout.fault_log import FaultLog
from rlinf_vl.rollout.inbox import done
from rlinf_vl.rollout.observation import Observation, checked, observe
from rlinf_vl.rollout.prompts import Following, Prompts, TooLong, row_error
from rlinf_vl.rollout.renderer import Renderer
from rlinf_vl.rollout.thoughts import ThoughtBudget
from rlinf_vl.types import (
    ENVIRONMENT_FAULT,
    UNGRADABLE,
    Group,
    Message,
    Problem,
    Request,
    SamplingParams,
    Trajectory,
)

log = logging.getLogger(__name__)

#: A group's first requests wait for more members as long as the fastest one took to start, but at
#: least so many seconds: episodes that start alike share a request, and the engine one prefill.
PATIENCE_S = 0.2
#: Seconds for which an episode waits for its environment to close; later it closes in background.
CLOSE_S = 1.0


class _SharedRequest(NamedTuple):
    """A first request of a group, for all episodes that start with the same messages.

    Attributes:
        messages: the messages of the environment.
        request_index: the index in `Opening.requests`.
        visible: the observation as the request shows it, perhaps cut.
    """

    messages: Sequence[Message]
    request_index: int
    visible: Observation


@dataclass(frozen=True, eq=False)
class Player:
    """Plays groups of episodes with one engine.

    Attributes:
        make_env: (problem, seed, group_seed) → a new environment.
        seq_length: limit on the tokens of an episode.
        max_prompt_length: limit on the tokens of an episode's first prompt.
        reward_min: reward of an episode whose response can't be graded, or that is penalized.
        return_logprobs: whether trajectories have the engine's logprobs.
        alive_timeout_s, thought_budget: as in `Answers`.
        max_turns: limit on the answers of an episode.
        max_concurrent: limit on the episodes at a time. A group acquires the places for all its
            members at once.
        turn_timeout_s: limit on a call of an environment.
        episode_timeout_s: limit on an episode, from its start to its end.
        overlong: `data.overlong`: whether a prompt beyond `max_prompt_length`, or an observation
            that leaves no room for an answer, is dropped, cut or an error.
        penalize_faults: whether an episode whose environment failed is trained on with
            `reward_min` (`rollout.faults`). Otherwise, and in groups that are not trained on, it
            is an error.
        score: computes the scores of a group's answers, of those that environments leave to the
            run's reward functions.
        first_report: as in `FaultLog`.
    """

    engine: Engine
    renderer: Renderer
    processor: Processor
    make_env: EnvMaker
    seq_length: int
    max_prompt_length: int
    reward_min: float
    return_logprobs: bool
    alive_timeout_s: float
    max_turns: int | None = None
    max_concurrent: int | None = None
    turn_timeout_s: float = 60.0
    episode_timeout_s: float | None = None
    thought_budget: ThoughtBudget | None = None
    overlong: str = "drop"
    penalize_faults: bool = False
    score: Callable[[Problem, Sequence[Answer]], Awaitable[Sequence[Score]]] | None = None
    first_report: Callable[[str], bool] = lambda text: True

    @cached_property
    def calls(self) -> Calls:
        return Calls(min(self.turn_timeout_s, self.episode_timeout_s or self.turn_timeout_s))

    @cached_property
    def _answers(self) -> Answers:
        return Answers(
            self.engine, self.renderer, self.processor, self.alive_timeout_s, self.thought_budget
        )

    @property
    def busy(self) -> BusyTime:
        return self._answers.busy

    @cached_property
    def prompts(self) -> Prompts:
        return Prompts(
            self.renderer,
            self.processor.image_token_id,
            self.seq_length,
            self.max_prompt_length,
            self.overlong,
        )

    @cached_property
    def _places(self) -> Places:
        return Places(self.max_concurrent)

    @cached_property
    def _faults(self) -> FaultLog:
        return FaultLog(self.first_report)

    @cached_property
    def _session_numbers(self) -> "itertools.count[int]":
        return itertools.count()

    async def open(
        self,
        problem: Problem,
        seeds: Sequence[int],
        sampling: SamplingParams,
        group_seed: int = 0,
        corruption: Corruption | None = None,
        patience_s: float | None = PATIENCE_S,
        trained: bool = True,
    ) -> Opening:
        """Start an environment per seed, and build the requests for the first answers.

        Episodes that start too late get their own request when they are played (`play`).
        Cancelling this closes the environments.

        Args:
            corruption: as in `Task`.
            patience_s: as `PATIENCE_S`; None waits for all environments.
            trained: as in `Opening`.
        """
        single = self.make_env.name_of(problem) == SINGLE
        # Only an episode of several requests needs a session.
        has_session = self.max_turns != 1 and not single or self.thought_budget is not None
        sessions = [
            f"{problem.id}#{next(self._session_numbers)}" if has_session else "" for _ in seeds
        ]
        episodes = list(map(Episode, seeds, [group_seed] * len(seeds), sessions))
        opening = Opening(problem, sampling, episodes, trained=trained)
        if corruption is not None:
            opening.corrupted_images = Shown(corruption, group_seed)
            for episode in opening.episodes[len(seeds) - corruption.samples(len(seeds)) :]:
                episode.corrupted_images = opening.corrupted_images
        # A group larger than the limit starts as many as may run; the others wait for places.
        together = opening.episodes[: self.max_concurrent]
        await self._places.acquire(len(together))
        loop = asyncio.get_running_loop()
        start_time = loop.time()
        # The single-turn environment never blocks, but corrupting images takes a while.
        calls = None if single and corruption is None else self.calls
        for episode in opening.episodes:
            episode.stage = Stage(calls)
            episode.start_time = start_time if episode in together else None
            episode.starting = asyncio.create_task(self._start(episode, problem))
        try:
            starting = [episode.starting for episode in together if episode.starting]
            if patience_s is not None:
                await asyncio.wait(starting, return_when=asyncio.FIRST_COMPLETED)
                patience_s = max(patience_s, loop.time() - start_time)
            await asyncio.wait(starting, timeout=patience_s)
            started = [e for e in together if e.starting and e.starting.done()]
            await asyncio.to_thread(self._add_first_requests, opening, started)
        except asyncio.CancelledError:
            await self.close(opening)
            raise
        return opening

    async def close(self, opening: Opening) -> None:
        """Close the environments of a group that are still open."""
        await asyncio.gather(*map(self._end, opening.episodes))

    def submit(self, openings: Sequence[Opening]) -> None:
        """Send the first requests of these groups to the engine, in one batch and in order.

        Raises:
            EngineDied.
        """
        answers = iter(
            self._answers.ask([request for opening in openings for request in opening.requests])
        )
        for opening in openings:
            opening.answers += [next(answers) for _ in opening.requests]

    async def play(self, group_id: str, opening: Opening) -> Group:
        """Play the episodes of a group whose first requests are submitted; return the group.

        Raises:
            EngineDied: all episodes end.
        """
        plays = [
            asyncio.ensure_future(self._episode(opening, episode)) for episode in opening.episodes
        ]
        try:
            played = await asyncio.gather(*plays)
            to_score = [p for p in played if p.fault is None and p.answer_to_score is not None]
            await self._score(opening.problem, to_score)
        finally:
            for future in (*plays, *opening.answers):
                future.cancel()
            await asyncio.gather(*plays, return_exceptions=True)
        trajectories: list[Trajectory] = []
        for episode, episode_played in zip(opening.episodes, played, strict=True):
            trajectory = episode_played.trajectory(self.return_logprobs, self.reward_min)
            corrupted_images = episode.corrupted_images
            # Trained on the original images, whatever the policy saw.
            trajectories.append(
                corrupted_images.undone(trajectory) if corrupted_images else trajectory
            )
        # The prefix that all sequences share lies within the first prompts.
        sequences = [sequence for trajectory in trajectories for sequence in trajectory.sequences]
        lengths = [trajectory.turns[0].start for trajectory in trajectories if trajectory.turns]
        for sequence in sequences[1:]:
            lengths.append(sequences[0].shared_length(sequence, self.processor.image_token_id))
        problem = opening.problem
        return Group(
            group_id,
            problem.id,
            min(lengths, default=0),
            tuple(trajectories),
            problem.answer,
            opening.corrupted_images.by_hash if opening.corrupted_images else {},
            problem.labels,
        )

    async def _score(self, problem: Problem, played: Sequence[Played]) -> None:
        """Score the answers that environments have left to the run's reward functions."""
        if not played:
            return
        assert self.score is not None, (
            "an environment leaves its answer to reward functions, and there are none"
        )
        answers = [p.scorable_answer(self.processor) for p in played]
        for trajectory, score in zip(played, await self.score(problem, answers), strict=True):
            for reason in score.ungraded:
                log.info("%s: no verdict, which scores 0: %s", problem.id, reason)
            if score.fault is not None:
                trajectory.fault = f"{ENVIRONMENT_FAULT}: the reward function {score.fault}"
                log.warning("%s: %s", problem.id, trajectory.fault)
            trajectory.add_score(score)

    async def _episode(self, opening: Opening, episode: Episode) -> Played:
        """Play one episode to its end, within its time limit; a failure is recorded in it."""
        played = Played()
        try:
            if episode.starting is not None:
                await episode.starting
            deadline = None
            if self.episode_timeout_s is not None:
                deadline = (episode.start_time or 0.0) + self.episode_timeout_s
            limit = asyncio.timeout_at(deadline)
            try:
                async with limit:
                    await self._turns(opening, episode, played)
            except TimeoutError as error:
                if not limit.expired():
                    raise
                reason = f"was not done within rollout.episode_timeout={self.episode_timeout_s:g} s"
                raise self._fault(opening.problem, reason) from error
        except EngineDied:
            raise
        except Exception as error:
            if isinstance(error, CallTimeout):
                error = self._fault(
                    opening.problem, f"did not answer within {self.calls.timeout_s:g} s"
                )
            self._faults.add(opening.problem.id, error)
            played.fault = (
                str(error) if isinstance(error, RolloutFault) else ": ".join(kind_and_reason(error))
            )
            environment_failed = played.fault.startswith(f"{ENVIRONMENT_FAULT}: ")
            # Without a turn there is no token to train on.
            can_train = opening.trained and environment_failed and bool(played.turns)
            played.penalized = self.penalize_faults and can_train
        finally:
            await self._end(episode)
        return played

    async def _turns(self, opening: Opening, episode: Episode, played: Played) -> None:
        """Play turns until the environment is done or the trajectory has no room for an answer."""
        problem = opening.problem
        if episode.error is not None:
            raise episode.error
        assert episode.stage is not None and episode.starting is not None
        start = episode.starting.result()
        if episode.request_index is None:  # it started too late to share a request
            request, episode.first_observation = await asyncio.to_thread(
                self._first_request, problem, start, opening.sampling
            )
            sessions = (episode.session,) if episode.session else ()
            request = replace(request, seeds=(episode.seed,), sessions=sessions)
            (answer,), sample_index = self._answers.ask([request]), 0
        else:
            request, sample_index = opening.requests[episode.request_index], episode.sample_index
            # Shielded from this episode's end, because other episodes wait for the same answer.
            answer = asyncio.shield(opening.answers[episode.request_index])
        assert episode.first_observation is not None
        played.cuts = int(episode.first_observation.messages != start.messages)
        while True:
            try:
                reply = await self._answers.draw(episode, played, request, answer, sample_index)
            except (RowError, ImageError) as error:
                # An unusable image of the row is the row's fault; any other is the environment's.
                if {image.hash for image in request.images} <= {
                    image.hash for image in problem.images
                }:
                    raise
                raise self._fault(problem, f"shows an image that can't be used: {error}") from error
            result, following = await self._step(episode, reply, problem, played, request)
            played.add_result(result)
            if result.done:
                return
            if isinstance(following, Exception):
                raise following
            if following is None:
                break
            played.observations.append(following.observation)
            played.cuts += following.cut
            request, sample_index = following.request, 0
            if request.sampling.max_new_tokens < 1:
                break
            (answer,) = self._answers.ask([request])
        played.status = "length"

    async def _start(self, episode: Episode, problem: Problem) -> Observation:
        """Make the environment, once there is a place for it, and return its first observation."""
        if episode.start_time is None:
            await self._places.acquire(1)
            episode.start_time = asyncio.get_running_loop().time()
        assert episode.stage is not None
        first_observation = partial(self._observe_start, problem, episode.corrupted_images)
        try:
            await episode.stage.make(
                lambda: self.make_env(problem, episode.seed, episode.group_seed)
            )
            return await episode.stage.ask("start", problem, first_observation)
        except CallTimeout as error:
            raise self._fault(
                problem, f"did not start within {self.calls.timeout_s:g} s"
            ) from error
        except RowError:
            raise
        except Exception as error:
            raise self._fault(problem, f"did not start: {described(error)}") from error

    def _observe_start(
        self, problem: Problem, corrupted_images: Shown | None, messages: Iterable[Message]
    ) -> Observation:
        """Convert the environment's first messages to an observation."""
        messages = list(messages)
        try:
            return observe(messages, problem, corrupted_images)
        except Exception as error:
            # Messages that are the row's own fail by the row's fault.
            if messages == list(problem.messages):
                raise row_error(problem, error) from error
            raise

    def _first_request(
        self, problem: Problem, observation: Observation, sampling: SamplingParams
    ) -> tuple[Request, Observation]:
        """Build the request for a first answer; return it and the observation that it shows."""
        try:
            return self.prompts.first(observation, sampling)
        except Exception as error:  # of the chat template, the tokenizer or the image processor
            problem_error = row_error(problem, error)
            if observation.messages == problem.messages:
                raise problem_error from error
            reason = f"began with messages that make no prompt: {problem_error.reason}"
            raise self._fault(problem, reason) from error

    def _add_first_requests(self, opening: Opening, episodes: Sequence[Episode]) -> None:
        """Build the requests for the first answers of episodes, of those that have started.

        Episodes with the same first messages share a request, with a seed each.
        """
        shared_requests: list[_SharedRequest] = []
        for episode in episodes:
            if (
                episode.starting is None
                or episode.starting.cancelled()
                or episode.starting.exception()
            ):
                continue
            observation = episode.starting.result()
            try:
                equal = (
                    shared for shared in shared_requests if shared.messages == observation.messages
                )
                shared_request = next(equal, None)
                if shared_request is None:
                    with span("prepare"):
                        request, visible = self._first_request(
                            opening.problem, observation, opening.sampling
                        )
                    shared_request = _SharedRequest(
                        observation.messages, len(opening.requests), visible
                    )
                    opening.requests.append(request)
                    shared_requests.append(shared_request)
            except Exception as error:
                episode.error = error
                continue
            episode.first_observation = shared_request.visible
            index = shared_request.request_index
            request = opening.requests[index]
            episode.request_index, episode.sample_index = index, len(request.seeds)
            sessions = (*request.sessions, episode.session) if episode.session else ()
            opening.requests[index] = replace(
                request, seeds=(*request.seeds, episode.seed), sessions=sessions
            )

    async def _step(
        self, episode: Episode, answer: str, problem: Problem, played: Played, request: Request
    ) -> tuple[StepResult, Following | Exception | None]:
        """Give the environment an answer, and build the next request from its reply.

        Both happen in one call, because every hand-over between threads costs time.

        Args:
            answer: the text after the thoughts.
            request: the request for this answer.

        Returns:
            (the checked result, the next request, or None if the episode ends, or the error that
            prevents a next request). An error is returned so that the result is recorded first.
        """

        def read_result(result: StepResult) -> tuple[StepResult, Following | Exception | None]:
            result = checked(result)
            if result.done or len(played.turns) == self.max_turns:
                return result, None
            try:
                observation = observe(result.messages, problem, episode.corrupted_images)
            except Exception as error:
                raise self._fault(
                    problem, f"answered what can't follow: {described(error)}"
                ) from error
            try:
                return result, self._next_request(problem, episode, played, request, observation)
            except Exception as error:
                return result, error

        try:
            assert episode.stage is not None
            return await episode.stage.ask("step", answer, read_result)
        except GradingError as error:
            log.info("%s: no verdict, so the answer is wrong: %s", problem.id, error)
            # The whole episode gets `reward_min`, whatever the rewards of earlier turns.
            earlier_reward = sum(turn.reward for turn in played.turns[:-1])
            reward = self.reward_min - earlier_reward
            return read_result(StepResult((), reward, True, {"reward_parts": {UNGRADABLE: 1.0}}))
        except (RolloutFault, CallTimeout):
            raise
        except Exception as error:
            raise self._fault(problem, f"failed: {described(error)}") from error

    def _next_request(
        self,
        problem: Problem,
        episode: Episode,
        played: Played,
        last_request: Request,
        observation: Observation,
    ) -> Following:
        """Build the request for the next turn, with errors that name the row or environment."""
        try:
            return self.prompts.next(episode, played, last_request, observation)
        except TooLong as error:
            raise RowError(problem.id, TRAJECTORY_TOO_LONG, str(error)) from error
        except Exception as error:
            raise self._fault(problem, f"answered what can't follow: {described(error)}") from error

    async def _end(self, episode: Episode) -> None:
        """Close an episode's environment, in the background if that takes long; free its place.

        Does nothing when called again.
        """
        stage, episode.stage = episode.stage, None
        if stage is None or episode.starting is None:
            return
        episode.starting.cancel()
        if episode.session:
            self.engine.end_sessions([episode.session])
        closed = stage.close()
        try:
            # One that hangs is closed when its call returns, which may be never: don't wait.
            if not (stage.hung or closed.done()):
                await done(closed, CLOSE_S)
        finally:
            if episode.start_time is not None:
                self._places.release()

    def _fault(self, problem: Problem, failure: str) -> RolloutFault:
        """Return the fault of a problem's environment; `failure` says how it failed."""
        return RolloutFault(f"{ENVIRONMENT_FAULT}: {self.make_env.name_of(problem)!r} {failure}")
