"""The check of one agent: the episodes that it plays, and what each of them breaks."""

import asyncio
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from rlinf_vl.data.clips import frame_refs
from rlinf_vl.data.images import decode
from rlinf_vl.data.unusable import shorten
from rlinf_vl.engines.base import Engine
from rlinf_vl.extras.agents.contract import result_of
from rlinf_vl.extras.agents.drivers import AgentDriver, AgentFailed
from rlinf_vl.extras.agents.player import AgentPlayer
from rlinf_vl.extras.agents.session import AgentLimits
from rlinf_vl.rewards.scoring import Answer, Score
from rlinf_vl.rollout.episode.env_executor import CallTimeout
from rlinf_vl.rollout.episode.generation_client import GenerationClient
from rlinf_vl.rollout.episode.group_player import EpisodeSettings
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.tools.check.agents.observed import (
    BLOCK_S,
    LoopWatch,
    ObservedDriver,
    ObservedEndpoint,
)
from rlinf_vl.tools.check.agents.scripted_policy import ScriptedEngine, scripted_processor
from rlinf_vl.tools.check.findings import ContractCheck, unpaid_lines
from rlinf_vl.tools.check.policies import policies_for
from rlinf_vl.types import ENVIRONMENT_FAULT, Problem, Request, SamplingParams, Trajectory

#: Calls and tokens after which the endpoint ends a trajectory.
LIMITS = AgentLimits(max_calls=100, seq_length=2**18)
#: No episode begins after so many seconds, or so many agents that did not end.
MAX_SECONDS = 240.0
MAX_HUNG = 2
#: Episodes with an answer that the messages suggest; each starts an endpoint.
SUGGESTED_EPISODES = 4
#: Codes of the refusals that end a session.
REFUSALS = ("max_calls_exceeded", "context_length_exceeded")


@dataclass
class Episode:
    """One trajectory of the agent.

    Attributes:
        kind: names the policy in the report.
        trajectory: as a run would train on it.
        first_prompt: the ids of the first call and the hashes of its images; None without a call.
        returned, error: of the agent itself.
        refused: (code, message) of calls that the endpoint refused.
        duration_s: seconds from its start to its end.
    """

    kind: str
    trajectory: Trajectory
    first_prompt: tuple[bytes, tuple[str, ...]] | None
    returned: Any
    error: Exception | None
    refused: list[tuple[str | None, str]]
    duration_s: float

    @property
    def calls(self) -> int:
        """The number of calls that were answered."""
        return len(self.trajectory.turns)


