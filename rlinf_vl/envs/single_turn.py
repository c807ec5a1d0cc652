"""The environment of one question and one response, which the run's reward functions score."""

from rlinf_vl.envs.base import StepResult
from rlinf_vl.types import Message, Problem


class SingleTurn:
    """An environment that ends after one response."""

    def __init__(self) -> None:
        self._awaits_response = False

    def start(self, problem: Problem) -> list[Message]:
        self._awaits_response = True
        return list(problem.messages)

    def step(self, response: str) -> StepResult:
        """Take the response for the answer and end the episode.

        Raises:
            RuntimeError: no problem was started, or it has had its one response.
        """
        if not self._awaits_response:
            raise RuntimeError("single_turn: step() without start(): an episode takes one response")
        self._awaits_response = False
        return StepResult((), 0.0, True, {"answer": response})

    def close(self) -> None:
        self._awaits_response = False
