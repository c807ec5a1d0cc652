"""The contract between a trajectory and the world that answers it."""

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlinf_vl.types import Message, Problem


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


#: JSON of others, without NaN and the infinities, which Python's reads by default.
STRICT_JSON = json.JSONDecoder(parse_constant=_no_constant)
Grade = Callable[[str, str], bool]
"""(response, reference answer) → right or wrong."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the environment says to one response.

    Attributes:
        messages: what the policy sees next, in the OpenAI content-part form: `image_url` with a data URI or the address of an image
            of the problem, or `image` with a PIL image, an array or encoded bytes. Empty when done.
        reward: of this step, on the scale of reward_min_val…reward_max_val; the trajectory's reward is the sum.
        done: whether the episode is over.
        info: facts to record, all optional:
            `answer` (str): of the last step: what the run's reward functions are to score; that is added to the reward, and says
                what is correct.
            `correct` (bool): the last step's counts towards validation accuracy.
            `reward_parts` ({name: number}): summed over the steps, and shown beside the reward.
            `metrics` ({name: number}): the last value that an episode gives counts; their mean is the run's `env/NAME`.
            `state` (str): names the state in which this response was given; equal names are equal states (GiGPO).
            `tool_calls` (list of {"name", "arguments", "error"?}): what the response called, for the report.
    """

    messages: Sequence[Message]
    reward: float
    done: bool
    info: dict[str, Any] = field(default_factory=dict)


class Env(Protocol):
    """One episode: `start` once, `step` with each response until done, then `close`; one call at a time, any thread.

    Each method may be a coroutine function. The constructor takes `rollout.env_kwargs`, and those of these keywords that it
    names: `grade` (a `Grade`), `reward_max`, `reward_min`, `seed` (int: the episode's own) and `group_seed` (int: equal for all
    trajectories of a group; draw from it what they must have in common, which is the start). Both seeds are fixed for a row in
    validation, and drawn for each step in training. The class is built and closed once before a run, to refuse what is wrong in
    its keywords: leave what costs time to `start`.
    """

    def start(self, problem: Problem) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """Begin the episode; the messages that the policy sees first. Trajectories of a group that begin alike share one prompt."""
        ...

    def step(self, response: str) -> StepResult | Awaitable[StepResult]:
        """Answer one response of the policy."""
        ...

    def close(self) -> None | Awaitable[None]:
        """Free what the episode uses. Called once, also if it was not finished or not even started."""
        ...
