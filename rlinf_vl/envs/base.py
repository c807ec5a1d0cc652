"""The contract of environments, which answer the responses of a trajectory."""

import json
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlinf_vl.types import Message, Problem


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _finite(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError(f"{digits} is too large a number")
    return number


#: A decoder that refuses NaN and the infinities, which Python accepts by default though they are no
#: JSON.
STRICT_JSON = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)
Grade = Callable[[str, str], bool]
"""A function (response, reference answer) → whether the response is right."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The environment's reply to one response.

    Attributes:
        messages: messages that the policy sees next, in the OpenAI content-part form. An image is
            `image_url` with a data URI or the address of an image of the problem, or `image` with a
            PIL image, an array or encoded bytes. Empty when done.
        reward: reward of this step, on the scale of reward_min_val…reward_max_val; the trajectory's
            reward is the sum.
        done: whether the episode is over.
        info: facts to record, all optional:
            `answer` (str): in the last step, the text that the run's reward functions score. Their
                score is added to the reward and decides what is correct.
            `correct` (bool): whether the episode counts as correct in validation; the last step's.
            `reward_parts` ({name: number}): summed over the steps and reported beside the reward.
            `metrics` ({name: number}): the last values of an episode count; their mean over
                episodes is the run's `env/NAME`.
            `state` (str): name of the state in which this response was given; equal names are equal
                states (GiGPO).
            `tool_calls` (list of {"name", "arguments", "error"?}): calls in the response, for the
                report.
    """

    messages: Sequence[Message]
    reward: float
    done: bool
    info: dict[str, Any] = field(default_factory=dict)


class Env(Protocol):
    """An episode: `start` once, `step` with each response until done, then `close`.

    Calls come one at a time, from any thread, and each method may be a coroutine function.

    The constructor takes `rollout.env_kwargs`, and those of the following keywords that it names:
    `grade` (a `Grade`), `reward_max`, `reward_min`, `seed` (int: for this episode alone) and
    `group_seed` (int: equal for all trajectories of a group; use it for the start, which they must
    share). Both seeds are fixed for a row in validation, and drawn for each step in training.

    An instance is made and closed once before a run, to find wrong keywords early: do slow work in
    `start`.
    """

    def start(self, problem: Problem) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """Begin the episode and return its first messages.

        Trajectories of a group with the same first messages share one prompt.
        """
        ...

    def step(self, response: str) -> StepResult | Awaitable[StepResult]:
        """Return the reply to one response of the policy."""
        ...

    def close(self) -> None | Awaitable[None]:
        """Free the episode's resources. Called once, also if it was not finished or not even
        started."""
        ...
