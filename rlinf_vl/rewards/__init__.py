"""Graders: is a response right? Looked up by `reward.reward_type`."""

import difflib
from collections.abc import Callable

from rlinf_vl.rewards.grading_pool import GradingError, GradingTimeout
from rlinf_vl.rewards.math_grader import check_reference, grade_math, math_verdict, stop_grading

__all__ = [
    "GRADERS",
    "REFERENCE_CHECKS",
    "GradingError",
    "GradingTimeout",
    "grade_math",
    "grader",
    "math_verdict",
    "stop_grading",
]

GRADERS: dict[str, Callable[[str, str], bool]] = {"math": math_verdict}
"""reward.reward_type → function of (response, reference answer); raises `GradingError` where it comes to no verdict."""

REFERENCE_CHECKS: dict[str, Callable[[str], None]] = {"math": check_reference}
"""reward.reward_type → function of a reference answer; raises `GradingError` where no response could be compared with it."""


def grader(reward_type: str) -> Callable[[str, str], bool]:
    """The grader of that name.

    Raises:
        ValueError: there is none.
    """
    if reward_type not in GRADERS:
        near = difflib.get_close_matches(reward_type, GRADERS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"reward.reward_type: no grader {reward_type!r}; there are {', '.join(sorted(GRADERS))}{hint}")
    return GRADERS[reward_type]
