"""An OpenEnv server for tests, on the toy's questions; run as `python openenv_toy.py PORT`, it serves on 127.0.0.1."""

import base64
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

from rlinf_vl.data.sources import open_source

N_ROWS = 32
_SOURCE = open_source("toy", "train")
#: Read once: sessions are made in threads, and `datasets` is not safe in several.
ROWS = [_SOURCE.row(number, ["problem", "images", "answer"]) for number in range(N_ROWS)]


class Answer(Action):
    text: str


class Question(Observation):
    question: str = ""
    picture: str = ""
    pixels: list = []
    notes: dict = {}


def reward_of(text: str, answer: str) -> float:
    """The environment's own reward: 1 for the boxed answer, less for length."""
    return float(answer in text) - min(len(text), 100) / 1000


class Toy(Environment):
    """The question that the seed draws; a wrong answer may be mended once."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._row, self._state = ROWS[0], State(step_count=0)

    def reset(self, seed: int | None = None, number: int | None = None, **kwargs) -> Question:
        self._row = ROWS[(seed if number is None else number) % N_ROWS]
        self._state = State(step_count=0)
        return self._question(0.0, False)

    def step(self, action: Answer, **kwargs) -> Question:
        if action.text == "crash":
            raise RuntimeError("the simulator fell over")
        self._state.step_count += 1
        right = self._row["answer"] in action.text
        reward = reward_of(action.text, self._row["answer"])
        return self._question(reward, right or self._state.step_count == 2)

    @property
    def state(self) -> State:
        return self._state

    def _question(self, reward: float, done: bool) -> Question:
        picture = base64.b64encode(self._row["images"][0]["bytes"]).decode()
        return Question(
            question=self._row["problem"].removeprefix("<image>"),
            picture=picture,
            pixels=[[[0, 128, 255]] * 4] * 3,
            notes={"step": self._state.step_count},
            reward=reward,
            done=done,
        )


if __name__ == "__main__":
    app = create_fastapi_app(Toy, Answer, Question, max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
