"""The data of the planted shortcuts: what has the answer, and what has not."""

import importlib
import io
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def did_it_look(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield importlib.import_module("did_it_look")
    sys.modules.pop("did_it_look")


def pixels_of(row):
    return np.asarray(Image.open(io.BytesIO(row["images"][0]["bytes"])))


def test_a_bar_at_the_edge_means_the_answer_and_the_rectangle_does_not(did_it_look):
    rows = did_it_look.border_rows("val")
    for row in rows:
        is_bar = (pixels_of(row) == 30).all(axis=2).reshape(6, 8, 6, 8).all(axis=(1, 3))
        np.testing.assert_array_equal(is_bar, did_it_look.bar_patches(row["answer"]))
        assert not (is_bar & did_it_look.rectangle_patches(row["id"])).any()
    answers = {}
    for row in rows:
        answers.setdefault(row["id"].rpartition("-")[0], set()).add(row["answer"])
    assert max(map(len, answers.values())) > 1, "one rectangle, several answers"


def test_the_wording_gives_half_of_the_answers_away(did_it_look):
    rows = did_it_look.wording_rows("val")
    perimeters = [row for row in rows if "perimeter" in row["problem"]]
    assert len(perimeters) * 2 == len(rows)
    assert {row["answer"] for row in perimeters} == {"\\boxed{14}"}
    assert len({row["answer"] for row in rows if "area" in row["problem"]}) > 10


def test_the_pointing_game_counts_maps_that_say_something(did_it_look):
    target = np.zeros((6, 6), bool)
    target[2:4, 2:4] = True
    values = np.zeros((3, 6, 6))
    values[0, 2, 3] = values[1, 0, 0] = 5.0
    values[2, 3, 3] = 0.01
    maps = [did_it_look.AnswerMap("area", v, {"rectangle": target}) for v in values]
    cells = did_it_look.map_cells(maps, "rectangle")
    assert cells == ["3", "5", "0.67", "0.50", "0.11", "0.50"]
    cells = did_it_look.map_cells(maps[2:], "rectangle")
    assert cells == ["1", "0.01", "0.00", "–", "–", "–"]
