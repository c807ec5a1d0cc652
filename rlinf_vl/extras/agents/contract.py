"""The contract of agents: the task that one gets, and the result that it returns.

An agent is a function `solve(task, client)`, with `async def` or without, or a command. It asks
the policy as often as it likes through an OpenAI client, and returns a reward, an `AgentResult`,
or None to leave its last reply to the run's reward functions.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Real
from typing import Any

from PIL import Image

from rlinf_vl.data.clips import frame_refs
from rlinf_vl.data.data_uris import data_uri, messages_with_data
from rlinf_vl.data.images import decode
from rlinf_vl.rewards.result import RIGHT
from rlinf_vl.types import Message, Problem


@dataclass(frozen=True)
class AgentTask:
    """The task of one trajectory.

    Attributes:
        problem: the row, with its encoded images.
        seed: of this trajectory alone.
        group_seed: equal for all trajectories of a group.
    """

    problem: Problem
    seed: int
    group_seed: int

    @property
    def id(self) -> str:
        """The row's id."""
        return self.problem.id

    @property
    def answer(self) -> str:
        """The reference answer; "" if the row has none."""
        return self.problem.answer

    @property
    def columns(self) -> dict[str, Any]:
        """The row's other columns."""
        return self.problem.columns

    @cached_property
    def images(self) -> list[Image.Image]:
        """The row's images, RGB; of a video, its sampled frames."""
        return [decode(frame) for image in self.problem.images for frame in frame_refs(image)]

    @cached_property
    def messages(self) -> list[Message]:
        """The row's messages in OpenAI's form, images as data URIs of their original bytes."""
        return messages_with_data(self.problem)

    @property
    def row(self) -> dict[str, Any]:
        """The row as it is sent to an agent in another process, images as data URIs."""
        return {
            "id": self.id,
            "messages": self.messages,
            "images": [data_uri(image) for image in self.problem.images],
            "columns": self.columns,
            "answer": self.answer,
        }

    def as_json(self) -> str:
        """Return the task as a JSON object, for an agent in another process."""
        # A column may hold what JSON has not, such as a date.
        task = self.row | {"seed": self.seed, "group_seed": self.group_seed}
        return json.dumps(task, ensure_ascii=False, default=str)


@dataclass(frozen=True)
class AgentResult:
    """The result of an agent.

    Attributes:
        reward: on the scale of reward_min_val … reward_max_val; None leaves `answer` to the run's
            reward functions.
        answer: the text that reward functions score; None: the last reply that the agent got.
        call_rewards: further rewards by the id of a reply (`chatcmpl-…`), for
            `algorithm.credit: turn`. The trajectory's reward is the sum of all.
        correct: whether the trajectory counts as correct in validation; None: `reward` decides,
            which must be at least half of the way from reward_min_val to reward_max_val.
        reward_parts: components of the reward to report, by name.
        metrics: numbers to report as `env/NAME`.
    """

    reward: float | None = None
    answer: str | None = None
    call_rewards: Mapping[str, float] = field(default_factory=dict)
    correct: bool | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    def is_correct(self, reward_min: float, reward_max: float) -> bool:
        """Return whether the trajectory counts as correct; False where reward functions decide."""
        # Without a reward of its own the reward functions say what is right.
        if self.correct is not None or self.reward is None:
            return bool(self.correct)
        return self.reward - reward_min >= RIGHT * (reward_max - reward_min)


def result_of(returned: Any) -> AgentResult:
    """Return an agent's result in one form.

    Args:
        returned: an `AgentResult`, a mapping with its fields, a number or None.

    Raises:
        TypeError, ValueError: it is anything else, or a number is not finite.
    """
    if returned is None:
        return AgentResult()
    # numpy's numbers, too.
    if isinstance(returned, Real):
        returned = AgentResult(float(returned))
    # Commands return JSON, and functions may return what they would have written.
    if isinstance(returned, Mapping):
        fields = AgentResult.__dataclass_fields__
        if unknown := [name for name in returned if name not in fields]:
            raise TypeError(f"it returned {unknown[0]!r}; a result has {', '.join(fields)}")
        returned = AgentResult(**returned)
    if not isinstance(returned, AgentResult):
        raise TypeError(
            f"it returned {type(returned).__name__}; return a number, an AgentResult, or None to "
            "leave the last reply to the reward functions"
        )
    # NaN would pass every comparison on its way into an advantage.
    numbers = {"the reward": returned.reward or 0.0}
    for name in ("call_rewards", "reward_parts", "metrics"):
        numbers |= {f"{name}[{key!r}]": value for key, value in getattr(returned, name).items()}
    for name, value in numbers.items():
        if not isinstance(value, Real) or not math.isfinite(float(value)):
            raise ValueError(f"it gave {name} {value!r}, which is no finite number")
    if not isinstance(returned.answer, str | None):
        raise TypeError(f"it gave the answer {returned.answer!r}, which is no text")
    # Plain types only: the result may have to leave the process that knows the user's classes.
    return AgentResult(
        None if returned.reward is None else float(returned.reward),
        None if returned.answer is None else str.__str__(returned.answer),
        _plain_numbers(returned.call_rewards),
        None if returned.correct is None else bool(returned.correct),
        _plain_numbers(returned.reward_parts),
        _plain_numbers(returned.metrics),
    )


def _plain_numbers(numbers: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(value) for name, value in numbers.items()}