@dataclass(kw_only=True)
class AgentCheck(ContractCheck):
    """The check of one agent.

    Attributes:
        driver: runs it.
        watch: watches the event loop of a function with `async def`; None for any other agent.
        episodes: those that were played.
        hung: the number of agents that did not end in time.
    """

    driver: AgentDriver
    watch: LoopWatch | None = None
    episodes: list[Episode] = field(default_factory=list)
    hung: int = 0

    def __post_init__(self) -> None:
        self._processor = scripted_processor()
        self._renderer = Renderer(self._processor)
        self._closing_endpoints: list[asyncio.Future[None]] = []

    async def play(
        self, problems: Sequence[Problem], scripts: Sequence[Sequence[str]] = ()
    ) -> None:
        """Play all episodes of each problem, those with `scripts` (`scripts_of`) first."""
        # A fixed seed: a check that has failed fails again.
        start_time, rng = time.monotonic(), random.Random(0)

        def is_over() -> bool:
            # An agent that never ends would take hours, and leave a thread each time.
            return self.hung >= MAX_HUNG or time.monotonic() - start_time > MAX_SECONDS

        for problem in problems:
            policies = policies_for(problem, rng, scripts, SUGGESTED_EPISODES)
            played: list[tuple[Episode, Callable[[str], str]]] = []
            await self._check_seeds(problem)
            for kind, policy in policies:
                if not is_over():
                    episode = await self.play_episode(problem, kind, policy, LIMITS, 1, 2)
                    played.append((episode, policy))
            if not is_over():
                await self._check_refusals(problem, played)
            if is_over():
                self.notes.append(
                    f"stopped after {MAX_HUNG} agents that did not end, or {MAX_SECONDS:.0f} s"
                )
                break
        await asyncio.gather(*self._closing_endpoints)
        self._check_history()

    async def play_episode(
        self,
        problem: Problem,
        kind: str,
        policy: Callable[[str], str],
        limits: AgentLimits,
        seed: int,
        group_seed: int,
    ) -> Episode:
        """Let the agent play one trajectory, and record what breaks the contract."""
        # A player of its own: its limits differ, and whatever the agent left running is refused.
        engine = ScriptedEngine(self._processor, policy)
        client = GenerationClient(cast(Engine, engine), self._renderer, 60.0)
        driver = ObservedDriver(self.driver, lambda: self.watch or threading.Lock())
        player = AgentPlayer(
            client,
            EpisodeSettings(),
            driver,
            limits,
            (0.0, 1.0),
            score_answers=_without_reward,
            # The report says it: no warning in the log.
            first_report=lambda text: False,
        )
        player.endpoint = endpoint = ObservedEndpoint()
        sampling = SamplingParams(max_new_tokens=2**17, stop_ids=self._processor.stop_ids)
        start_time = time.monotonic()
        group = await player.start_group(problem, [seed], sampling, group_seed)
        try:
            (trajectory,) = (await player.play_group("check-env", group)).trajectories
        finally:
            await player.close_group(group)
            player.endpoint.close()
            # uvicorn ends within 0.2 s, which the next episode need not wait for.
            self._closing_endpoints.append(asyncio.ensure_future(player.endpoint.wait_closed()))
        first_prompt = None
        if engine.requests:
            first_prompt = _prompt_key(engine.requests[0])
        # With the closing: an agent that is left running shows there.
        duration_s = time.monotonic() - start_time
        episode = Episode(
            kind,
            trajectory,
            first_prompt,
            driver.returned,
            driver.error,
            endpoint.refused,
            duration_s,
        )
        self.episodes.append(episode)
        self._check_episode(episode)
        return episode

    def _check_episode(self, episode: Episode) -> None:
        """Record what one episode breaks."""
        where, error = f"with {episode.kind}", episode.error
        has_ended = bool(episode.refused) and episode.refused[-1][0] in REFUSALS
        if isinstance(error, CallTimeout) or "did not end within" in str(error):
            self.hung += 1
            self.add_problem(
                f"it did not end within {self.driver.timeout_s:g} s (rollout.agent.timeout)", where
            )
        # The same error without a refusal before: it is not the refusal that the agent fails at.
        elif has_ended and error is not None and not self.has_raised("it", error):
            # Not by its text: a framework or a command may say it in words of its own.
            self.add_problem(
                "it fails when the endpoint ends its session, as a run does at a limit of calls or "
                "tokens: catch openai.BadRequestError, and return what there is "
                f"({shorten(str(error), 200)}{self.line_of(error)})",
                where,
                "refusal",
            )
        elif isinstance(error, AgentFailed):
            self.add_problem(f"it {error}", where, f"failed {str(error)[:30]}")
        elif error is not None:
            self.add_raised("it", where, error)
        elif reason := _result_problem(episode.returned):
            self.add_problem(reason, where)
        elif not episode.calls:
            self.add_problem(
                "it ended without a call: ask `client`, or OPENAI_BASE_URL with OPENAI_API_KEY",
                where,
            )
        elif episode.trajectory.error is not None:
            fault = episode.trajectory.error.removeprefix(f"{ENVIRONMENT_FAULT}: the agent ")
            self.add_problem(f"it {fault}", where)
        # Blocking is told beside an error: an agent that blocks for long is cut off, too.
        if self.watch is not None:
            for line in self.watch.blocked_lines:
                self.add_problem(
                    f"it kept the event loop for more than {BLOCK_S:g} s ({self.file}, line "
                    f"{line}), and other agents share it: await, or write it without async def",
                    where,
                )
            self.watch.blocked_lines.clear()
        if episode.trajectory.metrics.get("agent/reencoded_images"):
            self.add_problem(
                "it sends an image again in other bytes, which is another image: send the data "
                "URI that was sent before (agent/reencoded_images)",
                where,
            )

    async def _check_seeds(self, problem: Problem) -> None:
        """Compare the first calls of equal seeds, and of agents of one group."""
        prompts = []
        # Twice the same seeds, then another agent of that group.
        for seed, group_seed in ((1, 2), (1, 2), (3, 2)):
            kind = "the reference answer"
            episode = await self.play_episode(
                problem, kind, lambda _: f"\\boxed{{{problem.answer}}}", LIMITS, seed, group_seed
            )
            if episode.first_prompt is None:
                return
            prompts.append(episode.first_prompt)
        # Without the first nothing could be repeated; without the second no prefill is shared.
        if prompts[1] != prompts[0]:
            self.add_problem(
                "its first call says something else for equal seeds: draw what is random from "
                "task.seed and task.group_seed"
            )
        elif prompts[2] != prompts[0]:
            self.notes.append(
                "agents of a group begin differently, so that they share no prompt: draw from "
                "task.group_seed"
            )

    async def _check_refusals(
        self, problem: Problem, played: Sequence[tuple[Episode, Callable[[str], str]]]
    ) -> None:
        """Refuse further calls of the episode that had the most."""
        episode, policy = max(played, key=lambda pair: pair[0].calls)
        if not episode.calls:
            return
        if episode.calls == 1:
            self.notes.append(
                "it makes one call, whatever the answer: that a further one is refused was not "
                "tried"
            )
            return
        # In the last call and early: an agent may guard one of them only.
        turn = episode.trajectory.turns[0]
        # As many tokens as the first call takes: there is room for nothing else.
        cases = {
            "max_calls_exceeded in its last call": AgentLimits(episode.calls - 1, 2**18),
            "max_calls_exceeded in its second call": AgentLimits(1, 2**18),
            "context_length_exceeded in its second call": AgentLimits(100, turn.end),
        }
        for kind, limits in cases.items():
            await self.play_episode(problem, kind, policy, limits, 1, 2)

    def _check_history(self) -> None:
        """Compare the replies that were sent back with those that were sampled."""
        ended = [episode for episode in self.episodes if episode.trajectory.error is None]
        several = [episode for episode in ended if episode.calls > 1]
        metrics = [episode.trajectory.metrics for episode in several]
        edited = [
            episode.kind
            for episode, values in zip(several, metrics, strict=True)
            if values["agent/foreign_assistant_tokens"] and not values["agent/resumed_share"]
        ]
        # After some answers only it is no mistake in the loop: blanks are often stripped.
        if several and len(edited) == len(several):
            self.add_problem(
                "no call continues an earlier one, because the replies in its history are not as "
                "they came: nothing of a conversation is trained in its context "
                "(agent/resumed_share is 0)"
            )
        elif edited:
            kinds = ", ".join(dict.fromkeys(edited))
            self.notes.append(
                f"replies were not sent back as they came, so that no call continued another, "
                f"with {kinds}"
            )
        elif several and not any(values["agent/resumed_share"] for values in metrics):
            self.notes.append("no call continues an earlier one: each is a conversation by itself")

    def figures(self) -> Iterator[str]:
        # Figures of those that ended well only: the others are told as problems.
        ended = [e for e in self.episodes if e.trajectory.error is None]
        calls = [episode.calls for episode in ended]
        yield f"{len(ended)} of {len(self.episodes)} trajectories without an error, {sum(calls)} calls"
        if ended:
            yield f"calls of a trajectory: {min(calls)} to {max(calls)}"
            branches = [int(e.trajectory.metrics["agent/branches"]) for e in ended]
            resumed = [e.trajectory.metrics["agent/resumed_share"] for e in ended if e.calls > 1]
            share = (
                f"; {statistics.fmean(resumed):.0%} of further calls continue one"
                if resumed
                else ""
            )
            yield f"branches: {min(branches)} to {max(branches)}{share}"
            rewards = [e.trajectory.reward for e in ended if _gives_reward(e.returned)]
            if rewards:
                yield f"reward: {min(rewards):g} to {max(rewards):g}, mean {statistics.fmean(rewards):.3g}"
                yield from unpaid_lines(rewards)
                if min(rewards) < 0 or max(rewards) > 1:
                    yield (
                        "rewards are not within 0 and 1: set reward.reward_min_val and "
                        "reward.reward_max_val"
                    )
            if len(rewards) < len(ended):
                yield f"reward: left to the reward functions by {len(ended) - len(rewards)} trajectories"
            yield f"images: {self._images(ended)}"
            if names := Counter(name for e in ended for name in _metric_names(e.returned)):
                yield f"recorded: {', '.join(f'{name} ({n} times)' for name, n in names.most_common(20))}"
        # By code where one is meant to end a session; the other refusals differ in what they refuse.
        refused = Counter(
            message if code not in REFUSALS else code
            for e in self.episodes
            for code, message in e.refused
        )
        for message, times in refused.most_common(5):
            yield f"refused: {shorten(message, 200)} ({times} times)"
        yield from dict.fromkeys(self.notes)
        if self.episodes:
            slowest = max(self.episodes, key=lambda episode: episode.duration_s)
            yield f"slowest trajectory: {slowest.duration_s:.2g} s with {slowest.kind}"
        if not ended:
            yield "no trajectory has ended well; if it is made for rows of a data set, give some with --data FILE"

    def _images(self, episodes: Sequence[Episode]) -> str:
        """Return the number of images of each trajectory and their sizes."""
        counts: list[int] = []
        sizes: Counter[str] = Counter()
        for episode in episodes:
            images = {ref.hash: ref for s in episode.trajectory.sequences for ref, _ in s.images}
            counts.append(len(images))
            frames = [frame for image in images.values() for frame in frame_refs(image)]
            pictures = [decode(frame) for frame in frames]
            sizes.update(f"{picture.width}×{picture.height}" for picture in pictures)
        sizes_text = ", ".join(f"{size} ({n} times)" for size, n in sizes.most_common(5)) or "none"
        return f"{min(counts)} to {max(counts)} of a trajectory; sizes: {sizes_text}"


def _prompt_key(request: Request) -> tuple[bytes, tuple[str, ...]]:
    """Return what makes a prompt the same as another: its ids and its images' hashes."""
    hashes = tuple(image.hash for image in request.images)
    return request.ids.tobytes(), hashes


def _result_problem(returned: Any) -> str | None:
    """Return what is wrong with an agent's result; None if nothing is."""
    try:
        result_of(returned)
    except Exception as error:
        return f"{error}"
    return None


def _gives_reward(returned: Any) -> bool:
    return result_of(returned).reward is not None


def _metric_names(returned: Any) -> Iterator[str]:
    result = result_of(returned)
    yield from (f"metric {name}" for name in result.metrics)
    yield from (f"reward part {name}" for name in result.reward_parts)
    if result.call_rewards:
        yield "call rewards"


async def _without_reward(problem: Problem, answers: Sequence[Answer]) -> list[Score]:
    return [Score(0.0) for _ in answers]
