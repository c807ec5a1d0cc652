"""The rewards that have names: by the formulas of their papers, and by answers as models write them."""

import asyncio
import math
import random

import pytest
from episodes import encoded, picture

from rlinf_vl.rewards import GradingError
from rlinf_vl.rewards.boxes import overlap, reference_box
from rlinf_vl.rewards.named import NAMED, named_function
from rlinf_vl.rewards.processes import Limits
from rlinf_vl.rewards.result import Answer
from rlinf_vl.rewards.scoring import make_scorer
from rlinf_vl.rewards.texts import edit_distance
from rlinf_vl.types import Problem


def scored(name, said, answer, tokens=0, kwargs=None, prompt="", images=(), **columns):
    function, _ = named_function(name, kwargs or {})
    message = {"role": "user", "content": [{"type": "text", "text": prompt}]}
    problem = Problem("p:0", (message,), answer, tuple(images), columns=columns)
    (result,) = function.results(
        problem, [Answer(said, said.rpartition("</think>")[2], (0,) * tokens)], 1.0
    )
    if isinstance(result, Exception):
        raise result
    return result


SHAPES = "What is shown?\nA. square\nB. circle\nC. an oval\nD. 3.5 cm"


@pytest.mark.parametrize(
    "said",
    [
        "B", "b", "(B)", "B.", " **B** ", "B. circle", "(B) circle", "B: it is round", "circle", "Circle.", "<answer>B</answer>",
        "<answer> circle </answer>", "\\boxed{B}", "\\boxed{\\text{circle}}", "<answer>\\boxed{B. circle}</answer>",
        "<think>A? C? no</think>B", "The answer is B.", "Answer: (B)", "A is not round.\nSo the correct answer is **B**.",
        "It is round, so (B).", "I look at the edges: none.\nB", "The right option is B",
        "<answer>A</answer> no, <answer>B</answer>",
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "answer", ["B", "(B)", "B. circle", "circle", "<answer>B</answer>", "\\boxed{B}"]
)
def test_a_choice_is_read(said, answer):
    assert scored("choice", said, answer, prompt=SHAPES).value == 1.0
    assert scored("choice", said, "C", prompt=SHAPES).value == 0.0


@pytest.mark.parametrize(
    "said",
    [
        "",
        "A circle or a square?",
        "circle or square",
        "A",
        "E",
        "<answer></answer>B",
        "AB",
        "Best",
        "\\boxed{A} B",
        "3.5",
        "not B or C",
    ],
)
def test_what_chooses_nothing_or_something_else_is_wrong(said):
    assert scored("choice", said, "B", prompt=SHAPES).value == 0.0


def test_options_come_from_the_row_or_the_question():
    for columns in (
        {"options": ["red", "green"]},
        {"choices": {"A": "red", "B": "green"}},
        {"options": '["A. red", "B. green"]'},
    ):
        assert scored("choice", "It is\ngreen", "B", **columns).value == 1.0
        assert scored("choice", "red", "green", **columns).value == 0.0
        assert scored("choice", "B", "green", **columns).value == 1.0
    for prompt in (
        "Colour? (A) red (B) green",
        "Colour?\n(A) red\n(B) green\nAnswer with a letter.",
        "Colour? A. red B. green",
    ):
        assert scored("choice", "green", "B", prompt=prompt).value == 1.0, prompt
    assert scored("choice", "B", "B").value == 1.0 and scored("choice", "green", "B").value == 0.0
    assert scored("choice", "Green!", "green").value == 1.0, (
        "without letters it is compared as text"
    )


def test_exact():
    for said in (
        "42",
        " 42\n",
        "<answer>42</answer>",
        "So \\boxed{42}.",
        "<answer>\\boxed{42}</answer>",
    ):
        assert (
            scored("exact", said, "42").value == scored("exact", said, "\\boxed{42}").value == 1.0
        )
    for said in ("", "It is 42", "\\boxed{42", "\\boxed{4} 42", "4 2"):
        assert scored("exact", said, "42").value == 0.0
    assert (
        scored("exact", "a  b", "a b").value == 1.0 and scored("exact", "A b", "a b").value == 0.0
    )
    assert (
        scored("exact_alnum", "Ice-cream.", "ice Cream").value == 1.0
        and scored("exact_alnum", "ab c", "ab").value == 0.0
    )
    assert scored("exact_alnum", "...", "?").value == 0.0
    assert (
        scored("exact", "blue", '["azure", "blue"]').value
        == scored("exact", "blue", "azure", answers=["blue"]).value
        == 1.0
    )


def test_anls_is_the_papers():
    """Examples by hand: distances 0; 1 of 5; 3 of 5, beyond the threshold; 2 of 4, which is not below it; the best of several."""
    assert scored("anls", "Hello", "hello").value == 1.0
    assert scored("anls", "<answer>hallo</answer>", "Hello").value == pytest.approx(1 - 1 / 5)
    assert scored("anls", "hexxx", "hello").value == 0.0
    assert scored("anls", "hexx", "hell").value == 0.0
    assert scored("anls", "hexx", "hell", kwargs={"threshold": 0.6}).value == 0.5
    assert scored("anls", "hallo", "", answers=["bye", "hallo!", "hullo"]).value == pytest.approx(
        1 - 1 / 6
    )
    assert scored("anls", "", "x").value == 0.0 and scored("anls", "x" * 100_000, "y").value == 0.0


def test_edit_distance_against_its_definition():
    def distance(a, b):
        if not a or not b:
            return len(a) + len(b)
        return min(
            distance(a[1:], b) + 1, distance(a, b[1:]) + 1, distance(a[1:], b[1:]) + (a[0] != b[0])
        )

    rng = random.Random(1)
    for _ in range(100):
        a, b = ("".join(rng.choices("abc", k=rng.randrange(6))) for _ in "ab")
        assert edit_distance(a, b) == distance(a, b)


def test_giou_is_the_papers():
    """Against areas counted cell by cell, and by hand: two unit squares a unit apart have IoU 0 and GIoU -1/3."""
    assert overlap((0, 0, 1, 1), (2, 0, 3, 1)) == (0.0, pytest.approx(-1 / 3))
    assert overlap((0, 0, 0.5, 0.5), (0.5, 0.5, 1, 1)) == (0.0, -0.5)
    assert overlap((0, 0, 0.5, 0.5), (0, 0, 0.5, 0.25)) == (0.5, 0.5)
    assert (
        overlap((0, 0, 2, 2), (0, 0, 2, 2)) == (1.0, 1.0)
        and overlap((1, 1, 1, 1), (1, 1, 1, 1))[1] == 1.0
    )
    rng = random.Random(2)
    for _ in range(50):
        boxes = []
        for _ in "ab":
            x, y = rng.randrange(6), rng.randrange(6)
            boxes.append((x, y, x + rng.randrange(1, 5), y + rng.randrange(1, 5)))
        cells = [{(x, y) for x in range(b[0], b[2]) for y in range(b[1], b[3])} for b in boxes]
        hull = math.prod(max(b[2 + i] for b in boxes) - min(b[i] for b in boxes) for i in (0, 1))
        union, iou = len(cells[0] | cells[1]), len(cells[0] & cells[1]) / len(cells[0] | cells[1])
        assert overlap(*boxes) == (pytest.approx(iou), pytest.approx(iou - (hull - union) / hull))


@pytest.mark.parametrize(
    "said",
    [
        "[10, 20, 30, 40]", "<answer>[10,20,30,40]</answer>", '```json\n[{"bbox_2d": [10, 20, 30, 40], "label": "cat"}]\n```',
        "<|box_start|>(10,20),(30,40)<|box_end|>", "(10.0, 20, 30, 40)", "10 20 30 40", "[30, 40, 10, 20]",
        "not [1,2,3,4] but [10,20,30,40]", "\\boxed{[10, 20, 30, 40]}",
    ],
)  # fmt: skip
def test_a_box_is_read(said):
    result = scored("bbox_giou", said, "[10, 20, 30, 40]")
    assert (result.value, result.parts["iou"], result.correct) == (1.0, 1.0, True)


def test_boxes_and_points():
    half = scored("bbox_giou", "[0, 0, 10, 20]", "[0, 0, 10, 10]")
    assert (half.value, half.parts["iou"], half.correct) == (0.5, 0.5, True)
    none = scored("bbox_giou", "I see none", "[0, 0, 1, 1]")
    assert (none.value, none.parts["iou"]) == (-1.0, 0.0)
    assert scored("bbox_giou", "[0, 0, 1]", "[0, 0, 1, 1]").correct is None
    assert scored("bbox_giou", "[2, 0, 3, 1]", "[0, 0, 1, 1]").parts["iou"] == 0.0
    for said, inside in (
        ("(5, 5)", 1),
        ("[0, 10]", 1),
        ("(11, 5)", 0),
        ("5 5", 1),
        ("none", 0),
        ("[4, 4, 6, 6]", 1),
        ("[0, 0, 20, 2]", 1),  # its middle is on the border
        ("[0, 0, 22, 2]", 0),
        ("[4, 0, 6, 20]", 1),
        ("[4, 0, 6, 22]", 0),
        ("[-22, 4, 0, 6]", 0),
        ("[4, -22, 6, 0]", 0),
        ("(-1, 5)", 0),
        ("(5, -1)", 0),
        ("(5, 11)", 0),
        ("(0, 0)", 1),
        ("(10, 10)", 1),
        ("(2, 9) or (9, 2) or (20, 30)", 0),
        ("(20, 30) or (30, 20), no, (9, 2)", 1),
        ("7 8 9", 0),
        ('<point x="5" y="6">', 1),
        ("(20, 30), (9, 2)", 1),  # two points, of which the last counts
        ("(1, 1), (30, 30)", 0),
        ("<|box_start|>(4,4),(6,6)<|box_end|>", 1),
        ("<|box_start|>(9,9),(20,20)<|box_end|>", 0),
        ("4 4 6 6", 1),
    ):
        assert scored("point_in_box", said, "[0, 0, 10, 10]").value == inside, said
    shown = [encoded(picture(100, 200, 1))]
    assert (
        scored(
            "bbox_giou",
            "[500, 500, 1000, 1000]",
            "[100, 50, 200, 100]",
            kwargs={"relative": 1000},
            images=shown,
        ).value
        == 1.0
    )
    assert (
        scored(
            "point_in_box", "(999, 10)", "[190, 0, 200, 5]", kwargs={"relative": 1000}, images=shown
        ).value
        == 1.0
    )
    with pytest.raises(GradingError, match="'left' is no box"):
        reference_box("left")
    with pytest.raises(GradingError):
        scored("point_in_box", "(1, 1)", "left")
    for several in ("[[0, 0, 9, 9], [20, 20, 30, 30]]", "(0,0),(9,9) (20,20),(30,30)"):
        for name in ("bbox_giou", "point_in_box"):
            with pytest.raises(GradingError, match="has 2 boxes, and one is compared"):
                scored(name, "[20, 20, 30, 30]", several)


def test_format():
    for said, tags, box, right in (
        ("<think>a</think><answer>b</answer>", None, False, 1),
        (" <think>a\n</think>\n<answer>b</answer> ", None, False, 1),
        ("a</think><answer>b</answer>", None, False, 1),
        ("<think>a</think>b", None, False, 0),
        ("<think>a</think>so <answer>b</answer>", None, False, 0),
        ("<answer>b</answer><think>a</think>", None, False, 0),
        ("<think>a</think><think>a</think><answer>b</answer>", None, False, 0),
        ("<think></think><answer>b</answer>", None, False, 0),
        ("<think>a <answer>c</answer></think><answer>b</answer>", None, False, 0),
        ("so \\boxed{1} it is", None, True, 1),
        ("\\boxed{ }", None, True, 0),
        ("\\boxed{1", None, True, 0),
        ("<think>a</think> so \\boxed{1}.", ["think"], True, 1),
        ("<think>\\boxed{1}</think> 1", ["think"], True, 0),
        ("\\boxed{1}", ["think"], True, 0),
        ("", None, False, 0),
    ):
        assert scored("format", said, "x", kwargs={"tags": tags, "box": box}).value == right, said
    assert not NAMED["format"].judges


def test_lengths_are_the_papers():
    # DAPO's own numbers.
    for tokens, worth in (
        (0, 0.0),
        (16384, 0.0),
        (18432, -0.5),
        (20480, -1.0),
        (30000, -1.0),
    ):
        assert (
            scored("overlong", "x", "y", tokens, {"max_tokens": 20480, "buffer": 4096}).value
            == worth
        )
    for tokens, worth in ((1000, 0.5), (0, 0.8), (2000, 0.2), (4000, 0.0)):
        assert scored("length", "x", "y", tokens, {"tokens": 1000}).value == pytest.approx(worth)
    assert scored("length", "x", "y", 900, {"tokens": 1000, "alpha": 0.01}).value == 1.0


def test_named_ones_side_by_side():
    entries = [{"function": "format", "weight": 0.1, "kwargs": {"box": True}}, {"function": "math"}]
    scorer = make_scorer(
        entries, reward_max=1.0, reward_min=0.0, files={}, limits=Limits(1.0, 1.0, 1)
    )
    answers = [
        Answer("\\boxed{42}", "\\boxed{42}"),
        Answer("\\boxed{41}", "\\boxed{41}"),
        Answer("42", "42"),
    ]
    scores = asyncio.run(scorer(Problem("p:0", (), "42"), answers))
    scorer.close()
    assert [(score.reward, score.correct) for score in scores] == [
        (1.1, True),
        (0.1, False),
        (0.0, False),
    ]
    assert scores[1].parts == {"format": 1.0, "math": 0.0}
