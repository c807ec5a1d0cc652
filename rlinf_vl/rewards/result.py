"""The input (`Answer`) and the output (`Result`) of a reward function."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Answer:
    """The last response of an episode, which is scored.

    Attributes:
        response: the whole text, thoughts included.
        final_response: the text after the thoughts.
        ids: the token ids that were sampled for the response.
        truncated: whether the response ended at the token limit.
    """

    response: str
    final_response: str
    ids: tuple[int, ...] = ()
    truncated: bool = False


class Result(NamedTuple):
    """The outcome of one reward function for one answer.

    Attributes:
        value: the score; None is no score, and adds nothing to the reward.
        parts: further numbers that the function returned, by name.
        correct: whether the function finds the answer right; None: `value` decides, see `RIGHT`.
        spans: rewards of parts of the response, (start, end, value) in characters of its text.
    """

    value: float | None
    parts: Mapping[str, float] = {}
    correct: bool | None = None
    spans: tuple[tuple[int, int, float], ...] = ()


#: The smallest value that means a correct answer, unless the function itself returns a verdict.
RIGHT = 0.5
