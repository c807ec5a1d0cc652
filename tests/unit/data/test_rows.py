"""Rows become problems: where images stand, what is kept verbatim, and which rows are refused."""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from rlinf_vl.data.dataset import ProblemDataset
from rlinf_vl.data.formats import RowFormat
from rlinf_vl.data.images import decode
from rlinf_vl.data.rows import row_to_problem
from rlinf_vl.data.unusable import RowError, kind_and_reason
from rlinf_vl.rewards import grade, grade_math
from rlinf_vl.types import ImageRef, Problem


def png(grey: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (6, 4), grey).save(buffer, format="PNG")
    return buffer.getvalue()


A, B = png(10), png(200)


def problem(prompt: Any, images: Any = None, answer: Any = "6", **options: Any) -> Problem:
    return row_to_problem(
        {"problem": prompt, "images": images, "answer": answer}, "d:0", RowFormat(**options)
    )


def contents(p: Problem) -> list[list[str]]:
    """Per message: texts, and images as their URLs."""
    return [
        [part.get("text") or part["image_url"]["url"] for part in m["content"]] for m in p.messages
    ]


def url(data: bytes) -> str:
    return ImageRef.of(data).url


def test_an_image_stands_where_its_placeholder_does() -> None:
    p = problem("Compare <image> \nwith <image>.", [A, {"bytes": B, "path": None}])
    assert p.id == "d:0" and p.answer == "6" and p.images == (ImageRef.of(A), ImageRef.of(B))
    assert p.messages == (
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Compare "},
                {"type": "image_url", "image_url": {"url": url(A)}},
                {"type": "text", "text": " \nwith "},
                {"type": "image_url", "image_url": {"url": url(B)}},
                {"type": "text", "text": "."},
            ],
        },
    )


def test_no_empty_text_is_left_around_placeholders() -> None:
    assert contents(problem("<image><image>Find x.", [A, B])) == [[url(A), url(B), "Find x."]]
    assert contents(problem("<image>", A)) == [[url(A)]]


def test_without_placeholders_images_stand_first() -> None:
    assert contents(problem("Find x.", [A, B])) == [[url(A), url(B), "Find x."]]


def test_a_row_may_have_no_image() -> None:
    for none in (None, [], [None]):
        p = problem("Find x.", none)
        assert contents(p) == [["Find x."]] and p.images == ()
    assert (
        row_to_problem(
            {"q": "1+1", "a": 2}, "r", RowFormat(prompt_key="q", answer_key="a", image_keys=[])
        ).answer
        == "2"
    )


def test_an_image_that_appears_twice_is_listed_twice() -> None:
    p = problem("<image><image>", [A, A])
    assert p.images == (ImageRef.of(A), ImageRef.of(A)) and contents(p) == [[url(A), url(A)]]


def test_several_image_columns_follow_each_other() -> None:
    row = {"problem": "<image> and <image>", "first": A, "more": [B], "answer": "6"}
    p = row_to_problem(row, "d:0", RowFormat(image_keys=["more", "first"]))
    assert p.images == (ImageRef.of(B), ImageRef.of(A))


def test_system_prompt_and_suffix() -> None:
    p = problem("<image>Find x.", A, system_prompt="Be brief.", prompt_suffix=" Box it.")
    assert [m["role"] for m in p.messages] == ["system", "user"]
    assert contents(p) == [["Be brief."], [url(A), "Find x. Box it."]]
    assert contents(problem("<image>", A, prompt_suffix=" <image>?")) == [[url(A), " <image>?"]]


