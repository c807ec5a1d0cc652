"""The contract between a trajectory and the world that answers it, and the registry of environments by name."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlinf_vl.types import Message, Problem

Grade = Callable[[str, str], bool]
"""(response, reference answer) → right or wrong."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the environment says to one response.

    Attributes:
        messages: what the policy sees next, in the OpenAI content-part form: `image_url` with a data URI or the address of an image
            of the problem, or `image` with a PIL image, an array or encoded bytes. Empty when done.
        reward: of this step, already scaled to reward_min_val…reward_max_val; the trajectory's reward is the sum.
        done: whether the episode is over.
        info: facts to record: the last step's `correct` (bool) counts towards validation accuracy; `reward_parts` (numbers by
            name) are summed over the steps and shown beside the reward.
    """

    messages: tuple[Message, ...]
    reward: float
    done: bool
    info: dict[str, Any] = field(default_factory=dict)


class Env(Protocol):
    """One episode: `start` once, `step` with each response until done, then `close`; one call at a time, any thread."""

    def start(self, problem: Problem) -> list[Message]:
        """Begin the episode; the messages that the policy sees first.

        Trajectories of a group that begin alike share one prompt, which saves time: draw what is random from `problem.id`.
        """
        ...

    def step(self, response: str) -> StepResult:
        """Answer one response of the policy."""
        ...

    def close(self) -> None:
        """Free what the episode uses. Called once, also if it was not finished or not even started."""
        ...


ENVIRONMENTS: dict[str, Callable[..., Env]] = {}
"""Name (rollout.env_class) → class, built with the keywords grade, reward_max and reward_min."""


def register_env(name: str) -> Callable[[type], type]:
    """Class decorator: the class becomes the environment `name`. Raises ValueError if another class has that name."""

    def register(cls: type) -> type:
        if name in ENVIRONMENTS:
            raise ValueError(f"environment {name!r} is already {ENVIRONMENTS[name]}")
        ENVIRONMENTS[name] = cls
        return cls

    return register


def make_env(name: str, *, grade: Grade, reward_max: float, reward_min: float) -> Env:
    """A fresh environment for one trajectory.

    Raises:
        ValueError: no environment is registered under `name`.
    """
    if name not in ENVIRONMENTS:
        near = difflib.get_close_matches(name, ENVIRONMENTS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        known = ", ".join(sorted(ENVIRONMENTS))
        raise ValueError(f"rollout.env_class: no environment {name!r}; there are {known}{hint}")
    return ENVIRONMENTS[name](grade=grade, reward_max=reward_max, reward_min=reward_min)
