"""Plays episodes: the engine answers, the environment replies, until the trajectory is complete.

A group is started (`start_group`), its first requests are submitted (`submit_first_requests`) and
its episodes are played side by side (`play_group`). `Player._play_turns` is the turn loop: receive
a reply, take a step of the environment, build and submit the next request. An episode's
`RolloutState` goes through its hands: `GenerationClient` asks the engine, `EnvExecutor` runs the
environment, `RequestBuilder` builds requests.

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
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from rlinf_vl.data.corruption import Corruption, Shown
from rlinf_vl.data.unusable import TRAJECTORY_TOO_LONG, ImageError, RowError
from rlinf_vl.envs import EnvMaker, StepResult
from rlinf_vl.envs.registry import SINGLE
from rlinf_vl.errors import never_reported
from rlinf_vl.observe.spans import span
from rlinf_vl.rewards import GradingError
from rlinf_vl.rollout.episode.env_executor import (
    CallTimeout,
    EnvExecutor,
    EnvHandle,
    HasProcess,
    ThreadExecutor,
)
from rlinf_vl.rollout.episode.env_processes import ProcessEnvMaker
from rlinf_vl.rollout.episode.faults import RolloutFault, error_text
from rlinf_vl.rollout.episode.generation_client import GenerationClient
from rlinf_vl.rollout.episode.group_player import EpisodeSettings, GroupPlayer, ScoreAnswers
from rlinf_vl.rollout.episode.loop_bridge import wait_done
from rlinf_vl.rollout.episode.observation import Observation, observe, plain_result
from rlinf_vl.rollout.episode.request_builder import NextRequest, RequestBuilder, TooLong, row_error
from rlinf_vl.rollout.episode.rollout_state import RolloutGroup, RolloutState, by_first_observation
from rlinf_vl.types import (
    ENVIRONMENT_FAULT,
    UNGRADABLE,
    Message,
    Problem,
    Request,
    SamplingParams,
)

log = logging.getLogger(__name__)

#: A group's first requests wait for more members as long as the fastest one took to start, but at
#: least so many seconds: episodes that start alike share a request, and the engine one prefill.
PATIENCE_S = 0.2
#: Seconds for which an episode waits for its environment to close; later it closes in background.
CLOSE_S = 1.0


class _Step(NamedTuple):
    """The environment's answer to a reply.

    Attributes:
        result: checked, with plain types.
        next_request: None if the episode ends.
        error: why there is no next request. It is raised once the result is recorded.
    """

    result: StepResult
    next_request: NextRequest | None = None
    error: Exception | None = None


class Player(GroupPlayer):
    """Plays groups of episodes of environments.

    Attributes:
        builder: builds the requests.
        make_env: (problem, seed, group_seed) → a new environment.
        executor: runs the calls of all environments.
    """

    def __init__(
        self,
        client: GenerationClient,
        builder: RequestBuilder,
        make_env: EnvMaker | ProcessEnvMaker,
        settings: EpisodeSettings,
        score_answers: ScoreAnswers | None = None,
        first_report: Callable[[str], bool] = never_reported,
        executor: EnvExecutor | None = None,
    ) -> None:
        """
        Args:
            score_answers: None if every environment scores its answers itself.
            first_report: as in `FaultLog`.
            executor: None for threads, with the limits of `settings`.
        """
        super().__init__(client, settings, score_answers, first_report)
        self.builder = builder
        self.make_env = make_env
        self.executor = executor or ThreadExecutor(settings.call_timeout_s)

    def close(self) -> None:
        """End the processes of environments, which are closed with their episodes."""
        if isinstance(self.make_env, ProcessEnvMaker):
            self.make_env.close()

    @property
    def hung(self) -> int:
        return self.executor.hung

    async def start_group(
        self,
        problem: Problem,
        seeds: Sequence[int],
        sampling: SamplingParams,
        group_seed: int = 0,
        corruption: Corruption | None = None,
        trained: bool = True,
        patience_s: float | None = PATIENCE_S,
    ) -> RolloutGroup:
        """Start an environment per seed, and build the requests for the first answers.

        Episodes that start too late get their own request when they are played (`play_group`).
        Cancelling this closes the environments.

        Args:
            corruption: as in `Task`.
            patience_s: as `PATIENCE_S`; None waits for all environments.
            trained: as in `RolloutGroup`.
        """
        single = self.make_env.name_of(problem) == SINGLE
        # Only an episode of several requests needs a session.
        has_session = self.settings.max_turns != 1 and not single or self.client.budget is not None
        episodes: list[RolloutState] = []
        for seed in seeds:
            session = f"{problem.id}#{next(self._session_numbers)}" if has_session else ""
            episodes.append(RolloutState(problem, seed, group_seed, session))
        group = RolloutGroup(problem, sampling, episodes, trained=trained)
        if corruption is not None:
            group.corrupted_images = Shown(corruption.view, group_seed)
            for episode in episodes[len(seeds) - corruption.samples(len(seeds)) :]:
                episode.corrupted_images = group.corrupted_images
        # A group larger than the limit starts as many as may run; the others wait for permits.
        together = episodes[: self.settings.max_concurrent]
        await self._permits.acquire(len(together))
        loop = asyncio.get_running_loop()
        start_time = loop.time()
        # The single-turn environment never blocks, but corrupting images takes a while.
        executor = None if single and corruption is None else self.executor
        for episode in episodes:
            episode.env = EnvHandle(executor)
            episode.start_time = start_time if episode in together else None
            episode.starting = asyncio.create_task(self._start_env(episode))
        try:
            starting = [episode.starting for episode in together if episode.starting]
            if patience_s is not None:
                await asyncio.wait(starting, return_when=asyncio.FIRST_COMPLETED)
                patience_s = max(patience_s, loop.time() - start_time)
            await asyncio.wait(starting, timeout=patience_s)
            started = [e for e in together if e.starting and e.starting.done()]
            # In a thread: to render and encode a long prompt takes milliseconds.
            await asyncio.to_thread(self._add_first_requests, group, started)
        except asyncio.CancelledError:
            await self.close_group(group)
            raise
        return group

    def submit_first_requests(self, groups: Sequence[RolloutGroup]) -> None:
        """Send the first requests of these groups to the engine, in one batch and in order.

        Raises:
            EngineDied.
        """
        shared = [entry for group in groups for entry in group.first_requests]
        completions = self.client.submit([request for request, _ in shared])
        for (_, episodes), completion in zip(shared, completions, strict=True):
            for episode in episodes:
                episode.completion = completion

    async def _wait_for_start(self, episode: RolloutState) -> None:
        if episode.starting is not None:
            await episode.starting

    async def _play_turns(self, group: RolloutGroup, episode: RolloutState) -> None:
        """Play turns until the environment is done or the trajectory has no room for an answer."""
        if episode.error is not None:
            raise episode.error
        assert episode.starting is not None
        first_observation = episode.starting.result()
        if episode.request is None:  # it started too late to share a request
            request, visible = await asyncio.to_thread(
                self._first_request, group, first_observation
            )
            group.share_request(request, visible, [episode])
            self._submit(episode)
        elif episode.completion is not None:
            # Shielded from this episode's end, because other episodes wait for the same answer.
            episode.completion = asyncio.shield(episode.completion)
        assert episode.first_observation is not None
        episode.cuts = int(episode.first_observation.messages != first_observation.messages)
        while True:
            reply = await self._receive_reply(episode)
            result, next_request, error = await self._step(group, episode, reply)
            episode.add_result(result)
            if result.done:
                return
            if error is not None:
                raise error
            if next_request is None:
                break
            episode.observations.append(next_request.observation)
            episode.cuts += next_request.is_cut
            if next_request.request.sampling.max_new_tokens < 1:
                break
            episode.request, episode.sample_index = next_request.request, 0
            self._submit(episode)
        episode.status = "length"

    def _submit(self, episode: RolloutState) -> None:
        """Submit an episode's request, which it shares with no other."""
        assert episode.request is not None
        (episode.completion,) = self.client.submit([episode.request])

    async def _receive_reply(self, episode: RolloutState) -> str:
        """Receive the reply of the current turn, with errors that name whose fault they are."""
        try:
            return await self.client.receive_reply(episode)
        except (RowError, ImageError) as error:
            assert episode.request is not None
            row_images = {image.hash for image in episode.problem.images}
            # An unusable image of the row is the row's fault; any other is the environment's.
            if {image.hash for image in episode.request.images} <= row_images:
                raise
            raise self._fault(
                episode.problem, f"shows an image that can't be used: {error}"
            ) from error

    async def _start_env(self, episode: RolloutState) -> Observation:
        """Make the environment, once there is a permit, and return its first observation."""
        if episode.start_time is None:
            await self._permits.acquire(1)
            episode.start_time = asyncio.get_running_loop().time()
        assert episode.env is not None
        problem = episode.problem
        to_observation = partial(self._observe_start, problem, episode.corrupted_images)
        try:
            await episode.env.make(lambda: self.make_env(problem, episode.seed, episode.group_seed))
            # The start of a process has a limit of its own, and takes nothing off the episode's.
            if isinstance(episode.env.env, HasProcess):
                episode.start_time = asyncio.get_running_loop().time()
            return await episode.env.call("start", problem, to_observation)
        except CallTimeout as error:
            raise self._fault(
                problem, f"did not start within {self.executor.timeout_s:g} s"
            ) from error
        except RowError:
            raise
        except Exception as error:
            raise self._fault(problem, f"did not start: {error_text(error)}") from error

    def _observe_start(
        self, problem: Problem, corrupted_images: Shown | None, messages: Iterable[Message]
    ) -> Observation:
        """Convert the environment's first messages to an observation."""
        messages = list(messages)
        try:
            video = self.settings.video
            return observe(messages, problem, corrupted_images, video, problem.tools)
        except Exception as error:
            # Messages that are the row's own fail by the row's fault.
            if messages == list(problem.messages):
                raise row_error(problem, error) from error
            raise

    def _first_request(
        self, group: RolloutGroup, observation: Observation
    ) -> tuple[Request, Observation]:
        """Build the request for a first answer; return it and the observation that it shows."""
        problem = group.problem
        try:
            return self.builder.first(observation, group.sampling)
        except Exception as error:  # of the chat template, the tokenizer or the image processor
            problem_error = row_error(problem, error)
            if observation.messages == problem.messages:
                raise problem_error from error
            reason = f"began with messages that make no prompt: {problem_error.reason}"
            raise self._fault(problem, reason) from error

    def _add_first_requests(self, group: RolloutGroup, episodes: Sequence[RolloutState]) -> None:
        """Build the requests for the first answers of episodes, of those that have started.

        Episodes with the same first messages share a request, with a seed each.
        """
        for observation, sharers in by_first_observation(episodes):
            try:
                with span("prepare"):
                    request, visible = self._first_request(group, observation)
            except Exception as error:
                for episode in sharers:
                    episode.error = error
                continue
            group.share_request(request, visible, sharers)

    async def _step(self, group: RolloutGroup, episode: RolloutState, reply: str) -> _Step:
        """Give the environment a reply, and build the next request from its observation.

        Both happen in one call, because every hand-over between threads costs time.
        """
        problem = episode.problem

        def read_result(result: StepResult) -> _Step:
            result = plain_result(result)
            if result.done or len(episode.turns) == self.settings.max_turns:
                return _Step(result)
            try:
                observation = observe(
                    result.messages, problem, episode.corrupted_images, self.settings.video
                )
            except Exception as error:
                raise self._unusable_reply(problem, error) from error
            try:
                return _Step(result, self._next_request(episode, observation))
            except Exception as error:
                return _Step(result, error=error)

        try:
            assert episode.env is not None
            return await episode.env.call("step", reply, read_result)
        except GradingError as error:
            log.info("%s: no verdict: %s", problem.id, error)
            episode.ungraded = str(error)
            if group.trained and self.settings.mask_ungraded:
                raise RolloutFault(f"{UNGRADABLE}: {error}") from error
            # The whole episode gets `reward_min`, whatever the rewards of earlier turns.
            earlier_reward = sum(turn.reward for turn in episode.turns[:-1])
            reward = self.settings.reward_min - earlier_reward
            return read_result(StepResult((), reward, True, {"reward_parts": {UNGRADABLE: 1.0}}))
        except (RolloutFault, CallTimeout):
            raise
        except Exception as error:
            raise self._fault(problem, f"failed: {error_text(error)}") from error

    def _next_request(self, episode: RolloutState, observation: Observation) -> NextRequest:
        """Build the request for the next turn, with errors that name the row or environment."""
        try:
            return self.builder.next(episode, observation)
        except TooLong as error:
            raise RowError(episode.problem.id, TRAJECTORY_TOO_LONG, str(error)) from error
        except Exception as error:
            raise self._unusable_reply(episode.problem, error) from error

    async def _end_episode(self, episode: RolloutState) -> None:
        """Close an episode's environment, in the background if that takes long; free its permit.

        Does nothing when called again.
        """
        env, episode.env = episode.env, None
        if env is None or episode.starting is None:
            return
        episode.starting.cancel()
        if episode.session:
            self.client.engine.end_sessions([episode.session])
        closed = env.close()
        try:
            # One that hangs is closed when its call returns, which may be never: don't wait.
            if not (env.hung or closed.done()):
                await wait_done(closed, CLOSE_S)
        finally:
            if episode.start_time is not None:
                self._permits.release()

    def _unusable_reply(self, problem: Problem, error: Exception) -> RolloutFault:
        """Return the fault of an environment whose messages make no next prompt."""
        return self._fault(problem, f"answered what can't follow: {error_text(error)}")

    def _too_slow(self, problem: Problem) -> RolloutFault:
        return self._fault(problem, f"did not answer within {self.executor.timeout_s:g} s")

    def _fault(self, problem: Problem, failure: str) -> RolloutFault:
        """Return the fault of a problem's environment; `failure` says how it failed."""
        return RolloutFault(f"{ENVIRONMENT_FAULT}: {self.make_env.name_of(problem)!r} {failure}")