def test_a_prompt_may_be_a_chat() -> None:
    chat = [
        {"role": "system", "content": "Yours."},
        {
            "role": "user",
            "content": [{"type": "image", "text": None}, {"type": "text", "text": "Find x"}],
        },
        {"role": "assistant", "content": "Which?"},
        {"role": "user", "content": "In <image>."},
    ]
    p = problem(chat, [A, B], prompt_suffix=" Go.")
    assert [m["role"] for m in p.messages] == ["system", "user", "assistant", "user"]
    assert contents(p) == [["Yours."], [url(A), "Find x"], ["Which?"], ["In ", url(B), ". Go."]]
    replaced = problem(chat, [A, B], system_prompt="Mine.")
    assert contents(replaced)[0] == ["Mine."] and len(replaced.messages) == 4
    bare = [m for m in chat if m["role"] == "system"] + [{"role": "user", "content": "Find x"}]
    assert contents(problem(bare, [A])) == [["Yours."], [url(A), "Find x"]]


@pytest.mark.parametrize(
    ("value", "stored"), [(6, "6"), (6.5, "6.5"), (r"\boxed{6}", r"\boxed{6}"), (" 6", " 6")]
)
def test_answers_are_stored_as_given(value: Any, stored: str) -> None:
    assert problem("Find x.", answer=value).answer == stored


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e-05, "0.00001"),
        (2e16, "20000000000000000"),
        (1e23, "1" + 23 * "0"),
        (5.0, "5"),
        (-0.5, "-0.5"),
        (0.1 + 0.2, "0.3"),
        (2 / 3, "0.666666666666667"),
        (12345678901.25, "12345678901.25"),
        (np.float32(0.1), "0.1"),
        (np.float32(17.32), "17.32"),
        (np.float32(123456.78), "123456.8"),
        (np.float32(2e16), "20000000000000000"),
        (np.float16(0.1), "0.1"),
        (10**20, "1" + 20 * "0"),
    ],
)
def test_a_number_is_written_as_people_write_it(value: Any, text: str) -> None:
    assert problem("Find x.", answer=value).answer == text


def test_an_answer_of_any_type_of_number_is_graded_right(tmp_path: Path) -> None:
    values = {
        "float32": [0.1, 1e-5, 2e16, 17.32, 1 / 3],
        "float64": [0.1, 1e-5, 2e16, 17.32, 1 / 3],
    }
    responses = ["0.1", "0.00001", "20000000000000000", "17.32", r"\frac{1}{3}"]
    for kind, column in values.items():
        table = {"problem": ["x?"] * 5, "images": pa.array([[]] * 5, pa.list_(pa.binary()))}
        pq.write_table(
            pa.table(table | {"answer": pa.array(column, kind)}), tmp_path / f"{kind}.parquet"
        )
        rows = ProblemDataset([str(tmp_path / f"{kind}.parquet")], "train")
        for i, response in enumerate(responses):
            assert grade_math(rf"\boxed{{{response}}}", rows[i].answer), (kind, rows[i].answer)
            assert not grade_math(rf"\boxed{{9{response}}}", rows[i].answer)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (np.bool_(False), "false"),
        ([6], "6"),
        ([1, 2], "[1, 2]"),
        ([0.5, 2.0, -3], "[0.5, 2, -3]"),
        ([np.float32(0.1), np.float32(17.32)], "[0.1, 17.32]"),
        (np.array([10, 20, 30, 40]), "[10, 20, 30, 40]"),
        ((1, 2), "[1, 2]"),
        ([[1, 2], [3, 4]], "[[1, 2], [3, 4]]"),
        (["a"], '["a"]'),
    ],
)
def test_booleans_and_lists_are_answers(value: Any, text: str) -> None:
    assert problem("Find x.", answer=value).answer == text


