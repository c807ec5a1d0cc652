"""When a curve of accuracies crosses a target."""

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def crossing(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield importlib.import_module("time_to_accuracy").crossing
    sys.modules.pop("time_to_accuracy")


CURVE = [(5, 2.0, 0.4), (10, 4.0, 0.6), (15, 7.0, 0.8), (20, 9.0, 0.7)]


@pytest.mark.parametrize(
    ("target", "found"),
    [(0.7, (5.5, 12.5)), (0.8, (7.0, 15.0)), (0.6, (4.0, 10.0)), (0.3, (2.0, 5.0)), (0.9, None)],
)
def test_the_first_crossing_is_interpolated_between_evaluations_and_not_before_the_first(
    crossing, target, found
):
    assert crossing(CURVE, target) == (found if found is None else pytest.approx(found))
    assert crossing([], target) is None
