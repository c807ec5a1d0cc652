"""One question, one response, which the run's reward functions score."""

from rlinf_vl.envs.base import StepResult
from rlinf_vl.types import Message, Problem


class SingleTurn:
    """Ends after one response."""

    def __init__(self) -> None:
        self._asked = False

    def start(self, problem: Problem) -> list[Message]:
        self._asked = True
        return list(problem.messages)

    def step(self, response: str) -> StepResult:
        """The response is the answer, and the episode is over.

        Raises:
            RuntimeError: no problem was started, or its one response was given.
        """
        if not self._asked:
            raise RuntimeError("single_turn: step() without start(): an episode takes one response")
        self._asked = False
        return StepResult((), 0.0, True, {"answer": response})

    def close(self) -> None:
        self._asked = False
