"""Reward functions: built in (`named`) or a user's own, weighted and added up (`scoring`)."""

from typing import TYPE_CHECKING, Any

from rlinf_vl.rewards.grading_pool import GradingError, GradingTimeout
from rlinf_vl.rewards.math_grader import grade_math, math_verdict, stop_grading

if TYPE_CHECKING:
    from rlinf_vl.rewards.grading import grade

__all__ = ["GradingError", "GradingTimeout", "grade", "grade_math", "math_verdict", "stop_grading"]


def __getattr__(name: str) -> Any:
    """Import `grade` on first use.

    Grading processes import this package and need neither images nor a judge, so they start faster.
    """
    if name == "grade":
        from rlinf_vl.rewards.grading import grade

        return grade
    raise AttributeError(f"module 'rlinf_vl.rewards' has no attribute {name!r}")
