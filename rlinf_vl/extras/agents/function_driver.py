"""Runs users' agent functions in processes beside the worker.

The agents' own work (clients, tools, images) then takes no time from the engine's Python, and an
agent that crashes or blocks its interpreter ends its process, not the worker.
"""

from collections.abc import Mapping
from functools import partial

from rlinf_vl.extras.agents.contract import AgentResult, AgentTask, result_of
from rlinf_vl.extras.agents.drivers import AgentFailed, FunctionDriver
from rlinf_vl.rollout.episode.env_executor import ThreadExecutor
from rlinf_vl.rollout.episode.user_process import ProcessDied, UserProcessPool


class ProcessFunctionDriver:
    """An `AgentDriver` of functions whose calls run in processes of a pool."""

    def __init__(
        self, name: str, files: Mapping[str, str], timeout_s: float, processes: int
    ) -> None:
        """`name` and `files` are `FunctionDriver`'s; `processes` is the number of processes."""
        self.timeout_s = timeout_s
        # Started by the first call: a run of commands or environments has none.
        self._pool = UserProcessPool(
            partial(AgentFunctions, name, files, timeout_s), timeout_s, processes
        )

    @property
    def hung(self) -> int:
        return self._pool.hung

    async def run(self, task: AgentTask, url: str, key: str) -> AgentResult:
        try:
            return await self._pool.call("run", task, url, key)
        except ProcessDied as error:
            raise AgentFailed(str(error)) from error

    def close(self) -> None:
        """End the processes, with the agents that still run in them."""
        self._pool.close()


class AgentFunctions:
    """In its process: calls the agent function."""

    def __init__(self, name: str, files: Mapping[str, str], timeout_s: float) -> None:
        self._driver = FunctionDriver(name, files, ThreadExecutor(timeout_s))

    @property
    def hung(self) -> int:
        return self._driver.hung

    async def run(self, task: AgentTask, url: str, key: str) -> AgentResult:
        # Here: the class of what it returned may exist in this process only.
        return result_of(await self._driver.run(task, url, key))
