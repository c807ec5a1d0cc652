"""Geometry with a tool that checks answers.

The tool knows the answer, so the accuracy with it means less than without it. `env/first_correct`
is the accuracy of the first answer given, to the tool or as the final one; `env/correct` is that of
the final answer.
"""

from rlinf_vl.envs.base import StepResult
from rlinf_vl.envs.picture_tool import PictureTool
from rlinf_vl.types import Message, Problem


class GeometryTool(PictureTool):
    """An environment that rewards the final answer. The policy may have answers checked and look at
    parts of the picture first."""

    _answered = False

    def start(self, problem: Problem) -> list[Message]:
        self.metrics |= {"first_correct": 0.0, "correct": 0.0}
        return super().start(problem)

    def calc_score(self, answer: str | float) -> float:
        """Check an answer to the question: 1.0 says that it is right, 0.0 that it is wrong.

        Args:
            answer: The answer to check, such as 12 or 5\\sqrt{3}
        """
        text = str(answer)
        return float(self._right(text if "\\boxed" in text else f"\\boxed{{{text}}}"))

    def answer(self, response: str) -> StepResult:
        self.metrics["correct"] = float(self._right(response))
        return super().answer(response)

    def _right(self, response: str) -> bool:
        """Grade a response. The first one is recorded, even if grading it fails."""
        is_first = not self._answered
        self._answered = True
        correct = self.grade(response, self.problem.answer)
        if is_first:
            self.metrics["first_correct"] = float(correct)
        return correct
