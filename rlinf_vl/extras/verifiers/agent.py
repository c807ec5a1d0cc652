"""The agent that plays an environment of the package `verifiers`.

The environment runs its own rollout, with its tools, users and turns, through the trajectory's
client, and its rubric gives the reward.
"""

import asyncio
from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

from rlinf_vl.extras.agents.contract import AgentResult, AgentTask
from rlinf_vl.extras.verifiers.rows import environment_row, load_environment

if TYPE_CHECKING:
    from openai import AsyncOpenAI

#: Errors of a rollout that are the policy's own doing: an empty reply, and a call too many.
_OF_THE_POLICY = ("EmptyModelResponseError", "max_calls_exceeded")


class RolloutError(Exception):
    """A rollout of verifiers that failed."""


async def solve(task: AgentTask, client: "AsyncOpenAI") -> AgentResult:
    """Play the environment's row, and return its rubric's reward.

    Raises:
        RolloutError: the rollout failed, other than by what the policy wrote.
        ValueError: this process has other rows than the one that read the data.
    """
    row, environment, client_class = await asyncio.to_thread(_prepare, task.columns["verifiers"])
    # Without sampling arguments: they are the run's.
    output = await environment.run_rollout(row, client_class(client), "policy", sampling_args={})
    # With the errors behind it, since verifiers names most of them `ModelError`.
    error = str((output.get("error") or {}).get("error_chain_repr", ""))
    if error and not any(name in error for name in _OF_THE_POLICY):
        raise RolloutError(error)
    metrics = {
        name: float(value)
        for name, value in (output.get("metrics") or {}).items()
        if isinstance(value, Real)
    }
    return AgentResult(reward=output["reward"], metrics=metrics)


def _prepare(row_source: Mapping[str, Any]) -> tuple[dict[str, Any], Any, type]:
    """Return a row, its environment and the class of a client.

    Called in a thread: the first call in a process imports the package and builds the environment,
    which takes seconds.
    """
    row = environment_row(**row_source)
    from verifiers import OpenAIChatCompletionsClient  # pyright: ignore[reportAttributeAccessIssue]

    return row, load_environment(row_source["source"]), OpenAIChatCompletionsClient
