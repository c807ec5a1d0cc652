"""The reward functions that have names, one a row."""

from collections.abc import Callable
from typing import NamedTuple

from rlinf_vl.rewards.math_grader import check_reference, math_verdict


class Named(NamedTuple):
    """
    Attributes:
        function: of (response, answer) and of those keywords that it names; see docs/rewards.md.
        judges: whether it judges answers, and not just their form.
        check: raises `GradingError` if no response can be compared with this reference answer.
    """

    function: Callable[..., float]
    judges: bool = True
    check: Callable[[str], None] | None = None


NAMED: dict[str, Named] = {
    "math": Named(math_verdict, check=check_reference),
}
