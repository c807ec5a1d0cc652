"""Plays episodes in which agents drive: they call the worker's endpoint until they are done.

An agent's calls are answered by its `AgentSession`, and what was sampled in them is the episode's
trajectory. No Ray. Invariants:
- A crash, a wrong result, a time limit or an agent that never calls is an error of its trajectory.
- An agent's key ends with its episode: whatever it left running is refused from then on.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rlinf_vl.data.corruption import Corruption
from rlinf_vl.envs import StepResult
from rlinf_vl.errors import never_reported
from rlinf_vl.extras.agents.contract import AgentResult, AgentTask, result_of
from rlinf_vl.extras.agents.drivers import AgentDriver, AgentFailed
from rlinf_vl.extras.agents.endpoint import Endpoint
from rlinf_vl.extras.agents.first_calls import FirstCalls
from rlinf_vl.extras.agents.session import AgentLimits, AgentSession
from rlinf_vl.rollout.episode.env_executor import CallTimeout
from rlinf_vl.rollout.episode.faults import RolloutFault, error_text
from rlinf_vl.rollout.episode.generation_client import GenerationClient
from rlinf_vl.rollout.episode.group_player import EpisodeSettings, GroupPlayer, ScoreAnswers
from rlinf_vl.rollout.episode.observation import plain_result
from rlinf_vl.rollout.episode.rollout_state import RolloutGroup, RolloutState
from rlinf_vl.types import ENVIRONMENT_FAULT, Problem, SamplingParams

#: Seconds for which a group's first calls wait for more agents: those that ask the same share a
#: prefill.
PATIENCE_S = 0.2


@dataclass(eq=False)
class AgentGroup(RolloutGroup):
    """The episodes of a group of agents; `first_calls` gathers their first requests."""

    first_calls: FirstCalls | None = None


class AgentPlayer(GroupPlayer):
    """Plays groups of agents.

    Attributes:
        driver: runs the user's agents.
        endpoint: the server that they call.
    """

    def __init__(
        self,
        client: GenerationClient,
        settings: EpisodeSettings,
        driver: AgentDriver,
        limits: AgentLimits,
        reward_bounds: tuple[float, float],
        host: str = "127.0.0.1",
        score_answers: ScoreAnswers | None = None,
        first_report: Callable[[str], bool] = never_reported,
    ) -> None:
        """
        Args:
            limits: limits of an agent's calls.
            reward_bounds: the least and the largest reward.
            host: the address at which agents reach the endpoint.
            score_answers, first_report: as in `GroupPlayer`.
        """
        super().__init__(client, settings, score_answers, first_report)
        self.driver = driver
        self.endpoint = Endpoint(host)
        self._limits, self._reward_bounds = limits, reward_bounds

    @property
    def hung(self) -> int:
        return self.driver.hung

    def close(self) -> None:
        """End the server, and agents that are still running."""
        self.driver.close()
        self.endpoint.close()

    async def start_group(
        self,
        problem: Problem,
        seeds: Sequence[int],
        sampling: SamplingParams,
        group_seed: int = 0,
        corruption: Corruption | None = None,
        trained: bool = True,
    ) -> RolloutGroup:
        """Return a group whose agents `play_group` runs, one for each seed."""
        assert corruption is None, "validation refuses image corruption with agents"
        episodes = []
        for seed in seeds:
            session = f"{problem.id}#{next(self._session_numbers)}"
            episodes.append(RolloutState(problem, seed, group_seed, session))
        group = AgentGroup(problem, sampling, episodes, trained=trained)
        group.first_calls = FirstCalls(self.client, PATIENCE_S)
        return group

    def submit_first_requests(self, groups: Sequence[RolloutGroup]) -> None:
        """Do nothing: agents submit their requests themselves."""

    async def close_group(self, group: RolloutGroup) -> None:
        await super().close_group(group)
        assert isinstance(group, AgentGroup) and group.first_calls is not None
        await group.first_calls.close()

    async def _wait_for_start(self, episode: RolloutState) -> None:
        await self._permits.acquire(1)
        episode.start_time = asyncio.get_running_loop().time()
        await self.endpoint.start()

    async def _play_turns(self, group: RolloutGroup, episode: RolloutState) -> None:
        """Run the episode's agent to its end, and record its result."""
        assert isinstance(group, AgentGroup) and group.first_calls is not None
        place = group.episodes.index(episode)
        # Only now: those that still wait for a permit can't call.
        group.first_calls.expect(place)
        session = AgentSession(
            episode, group.sampling, self.client, self._limits, group.first_calls, place
        )
        key = self.endpoint.open(session)
        task = AgentTask(episode.problem, episode.seed, episode.group_seed)
        agent = asyncio.ensure_future(self.driver.run(task, self.endpoint.url, key))
        try:
            # An engine that fails ends the episode, whatever its agent is doing.
            await asyncio.wait([agent, session.failure], return_when=asyncio.FIRST_COMPLETED)
            if session.failure.done():
                session.failure.result()
            result = self._result(episode.problem, agent)
            # Nothing was sampled, so nothing could be trained: most often a wrong base URL.
            if not episode.turns:
                raise self._fault(episode.problem, "ended without an answer of the policy")
        except RolloutFault as fault:
            refusal = self.endpoint.refusal_of(key)
            # However the agent took it, and in the same words for all agents.
            if refusal is not None and not episode.turns and not session.failure.done():
                raise self._fault(
                    episode.problem,
                    f"got no answer: the endpoint refused its first call: {refusal}",
                ) from fault
            raise
        finally:
            # First the key: whatever the agent left running can add nothing to the trajectory.
            self.endpoint.end(key)
            agent.cancel()
            await asyncio.wait([agent])
            await session.close()
            group.first_calls.withdraw(place)
            episode.metrics |= session.metrics
        self._record(episode, session, result)

    def _result(self, problem: Problem, agent: "asyncio.Future") -> AgentResult:
        """Return an agent's result. Raises RolloutFault: it failed, or returned something else."""
        try:
            return result_of(agent.result())
        except CallTimeout as error:
            raise self._too_slow(problem) from error
        except AgentFailed as error:
            raise self._fault(problem, str(error)) from error
        except Exception as error:
            raise self._fault(problem, f"failed: {error_text(error)}") from error

    def _record(self, episode: RolloutState, session: AgentSession, result: AgentResult) -> None:
        """Record the result of an agent in its episode."""
        for reply_id, reward in result.call_rewards.items():
            if reply_id not in session.turn_of:
                raise self._fault(
                    episode.problem, f"gave call_rewards for {reply_id!r}, which is no reply"
                )
            turn = session.turn_of[reply_id]
            episode.turns[turn] = replace(episode.turns[turn], reward=float(reward))
        earlier_reward = episode.turns[-1].reward
        answer = None
        if result.reward is None:
            answer = session.last_reply if result.answer is None else result.answer
        # The last turn carries the result's reward; `algorithm.credit: turn` reads each turn's.
        info = {
            "correct": result.is_correct(*self._reward_bounds),
            "reward_parts": result.reward_parts,
            "metrics": {**episode.metrics, **result.metrics},
            "answer": answer,
        }
        reward = earlier_reward + (result.reward or 0.0)
        episode.add_result(plain_result(StepResult((), reward, True, info)))
        if session.limit_reached:
            episode.status = "length"

    async def _end_episode(self, episode: RolloutState) -> None:
        """Free an episode's permit."""
        if episode.start_time is not None:
            episode.start_time = None
            self._permits.release()

    def _too_slow(self, problem: Problem) -> RolloutFault:
        limit = f"rollout.agent.timeout={self.driver.timeout_s:g} s"
        return self._fault(problem, f"did not end within {limit}")

    def _fault(self, problem: Problem, failure: str) -> RolloutFault:
        """Return the fault of a problem's agent; `failure` says how it failed."""
        return RolloutFault(f"{ENVIRONMENT_FAULT}: the agent {failure}")
