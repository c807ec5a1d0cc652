"""One question, one response, one grade."""

from rlinf_vl.envs.base import Grade, StepResult
from rlinf_vl.types import Message, Problem


class SingleTurn:
    """Pays `reward_max` for a response that `grade` finds right, `reward_min` for any other."""

    def __init__(self, *, grade: Grade, reward_max: float, reward_min: float) -> None:
        self._grade = grade
        self._reward_max, self._reward_min = reward_max, reward_min
        self._answer: str | None = None

    def start(self, problem: Problem) -> list[Message]:
        self._answer = problem.answer
        return list(problem.messages)

    def step(self, response: str) -> StepResult:
        """Grade the response; the episode is over.

        Raises:
            RuntimeError: no problem was started, or its one response was given.
        """
        if self._answer is None:
            raise RuntimeError("single_turn: step() without start(): an episode takes one response")
        correct = self._grade(response, self._answer)
        self._answer = None
        reward = self._reward_max if correct else self._reward_min
        return StepResult(messages=(), reward=reward, done=True, info={"correct": correct})

    def close(self) -> None:
        self._answer = None
