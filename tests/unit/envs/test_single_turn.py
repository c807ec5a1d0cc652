"""The one-response environment."""

import pytest

from rlinf_vl.envs import StepResult
from rlinf_vl.envs.single_turn import SingleTurn
from rlinf_vl.types import Problem

PROBLEM = Problem("p:0", ({"role": "user", "content": [{"type": "text", "text": "Say yes."}]},), "yes")


def _env() -> SingleTurn:
    return SingleTurn(grade=lambda response, answer: answer in response, reward_max=2.0, reward_min=-1.0)


def test_a_right_response_pays_the_maximum_and_a_wrong_one_the_minimum() -> None:
    for response, correct, reward in (("yes!", True, 2.0), ("no", False, -1.0)):
        env = _env()
        assert env.start(PROBLEM) == list(PROBLEM.messages)
        assert env.step(response) == StepResult((), reward, True, {"correct": correct})
        env.close()


def test_an_episode_takes_one_response() -> None:
    env = _env()
    with pytest.raises(RuntimeError, match="without start"):
        env.step("yes")
    env.start(PROBLEM)
    env.step("yes")
    with pytest.raises(RuntimeError, match="without start"):
        env.step("yes")
    env.start(PROBLEM)
    assert env.step("yes").reward == 2.0