def test_answers_that_are_booleans_or_lists_of_a_table_are_graded(tmp_path: Path) -> None:
    rows = [{"problem": "x?", "images": [], "yes": True, "box": [10.0, 20.0, 30.5, 40.0]}]
    pq.write_table(pa.Table.from_pylist(rows, pa.schema(
        [("problem", pa.string()), ("images", pa.list_(pa.binary())), ("yes", pa.bool_()), ("box", pa.list_(pa.float32()))]
    )), tmp_path / "rows.parquet")  # fmt: skip
    answers = {}
    for key in ("yes", "box"):
        (row,) = ProblemDataset(
            [str(tmp_path / "rows.parquet")], "train", RowFormat(answer_key=key)
        )
        answers[key] = row.answer
    assert answers == {"yes": "true", "box": "[10, 20, 30.5, 40]"}
    for function in ("choice", "exact_alnum", "math"):
        for said, pays in (("Yes", 1.0), ("true", 1.0), ("No", 0.0), ("false", 0.0), ("", 0.0)):
            assert grade(function, f"\\boxed{{{said}}}", answers["yes"]) == pays, (function, said)
    assert grade("bbox_giou", "[10, 20, 30.5, 40]", answers["box"]) == 1.0
    for said in ("[10, 20, 30.5, 40]", "10, 20, 30.5, 40"):
        assert grade("math", f"\\boxed{{{said}}}", answers["box"]) == 1.0, said
    assert grade("math", "\\boxed{20, 10, 30.5, 40}", answers["box"]) == 0.0, "in another order"
    assert grade("math", "\\boxed{1, 2}", "[1, 2]") == 0.0, "which may be an interval"


def test_images_of_a_system_message_go_with_it() -> None:
    chat = [
        {"role": "system", "content": "Read <image> like <image>."},
        {"role": "user", "content": "And <image>?"},
    ]
    kept = problem(chat, [A, B, A])
    assert len(kept.images) == 3 and contents(kept)[0] == ["Read ", url(A), " like ", url(B), "."]
    replaced = problem(chat, [B, B, A], system_prompt="Mine.")
    assert contents(replaced) == [["Mine."], ["And ", url(A), "?"]] and [
        x.url for x in replaced.images
    ] == [url(A)]
    with pytest.raises(RowError, match="3 <image> and the row 1"):
        problem(chat, [A], system_prompt="Mine.")
    placed = problem(
        [chat[0] | {"content": "No."}, {"role": "user", "content": "?"}],
        [A, B],
        system_prompt="Mine.",
    )
    assert contents(placed) == [["Mine."], [url(A), url(B), "?"]] and len(placed.images) == 2


def test_an_empty_column_of_videos_and_frames_as_images_are_no_videos() -> None:
    for empty in (None, [], ""):
        assert row_to_problem(
            {"problem": "x", "images": A, "answer": "6", "videos": empty},
            "d:0",
            RowFormat(video_keys=["videos"]),
        ).images
    row = {"problem": "x", "video": [A, B], "answer": "6"}
    assert len(row_to_problem(row, "d:0", RowFormat(image_keys=["video"])).images) == 2


def test_blank_images_keep_place_and_size() -> None:
    p = problem("Find <image>.", A, blank_images=True)
    assert contents(p) == [["Find ", p.images[0].url, "."]] and p.images[0] != ImageRef.of(A)
    picture = decode(p.images[0])
    assert picture.size == (6, 4) and picture.getcolors() == [(24, (128, 128, 128))]


@pytest.mark.parametrize(
    ("cells", "root", "expected"),
    [
        ({"env_class": "maze", "env_kwargs": '{"size": 4}'}, "/", "maze"),
        ({"env_class": "maze"}, None, "maze"),
        ({"env_class": "maze", "env_kwargs": "null"}, "/", "maze"),
    ],
)
def test_the_environment_of_a_row(cells: dict[str, Any], root: str | None, expected: str) -> None:
    row = {"problem": "1 + 1?", "images": None, "answer": "2", **cells}
    found = row_to_problem(row, "d:0", RowFormat(), Path(root) if root else None)
    assert found.env_class == expected
    assert found.columns.get("env_kwargs") in (None, {"size": 4})


def test_errors_of_rows_cross_a_process_and_have_a_kind() -> None:
    with pytest.raises(RowError) as caught:
        problem(None)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert kind_and_reason(caught.value) == ("prompt unusable", caught.value.reason)
    assert kind_and_reason(KeyError("x")) == ("KeyError", "'x'")
