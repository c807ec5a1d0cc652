"""The SVG chart: well-formed, with every finite point where its value says."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

SCRIPT = Path(__file__).parents[3] / "docs/learning_curve.py"
spec = importlib.util.spec_from_file_location("learning_curve", SCRIPT)
assert spec is not None and spec.loader is not None
curve = importlib.util.module_from_spec(spec)
spec.loader.exec_module(curve)

SVG = "{http://www.w3.org/2000/svg}"


def polylines(path: Path) -> list[list[tuple[float, float]]]:
    root = ElementTree.parse(path).getroot()
    return [
        [tuple(map(float, p.split(","))) for p in e.get("points").split()]
        for e in root.iter(SVG + "polyline")
    ]


def texts(path: Path) -> list[str]:
    return [element.text for element in ElementTree.parse(path).getroot().iter(SVG + "text")]


def test_points_stand_on_the_axes_scale(tmp_path):
    path = tmp_path / "out.svg"
    curve.draw_curve(
        {"a": [(0, 0.0), (10, 1.0), (5, 0.5)], "b <&>": [(0, 1.0)]}, path, "T & t", "acc <1>"
    )
    first, second = polylines(path)
    left, right = curve.LEFT, curve.WIDTH - curve.RIGHT
    top, bottom = curve.TOP, curve.HEIGHT - curve.BOTTOM
    # Sorted by step, and the middle is in the middle.
    assert first == [(left, bottom), ((left + right) / 2, (top + bottom) / 2), (right, top)]
    assert second == [(left, top)]
    labels = texts(path)
    assert {"T & t", "acc <1>", "a", "b <&>", "training step", "0", "0.2", "1", "10"} <= set(labels)


def test_values_that_are_not_finite_are_left_out(tmp_path):
    path = tmp_path / "out.svg"
    curve.draw_curve(
        {"a": [(0, None), (1, math.nan), (2, 0.5), (3, math.inf), (4, 0.7)]}, path, "", ""
    )
    assert len(polylines(path)[0]) == 2
    for nothing in ({}, {"a": []}, {"a": [(0, None)]}):
        with pytest.raises(ValueError, match="nothing to draw"):
            curve.draw_curve(nothing, path, "", "")


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 1), (0.25, 0.93), (-3, 7), (5.01, 5.03), (4, 4), (0, 1e6), (1e-6, 3e-6), (0, 9.99)],
)
def test_ticks_enclose_and_are_round(low, high):
    ticks = curve.ticks(low, high)
    assert ticks[0] <= low + 1e-12 and ticks[-1] >= high - 1e-12
    assert 3 <= len(ticks) <= 8
    step = ticks[1] - ticks[0]
    assert float(f"{step:.6e}"[0]) in (1, 2, 5) or math.isclose(
        step / 10 ** round(math.log10(step)), 1
    )


def test_steps_have_whole_ticks():
    assert curve.ticks(0, 2, integers=True) == [0, 1, 2]
    assert curve.ticks(3, 3, integers=True) == [2, 3, 4]


def write_run(folder: Path, rows: list[dict]) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 9, "val/acc'
    )
    return folder


@pytest.mark.slow
def test_command_draws_the_validation_accuracy_of_runs(tmp_path):
    rows = [
        {"step": s, "reward/mean": 9.0} | ({"val/accuracy": s / 4} if s % 2 == 0 else {})
        for s in range(5)
    ]
    one, two = write_run(tmp_path / "one", rows), write_run(tmp_path / "two", rows[:3])
    out = tmp_path / "curve.svg"
    result = subprocess.run(
        [sys.executable, "-W", "error", str(SCRIPT), str(out), f"sees={one}", f"blind={two}"],
        env=os.environ | {"PYTHONPATH": str(SCRIPT.parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert [len(line) for line in polylines(out)] == [3, 2]
    assert {"sees", "blind", "val/accuracy"} <= set(texts(out))


def test_of_several_runs_the_mean_is_drawn_in_a_band(tmp_path):
    rows = [[{"step": s, "val/env/x": s / 4 + d} for s in range(3)] for d in (0.0, 0.5)]
    runs = [write_run(tmp_path / str(i), own) for i, own in enumerate(rows)]
    out = tmp_path / "curve.svg"
    curve.main(
        [
            str(out),
            f"both@val/env/x={runs[0]},{runs[1]}",
            f"one@val/env/x={runs[0]}",
            "--title",
            "T",
            "--label",
            "x",
        ]
    )
    both, one = polylines(out)
    (band,) = ElementTree.parse(out).getroot().iter(SVG + "polygon")
    edge = [tuple(map(float, point.split(","))) for point in band.get("points").split()]
    upper, lower = edge[:3], edge[:2:-1]
    assert lower == one
    for (_, y), (_, high), (_, low) in zip(both, upper, lower, strict=True):
        assert y == pytest.approx((high + low) / 2, abs=0.1) and high < y < low
    assert {"T", "x", "both", "one"} <= set(texts(out))


@pytest.mark.parametrize("run", ["no-equals", "name=/does/not/exist", "name={empty}"])
def test_command_says_what_is_wrong(tmp_path, run, capsys):
    empty = write_run(tmp_path / "empty", [{"step": 1}])
    with pytest.raises(SystemExit):
        curve.main([str(tmp_path / "o.svg"), run.format(empty=empty)])
    error = capsys.readouterr().err
    assert any(
        part in error for part in ("is not NAME=RUN_DIR", "does not exist", "has no val/accuracy")
    )
    assert not (tmp_path / "o.svg").exists()
