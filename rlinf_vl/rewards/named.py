"""The reward functions that have names, one a row."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rlinf_vl.code import CodeError
from rlinf_vl.errors import nearest
from rlinf_vl.rewards.forms import WANTED, RewardFunction
from rlinf_vl.rewards.math_grader import check_reference, math_verdict


class Named(NamedTuple):
    """
    Attributes:
        function: of (response, answer) and of those keywords that it names; see docs/rewards.md.
        judges: whether it judges answers, and not just their form.
        check: raises `GradingError` if no response can be compared with this reference answer.
    """

    function: Callable[..., Any]
    judges: bool = True
    check: Callable[[str], None] | None = None


def math(said: str, answer: str) -> bool:
    r"""Whether the last `\boxed{…}` is the reference answer: `rlinf_vl.rewards.math_grader`."""
    return math_verdict(said, answer)


NAMED: dict[str, Named] = {
    "math": Named(math, check=check_reference),
}


def named_function(name: str, kwargs: Mapping[str, Any]) -> tuple[RewardFunction, bool]:
    """A function of the table with its keywords, and whether it judges answers. Raises CodeError: it doesn't take them."""
    if name not in NAMED:
        known = ", ".join(sorted(NAMED))
        raise CodeError(
            f"no reward function {name!r}; there are {known}; write module:name or path/to/file.py:name for one of yours "
            f"({WANTED});{nearest(name, NAMED)}".rstrip(";")
        )
    named = NAMED[name]
    return RewardFunction(named.function, name, kwargs), named.judges
