"""Episodes: an environment and an engine in turn, until a `Trajectory` is there. No Ray.

Invariants:
- An error is data: a row, image, engine or environment that fails ends its trajectory, which carries the reason, is counted and
  never trained on. Only `EngineDied` is raised. A response that can't be graded within the grader's limits is wrong, no error.
- Each turn's prompt begins with all ids before it, unless the chat template rewrites history, and shows all images so far.
- Every environment that was made is closed, and gets one call at a time, also where nobody waits any more.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

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
)

log = logging.getLogger(__name__)

#: A group's first requests wait for members as long again as its first member took to start, and at least so many seconds.
PATIENCE_S = 0.2
#: Seconds that a trajectory waits for its environment to be closed, which then goes on without it.
CLOSE_S = 1.0


@dataclass(frozen=True, eq=False)
class Player:
    """
    Attributes:
        make_env: (problem, seed, group_seed) → a new environment.
        seq_length: most tokens of an episode; `max_prompt_length`: most tokens that it may begin with.
        reward_min: reward of an episode whose response can't be graded, or that is penalized.
        score: the scores of a group's answers to a problem, of those that environments leave to the run's reward functions.
        return_logprobs: whether trajectories have the engine's logprobs.
        max_turns: most answers of an episode.
        max_concurrent: most episodes under way; a group that starts takes places for all its members at once.
        turn_timeout_s, episode_timeout_s: for a call of an environment, and for an episode from its start to its end.
        alive_timeout_s, thought_budget: of `Answers`.
        penalize_faults: whether an episode whose environment failed is trained on, with `reward_min`, or masked
            (`rollout.faults`). Where nothing is trained, as in a validation, it is an error in either case.
        overlong: what becomes of a prompt beyond `max_prompt_length`, and of an observation that leaves no room: `data.overlong`.
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

    @cached_property
    def calls(self) -> Calls:
        return Calls(min(self.turn_timeout_s, self.episode_timeout_s or self.turn_timeout_s))

    @cached_property
    def _answers(self) -> Answers:
        return Answers(self.engine, self.renderer, self.processor, self.alive_timeout_s, self.thought_budget)

    @property
    def busy(self) -> BusyTime:
        return self._answers.busy

    @cached_property
    def prompts(self) -> Prompts:
        limits = self.seq_length, self.max_prompt_length, self.overlong
        return Prompts(self.renderer, self.processor.image_token_id, *limits)

    @cached_property
    def _places(self) -> Places:
        return Places(self.max_concurrent)

    @cached_property
    def _faults(self) -> FaultLog:
        return FaultLog()

    @cached_property
    def _numbers(self) -> "itertools.count[int]":
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
        """Start an environment for each seed, and make requests for the first answers of those that start in time.

        `corruption`: of `Task`. `trained`: of `Opening`. `patience_s`: see `PATIENCE_S`; None waits for all. Cancelling it
        closes the environments.
        """
        single = self.make_env.name_of(problem) == SINGLE
        goes_on = self.max_turns != 1 and not single or self.thought_budget is not None
        names = [f"{problem.id}#{next(self._numbers)}" if goes_on else "" for _ in seeds]
        episodes = list(map(Episode, seeds, [group_seed] * len(seeds), names))
        opening = Opening(problem, sampling, episodes, trained=trained)
        if corruption is not None:
            opening.shown = Shown(corruption, group_seed)
            for episode in opening.episodes[len(seeds) - corruption.samples(len(seeds)) :]:
                episode.shown = opening.shown
        together = opening.episodes[: self.max_concurrent]
        await self._places.take(len(together))
        loop = asyncio.get_running_loop()
        begun = loop.time()
        for episode in opening.episodes:
            episode.stage = Stage(None if single and corruption is None else self.calls)  # corrupting takes a while
            episode.begun = begun if episode in together else None
            episode.starting = asyncio.create_task(self._start(episode, problem))
        try:
            starting = [episode.starting for episode in together if episode.starting]
            if patience_s is not None:
                await asyncio.wait(starting, return_when=asyncio.FIRST_COMPLETED)
                patience_s = max(patience_s, loop.time() - begun)
            await asyncio.wait(starting, timeout=patience_s)
            await asyncio.to_thread(self._ask, opening, [e for e in together if e.starting and e.starting.done()])
        except asyncio.CancelledError:
            await self.close(opening)
            raise
        return opening

    async def close(self, opening: Opening) -> None:
        """Close what is not closed yet of its environments."""
        await asyncio.gather(*map(self._end, opening.episodes))

    def submit(self, openings: Sequence[Opening]) -> None:
        """Send the first requests of these groups to the engine, at once and in order. Raises EngineDied."""
        answers = iter(self._answers.ask([request for opening in openings for request in opening.requests]))
        for opening in openings:
            opening.answers += [next(answers) for _ in opening.requests]

    async def play(self, group_id: str, opening: Opening) -> Group:
        """The group of an opening whose requests are submitted.

        Raises:
            EngineDied: all episodes end.
        """
        plays = [asyncio.ensure_future(self._episode(opening, episode)) for episode in opening.episodes]
        try:
            played = await asyncio.gather(*plays)
            await self._score(opening.problem, [p for p in played if p.fault is None and p.left is not None])
        finally:
            for running in (*plays, *opening.answers):
                running.cancel()
            await asyncio.gather(*plays, return_exceptions=True)
        trajectories = [p.trajectory(self.return_logprobs, self.reward_min) for p in played]
        pairs = zip(opening.episodes, trajectories, strict=True)
        trajectories = [episode.shown.undone(t) if episode.shown else t for episode, t in pairs]
        sequences = [sequence for trajectory in trajectories for sequence in trajectory.sequences]
        shared = [trajectory.turns[0].start for trajectory in trajectories if trajectory.turns]
        shared += [sequences[0].shared_length(other, self.processor.image_token_id) for other in sequences[1:]]
        seen = opening.shown.by_hash if opening.shown else {}
        problem, prefix = opening.problem, min(shared, default=0)
        return Group(group_id, problem.id, prefix, tuple(trajectories), problem.answer, seen, problem.labels)

    async def _score(self, problem: Problem, played: Sequence[Played]) -> None:
        """Have the answers scored that environments have left to the run's reward functions."""
        if not played:
            return
        assert self.score is not None, "an environment leaves its answer to reward functions, and there are none"
        for one, score in zip(
            played, await self.score(problem, [p.to_score(self.processor) for p in played]), strict=True
        ):
            for reason in score.ungraded:
                log.info("%s: no verdict, which scores 0: %s", problem.id, reason)
            if score.fault is not None:
                one.fault = f"{ENVIRONMENT_FAULT}: the reward function {score.fault}"
                log.warning("%s: %s", problem.id, one.fault)
            one.earn(score)

    async def _episode(self, opening: Opening, episode: Episode) -> Played:
        """Sample, step, extend; until the environment is done, the budget of tokens is used up, or something fails."""
        played = Played()
        try:
            if episode.starting is not None:
                await episode.starting
            deadline = None if self.episode_timeout_s is None else (episode.begun or 0.0) + self.episode_timeout_s
            limit = asyncio.timeout_at(deadline)
            try:
                async with limit:
                    await self._turns(opening, episode, played)
            except TimeoutError as error:
                if not limit.expired():
                    raise
                late = f"was not done within rollout.episode_timeout={self.episode_timeout_s:g} s"
                raise self._fault(opening.problem, late) from error
        except EngineDied:
            raise
        except Exception as error:
            if isinstance(error, CallTimeout):
                error = self._fault(opening.problem, f"did not answer within {self.calls.timeout_s:g} s")
            self._faults.add(opening.problem.id, error)
            played.fault = str(error) if isinstance(error, RolloutFault) else ": ".join(kind_and_reason(error))
            environment_failed = played.fault.startswith(f"{ENVIRONMENT_FAULT}: ")
            penalizable = opening.trained and environment_failed and bool(played.turns)
            played.penalized = self.penalize_faults and penalizable
        finally:
            await self._end(episode)
        return played

    async def _turns(self, opening: Opening, episode: Episode, played: Played) -> None:
        problem = opening.problem
        if episode.error is not None:
            raise episode.error
        assert episode.stage is not None and episode.starting is not None
        if episode.request is None:  # it has started after the others
            start = episode.starting.result()
            request, episode.opened = await asyncio.to_thread(self._request, problem, start, opening.sampling)
            request = replace(request, seeds=(episode.seed,), sessions=(episode.session,) if episode.session else ())
            (answer,), place = self._answers.ask([request]), 0
        else:
            request, place = opening.requests[episode.request], episode.place
            answer = asyncio.shield(opening.answers[episode.request])  # others wait for it, too
        assert episode.opened is not None
        played.cuts = int(episode.opened.messages != episode.starting.result().messages)
        while True:
            try:
                heard = await self._answers.draw(episode, played, request, answer, place)
            except (RowError, ImageError) as error:
                if {image.hash for image in request.images} <= {image.hash for image in problem.images}:
                    raise
                raise self._fault(problem, f"shows an image that can't be used: {error}") from error
            result, following = await self._step(episode, heard, problem, played, request)
            played.pay(result)
            if result.done:
                return
            if isinstance(following, Exception):
                raise following
            if following is None:
                break
            played.said.append(following.said)
            played.cuts += following.cut
            request, place = following.request, 0
            if request.sampling.max_new_tokens < 1:
                break
            (answer,) = self._answers.ask([request])
        played.status = "length"

    async def _start(self, episode: Episode, problem: Problem) -> Observation:
        """Make the environment and hear what it begins with; take a place for it first, unless it has one."""
        if episode.begun is None:
            await self._places.take(1)
            episode.begun = asyncio.get_running_loop().time()
        assert episode.stage is not None

        try:
            await episode.stage.make(lambda: self.make_env(problem, episode.seed, episode.group_seed))
            return await episode.stage.ask("start", problem, partial(self._seen, problem, episode.shown))
        except CallTimeout as error:
            raise self._fault(problem, f"did not start within {self.calls.timeout_s:g} s") from error
        except RowError:
            raise
        except Exception as error:
            raise self._fault(problem, f"did not start: {described(error)}") from error

    def _seen(self, problem: Problem, shown: Shown | None, messages: Iterable[Message]) -> Observation:
        messages = list(messages)
        try:
            return observe(messages, problem, shown)
        except Exception as error:
            if messages == list(problem.messages):
                raise row_error(problem, error) from error
            raise

    def _request(self, problem: Problem, said: Observation, sampling: SamplingParams) -> tuple[Request, Observation]:
        try:
            return self.prompts.first(said, sampling)
        except Exception as error:  # what the chat template, the tokenizer or the image processor refuses, too
            bad = row_error(problem, error)
            if said.messages == problem.messages:
                raise bad from error
            raise self._fault(problem, f"began with messages that make no prompt: {bad.reason}") from error

    def _ask(self, opening: Opening, episodes: Sequence[Episode]) -> None:
        """Add requests for the first answers of these episodes that have started."""
        requests: list[tuple[Observation, int, Observation]] = []  # what was said, its request, what that shows
        for episode in episodes:
            if episode.starting is None or episode.starting.cancelled() or episode.starting.exception():
                continue
            said = episode.starting.result()
            try:
                known = next((known for known in requests if known[0].messages == said.messages), None)
                if known is None:
                    with span("prepare"):
                        request, shown = self._request(opening.problem, said, opening.sampling)
                    known = said, len(opening.requests), shown
                    opening.requests.append(request)
                    requests.append(known)
            except Exception as error:
                episode.error = error
                continue
            _, number, episode.opened = known
            request = opening.requests[number]
            episode.request, episode.place = number, len(request.seeds)
            sessions = (*request.sessions, episode.session) if episode.session else ()
            opening.requests[number] = replace(request, seeds=(*request.seeds, episode.seed), sessions=sessions)

    async def _step(
        self, episode: Episode, answer: str, problem: Problem, played: Played, request: Request
    ) -> tuple[StepResult, Following | Exception | None]:
        """What the environment says to the answer to `request`, as `checked` gives it; and if the episode goes on, what follows, or
        why nothing can. All of it in one call, as what passes between threads is dear."""

        def heard(result: StepResult) -> tuple[StepResult, Following | Exception | None]:
            result = checked(result)
            if result.done or len(played.turns) == self.max_turns:
                return result, None
            try:
                said = observe(result.messages, problem, episode.shown)
            except Exception as error:
                raise self._fault(problem, f"answered what can't follow: {described(error)}") from error
            try:
                return result, self._extend(problem, episode, played, request, said)
            except Exception as error:  # after what the answer was given
                return result, error

        try:
            assert episode.stage is not None
            return await episode.stage.ask("step", answer, heard)
        except GradingError as error:
            log.info("%s: no verdict, so the answer is wrong: %s", problem.id, error)
            # The episode is worth `reward_min` in all, whatever its earlier turns were paid.
            paid = sum(turn.reward for turn in played.turns[:-1])
            return heard(StepResult((), self.reward_min - paid, True, {"reward_parts": {UNGRADABLE: 1.0}}))
        except (RolloutFault, CallTimeout):
            raise
        except Exception as error:
            raise self._fault(problem, f"failed: {described(error)}") from error

    def _extend(
        self, problem: Problem, episode: Episode, played: Played, before: Request, said: Observation
    ) -> Following:
        try:
            return self.prompts.next(episode, played, before, said)
        except TooLong as error:
            raise RowError(problem.id, TRAJECTORY_TOO_LONG, str(error)) from error
        except Exception as error:
            raise self._fault(problem, f"answered what can't follow: {described(error)}") from error

    async def _end(self, episode: Episode) -> None:
        """Close its environment, in the background if that takes long, and give its place to another. Once."""
        stage, episode.stage = episode.stage, None
        if stage is None or episode.starting is None:
            return
        episode.starting.cancel()
        if episode.session:
            self.engine.end_sessions([episode.session])
        closed = stage.close()
        try:
            if not (stage.hung or closed.done()):  # otherwise it is closed when that call returns, which may be never
                await done(closed, CLOSE_S)
        finally:
            if episode.begun is not None:
                self._places.give()

    def _fault(self, problem: Problem, what: str) -> RolloutFault:
        return RolloutFault(f"{ENVIRONMENT_FAULT}: {self.make_env.name_of(problem)!r} {what}")
