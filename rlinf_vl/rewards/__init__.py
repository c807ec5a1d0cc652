"""Graders: is a response right? Looked up by `reward.reward_type`."""

from collections.abc import Callable

from rlinf_vl.rewards.grading_pool import GradingError, GradingTimeout
from rlinf_vl.rewards.math_grader import check_reference, grade_math, math_verdict, stop_grading

__all__ = [
    "GRADERS",
    "REFERENCE_CHECKS",
    "GradingError",
    "GradingTimeout",
    "grade_math",
    "math_verdict",
    "stop_grading",
]

GRADERS: dict[str, Callable[[str, str], bool]] = {"math": math_verdict}
"""reward.reward_type → function of (response, reference answer); raises `GradingError` where it comes to no verdict."""
REFERENCE_CHECKS: dict[str, Callable[[str], None]] = {"math": check_reference}
"""reward.reward_type → function of a reference answer; raises `GradingError` if no response can be compared with it."""
