"""What goes into a reward function, and what comes out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Answer:
    """What is scored: the last response of an episode."""

    response: str  # whole, thoughts included
    said: str  # what it says behind its thoughts
    ids: tuple[int, ...] = ()  # token ids that were sampled for it
    truncated: bool = False  # it ended at the limit of tokens


class Result(NamedTuple):
    """What a function says of an answer."""

    value: float | None  # None: it says nothing, and weighs nothing
    parts: Mapping[str, float] = {}  # what else it gave, by name
    correct: bool | None = None  # whether it finds the answer right; None: see `RIGHT`


#: A function's value from which on it finds an answer correct, unless it says so itself.
RIGHT = 0.5
