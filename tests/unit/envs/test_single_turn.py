"""The one-response environment."""

import pytest

from rlinf_vl.envs import StepResult
from rlinf_vl.envs.single_turn import SingleTurn
from rlinf_vl.types import Problem

PROBLEM = Problem(
    "p:0", ({"role": "user", "content": [{"type": "text", "text": "Say yes."}]},), "yes"
)


def test_a_response_is_left_to_the_reward_functions() -> None:
    env = SingleTurn()
    assert env.start(PROBLEM) == list(PROBLEM.messages)
    assert env.step("yes!") == StepResult((), 0.0, True, {"answer": "yes!"})
    env.close()


def test_an_episode_takes_one_response() -> None:
    env = SingleTurn()
    with pytest.raises(RuntimeError, match="without start"):
        env.step("yes")
    env.start(PROBLEM)
    env.step("yes")
    with pytest.raises(RuntimeError, match="without start"):
        env.step("yes")
    env.start(PROBLEM)
    assert env.step("yes").done
