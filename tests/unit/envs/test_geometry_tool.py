"""Tools over real geometry: answers are checked, pictures cut as the box says, and the first answer is told from the last."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rlinf_vl.config import load_config
from rlinf_vl.data.dataset import ProblemDataset
from rlinf_vl.data.formats import RowFormat
from rlinf_vl.data.images import decode, to_image_ref
from rlinf_vl.envs.geometry_tool import GeometryTool
from rlinf_vl.envs.picture_tool import MIN_SIDE
from rlinf_vl.rewards import math_verdict, stop_grading
from rlinf_vl.types import Problem


@pytest.fixture(scope="module", autouse=True)
def no_grader_left():
    yield
    stop_grading()


def call(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def env_of(problem: Problem) -> GeometryTool:
    env = GeometryTool(grade=math_verdict, reward_max=1.0, reward_min=0.0, tools_prompt="")
    env.start(problem)
    return env


def problem_of(*sizes: tuple[int, int]) -> Problem:
    """Pictures of random pixels, by (width, height)."""
    rng = np.random.default_rng(0)
    pictures = [Image.fromarray(rng.integers(0, 256, (h, w, 3), np.uint8)) for w, h in sizes]
    images = tuple(to_image_ref(picture, root=None) for picture in pictures)
    return Problem(
        "p:0", ({"role": "user", "content": "How long is $x$?"},), "\\boxed{5\\sqrt{3}}", images
    )


def shown(env: GeometryTool, name: str, **arguments) -> Image.Image:
    before, picture, after = env.step(call(name, **arguments)).messages[0]["content"]
    assert before["text"] == "<tool_response>\n" and after["text"] == "\n</tool_response>"
    return picture["image"]


def said(env: GeometryTool, name: str, **arguments) -> str:
    (part,) = env.step(call(name, **arguments)).messages[0]["content"]
    return part["text"].removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")


@pytest.mark.slow
def test_first_answer_is_told_from_what_the_tool_helped_to():
    env = env_of(problem_of((64, 64)))
    assert said(env, "calc_score", answer="8") == "0.0"
    assert env.step(call("zoom", box=[0, 0, 500, 500])).info["metrics"]["first_correct"] == 0.0
    assert said(env, "calc_score", answer="\\sqrt{75}") == "1.0"
    result = env.step("So \\boxed{5\\sqrt{3}}.")
    assert result.done and result.info["answer"] == "So \\boxed{5\\sqrt{3}}."
    assert result.info["metrics"] == {
        "tool_calls": 3.0,
        "tool_errors": 0.0,
        "read_tool_calls": 3.0,
        "unread_tool_calls": 0.0,
        "first_correct": 0.0,
        "correct": 1.0,
    }


def test_an_answer_that_was_right_at_once_counts_as_first():
    env = env_of(problem_of((64, 64)))
    assert said(env, "calc_score", answer="\\boxed{5\\sqrt3}") == "1.0"
    result = env.step("\\boxed{8}")
    assert (result.info["metrics"]["first_correct"], result.info["metrics"]["correct"]) == (
        1.0,
        0.0,
    )
    assert (
        env_of(problem_of((64, 64))).step("\\boxed{5\\sqrt3}").info["metrics"]["first_correct"]
        == 1.0
    )


def test_crop_is_the_box_of_the_picture_in_thousandths():
    problem = problem_of((400, 200), (80, 60))
    env, whole = env_of(problem), np.asarray(decode(problem.images[0]))
    part = shown(env, "crop", box=[250, 100, 500, 600])
    np.testing.assert_array_equal(np.asarray(part), whole[20:120, 100:200])
    np.testing.assert_array_equal(np.asarray(shown(env, "crop", box=[-50, -1, 1e300, 1001])), whole)
    assert shown(env, "crop", box=[0, 0, 1000, 1000], picture=2).size == (80, 60)


def test_zoom_enlarges_to_the_pictures_size():
    env = env_of(problem_of((400, 200)))
    assert shown(env, "zoom", box=[250, 0, 500, 500]).size == (200, 200)
    assert shown(env, "zoom", box=[0, 0, 500, 250]).size == (400, 100)
    assert shown(env, "zoom", box=[0, 0, 100, 1000]).size == (40, 200)


@pytest.mark.parametrize("size", [(400, 200), (20, 50), (40, 7000), (1, 1)])
@pytest.mark.parametrize(
    "box", [[500, 500, 500.1, 500.1], [999, 999, 1000, 1000], [0, 0, 0.1, 1000]]
)
def test_what_is_shown_has_a_smallest_size_and_can_be_an_image(size, box):
    part = shown(env_of(problem_of(size)), "crop", box=box)
    assert part.width >= min(size[0], MIN_SIDE) and part.height >= min(size[1], MIN_SIDE)
    to_image_ref(part, root=None)
    to_image_ref(shown(env_of(problem_of(size)), "zoom", box=box), root=None)


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ({"box": [0, 0, 10]}, "3 numbers are not [left, top, right, bottom]"),
        ({"box": [10, 0, 10, 5]}, "holds no part of the picture"),
        ({"box": [20, 0, 10, 5]}, "holds no part of the picture"),
        ({"box": [1000, 0, 2000, 5]}, "holds no part of the picture"),
        ({"box": [0, 0, 5, 5], "picture": 2}, "picture: 2 is none of the question's 1"),
        ({"box": [0, 0, 5, 5], "picture": 0}, "picture: 0 is none"),
        ({"box": "all"}, "arguments.box: 'all' is not of type 'array'"),
    ],
)
def test_a_box_that_is_none_is_answered(arguments, wrong):
    assert wrong in said(env_of(problem_of((64, 64))), "zoom", **arguments)


def test_an_answer_that_is_none_is_answered():
    env = env_of(problem_of((64, 64)))
    assert "arguments.answer" in said(env, "calc_score", answer=["8"])
    assert said(env, "calc_score", answer=8) == "0.0"


def test_the_recipe_tells_of_its_tools():
    rollout = load_config("geo3k-tool").rollout
    assert rollout.env_class == "geometry_tool" and rollout.max_turns == 6
    env = GeometryTool(grade=math_verdict, reward_max=1.0, reward_min=0.0, **rollout.env_kwargs)
    system, question = env.start(problem_of((64, 64)))
    text = system["content"][0]["text"]
    assert text.startswith("You solve geometry problems") and text.endswith(
        "in a message without calls."
    )
    assert (
        all(f'"name": "{name}"' in text for name in ("calc_score", "crop", "zoom"))
        and "{tools}" not in text
    )
    assert question == env.problem.messages[0]


def test_real_rows(geo3k_dir: Path):
    rows = ProblemDataset([str(geo3k_dir / "test.parquet")], "val", RowFormat())
    for row in range(0, len(rows), 9):
        problem = rows[row]
        env = env_of(problem)
        assert said(env, "calc_score", answer=problem.answer) == "1.0", problem.answer
        whole = decode(problem.images[0])
        assert shown(env, "crop", box=[0, 0, 1000, 1000]).size == whole.size
        part = shown(env, "zoom", box=[100, 100, 400, 400])
        assert max(part.width / whole.width, part.height / whole.height) == pytest.approx(
            1, abs=0.02
        )
        result = env.step(problem.answer)
        assert result.info["metrics"]["correct"] == result.info["metrics"]["first_correct"] == 1.0
