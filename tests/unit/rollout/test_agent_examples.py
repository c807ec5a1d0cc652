"""The example agents play what their environments play, token by token, on written and on sampled answers."""

from pathlib import Path

import numpy as np
import pytest
from agent_groups import play
from episodes import Maker, encoded, make_player
from PIL import Image
from scripted_engine import Scripted

from rlinf_vl.config import load_config
from rlinf_vl.extras.agents.drivers import FunctionDriver
from rlinf_vl.extras.agents.player import AgentPlayer
from rlinf_vl.extras.agents.session import AgentLimits
from rlinf_vl.extras.toy import drawings
from rlinf_vl.extras.toy.rectangle_tool import RectangleTool
from rlinf_vl.models.families import family_of
from rlinf_vl.models.processing import Processor
from rlinf_vl.rewards import grade_math
from rlinf_vl.rollout.episode.env_executor import ThreadExecutor
from rlinf_vl.rollout.episode.generation_client import GenerationClient
from rlinf_vl.rollout.episode.group_player import EpisodeSettings
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.tools.check.inputs import RULES
from rlinf_vl.types import Problem, SamplingParams

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples/agents/rectangle_tool.py"


def call(name, a, b):
    return f'<tool_call>{{"name":"{name}","arguments":{{"a":{a},"b":{b}}}}}</tool_call>'


#: Answers to a question whose right one is 12.
ANSWERS = {
    "right at once": ["\\boxed{12}"],
    "with the tool": [call("multiply", 3, 4), "\\boxed{12}"],
    "right the second time": [
        call("multiply", 3, 5),
        "\\boxed{15}",
        call("add", 5, 7),
        "\\boxed{12}",
    ],
    "wrong twice": ["\\boxed{15}", "nothing"],
    "a call that fails": [call("divide", 3, 4), call("multiply", '"x"', 4), "\\boxed{12}"],
    "a call that breaks off": ["<tool_call>{", "\\boxed{12}"],
    "cut at the limit of turns": [call("add", 1, 1)],
}


@pytest.fixture(scope="module")
def processor(toy_folder):
    return Processor(toy_folder, family_of("qwen3_vl"))


@pytest.fixture(scope="module")
def problem():
    picture = encoded(
        Image.fromarray(drawings.draw(drawings.all_placements()[7], np.random.default_rng(0)))
    )
    parts = [
        {"type": "image_url", "image_url": {"url": picture.url}},
        {"type": "text", "text": "What is the area"},
    ]
    return Problem("p:0", ({"role": "user", "content": parts},), "\\boxed{12}", (picture,))


def native(engine, processor, problem, seed):
    """The trajectory that the environment plays."""
    tool = {"grade": grade_math, "reward_max": 1.0, "reward_min": 0.0}
    maker = Maker(lambda seed: RectangleTool(**tool))
    limits = {"seq_length": 2048, "max_prompt_length": 1024, "max_turns": 6}
    player = make_player(engine, processor, maker, **limits)
    sampling = SamplingParams(max_new_tokens=64, stop_ids=processor.stop_ids)
    ((trajectory,),) = (group.trajectories for group in play(player, [[seed]], sampling, problem))
    return trajectory


def by_agent(engine, processor, problem, seed):
    """The trajectory that the example plays through the endpoint."""
    driver = FunctionDriver(f"{EXAMPLE}:solve", {}, ThreadExecutor(120.0))
    client = GenerationClient(engine, Renderer(processor), 30.0)
    limits = AgentLimits(6, 2048)
    player = AgentPlayer(client, EpisodeSettings(), driver, limits, (0.0, 1.0))
    sampling = SamplingParams(max_new_tokens=64, stop_ids=processor.stop_ids)
    ((trajectory,),) = (group.trajectories for group in play(player, [[seed]], sampling, problem))
    return trajectory


def assert_equal(ours, theirs):
    """Equal to the digit: ids, logprobs, versions, what is trained on, images and rewards."""
    assert ours.error is None and theirs.error is None
    assert ours.turn_rewards == theirs.turn_rewards and ours.reward == theirs.reward
    assert ours.correct == theirs.correct
    assert theirs.metrics.items() <= ours.metrics.items()
    assert ours.metrics["agent/branches"] == 0
    for turn, other in zip(ours.turns, theirs.turns, strict=True):
        assert (turn.start, turn.end, turn.finish_reason) == (
            other.start,
            other.end,
            other.finish_reason,
        )
    for sequence, other in zip(ours.sequences, theirs.sequences, strict=True):
        for name, array in other.arrays().items():
            np.testing.assert_array_equal(sequence.arrays()[name], array, err_msg=name)
        assert [image.hash for image, _ in sequence.images] == [i.hash for i, _ in other.images]


@pytest.mark.parametrize("name", ["maze", "rectangle_tool"])
def test_the_command_in_an_examples_docstring_starts_a_run(monkeypatch, name):
    """Or at least what is checked of a config before a run does not refuse it."""
    monkeypatch.chdir(ROOT)
    lines = (ROOT / f"examples/agents/{name}.py").read_text().splitlines()
    (command,) = [line.split() for line in lines if line.strip().startswith("rlinf-vl train")]
    config = load_config(command[2], command[3:], RULES)
    assert config.rollout.agent.function.endswith(f"{name}.py:solve")


@pytest.mark.parametrize("case", ANSWERS)
def test_the_tool_by_an_agent_is_the_tool_by_the_environment(monkeypatch, processor, problem, case):
    # Nobody listens there.
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "a.org")
    ours = by_agent(Scripted(processor, ANSWERS[case]), processor, problem, 3)
    theirs = native(Scripted(processor, ANSWERS[case]), processor, problem, 3)
    assert_equal(ours, theirs)
    expected = {"right at once": 1.0, "with the tool": 1.0, "right the second time": 0.5}
    expected |= {"a call that fails": 1.0, "a call that breaks off": 1.0}
    assert ours.reward == expected.get(case, 0.0)


@pytest.mark.slow
def test_what_the_torch_engine_samples_is_equal_to_the_digit(toy, problem):
    turns = 0
    for seed in range(6):
        theirs = native(toy.engine, toy.processor, problem, seed)
        assert_equal(by_agent(toy.engine, toy.processor, problem, seed), theirs)
        turns += len(theirs.turns)
    assert turns >= 12
