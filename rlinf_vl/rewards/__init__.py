"""What an answer is worth: reward functions by name (`named`) or of one's own, weighted and added up (`scoring`)."""

from rlinf_vl.rewards.grading_pool import GradingError, GradingTimeout
from rlinf_vl.rewards.math_grader import grade_math, math_verdict, stop_grading

__all__ = ["GradingError", "GradingTimeout", "grade_math", "math_verdict", "stop_grading"]
