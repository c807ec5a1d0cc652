"""`rlinf_vl.rewards.grade`: any function by name, what it pays."""

import numpy as np
import pytest
from PIL import Image

from rlinf_vl.rewards import grade
from rlinf_vl.user_code import CodeError

MINE = """
def polite(response, answer, *, least=1, **row):
    return {"score": float(response.count("please") >= least and answer in response), "words": 2}
def bright(response, answer, images, tint): return images[0].getpixel((0, 0))[0] / 255 * tint
def trl(completions, answer, **columns): return [float(a in c) for c, a in zip(completions, answer)]
def none(response, answer): return None
def broken(response, answer): raise KeyError("mine")
"""


@pytest.fixture
def mine(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return lambda name: f"{file}:{name}"


def test_named_functions() -> None:
    assert (
        grade("math", r"so \boxed{\frac{1}{2}}", "0.5") == grade("math", r"\boxed{42}", 42) == 1.0
    )
    assert grade("math", "42", "42") == grade("math", "", "42") == 0.0
    assert grade("choice", "so (B)", "B", options=["red", "blue"]) == 1.0
    assert grade("choice", "blue", "B", prompt="Which?\nA. red\nB. blue") == 1.0
    assert grade("exact", "<think>41</think>42", answer="42") == 1.0
    assert grade("anls", "hallo", "", answers=["hello"]) == pytest.approx(0.8)
    assert grade("format", "<think>a</think><answer>b</answer>", "") == 1.0
    assert grade("format", "x", "", tags=[], box=True) == 0.0


def test_keywords_images_and_tokens_come_with_the_row() -> None:
    picture = Image.fromarray(np.zeros((200, 100, 3), np.uint8))
    assert (
        grade("bbox_giou", "[0, 0, 500, 500]", [0, 0, 50, 100], relative=1000, images=[picture])
        == 1.0
    )
    assert grade("overlong", "x", "", max_tokens=100, buffer=50, response_tokens=75) == -0.5
    assert grade("length", "x", "", tokens=1000, response_ids=[0] * 1000) == 0.5
    with pytest.raises(ValueError, match="pays by tokens: give response_tokens="):
        grade("overlong", "x", "", max_tokens=100, buffer=50)
    with pytest.raises(CodeError, match="'overlong' needs kwargs"):
        grade("overlong", "x", "", response_tokens=3)


def test_functions_of_ones_own(mine) -> None:
    picture = Image.fromarray(np.full((4, 4, 3), 255, np.uint8))
    assert (
        grade(mine("polite"), "please 42", "42") == 1.0
        and grade(mine("polite"), "please 42", "42", least=2) == 0.0
    )
    assert grade(mine("bright"), "", "", images=[picture], tint=0.5) == 0.5
    assert grade(mine("trl"), "42!", "42") == 1.0 and grade(mine("none"), "", "x") == 0.0
    with pytest.raises(KeyError, match="mine"):
        grade(mine("broken"), "", "")


def test_what_can_not_be_graded() -> None:
    with pytest.raises(CodeError, match="no reward function 'mathe'.*did you mean 'math'"):
        grade("mathe", "", "")
    with pytest.raises(ValueError, match="answer: None is no text"):
        grade("math", "", None)
    assert grade("bbox_giou", "[1, 2, 3, 4]", "left") == 0.0, "no verdict pays nothing"
