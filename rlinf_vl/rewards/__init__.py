"""What an answer is worth: reward functions by name (`named`) or of one's own, weighted and added up (`scoring`)."""

from typing import TYPE_CHECKING, Any

from rlinf_vl.rewards.grading_pool import GradingError, GradingTimeout
from rlinf_vl.rewards.math_grader import grade_math, math_verdict, stop_grading

if TYPE_CHECKING:
    from rlinf_vl.rewards.grading import grade

__all__ = ["GradingError", "GradingTimeout", "grade", "grade_math", "math_verdict", "stop_grading"]


def __getattr__(name: str) -> Any:
    """Import `grade` when it is asked for: the grading processes, which import this room, need no images and no judge."""
    if name == "grade":
        from rlinf_vl.rewards.grading import grade

        return grade
    raise AttributeError(f"module 'rlinf_vl.rewards' has no attribute {name!r}")
