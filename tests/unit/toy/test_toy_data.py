"""The toy data set: the split, answers that follow from the pixels, determinism, and the cache."""

import io
import multiprocessing
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from rlinf_vl.data.cache import build_once
from rlinf_vl.extras.toy import drawings as toy
from rlinf_vl.extras.toy.task import toy_dataset_path


@pytest.fixture(scope="module")
def rows() -> dict[str, list[dict]]:
    return {split: toy.toy_rows(split) for split in ("train", "val")}


def test_split_partitions_the_placements() -> None:
    training, held_out = set(toy.training_placements()), set(toy.held_out_placements())
    assert len(toy.all_placements()) == len(set(toy.all_placements())) == 441
    assert len(held_out) == 76
    assert not training & held_out
    assert training | held_out == set(toy.all_placements())


def test_every_size_is_trained_on_except_those_held_out_whole() -> None:
    trained = {(p.width, p.height) for p in toy.training_placements()}
    every = {(w, h) for w in range(1, 7) for h in range(1, 7)}
    assert every - trained == set(toy.HELD_OUT_SIZES)


def _sides_in_pixels(data: bytes) -> tuple[tuple[int, int, int, int], bool]:
    """(width, height, x, y) in cells of what differs from the ground, and whether it is a filled rectangle.

    Which of the two colours is the ground is told by brightness: the ground's channels are all at least 225.
    """
    picture = np.asarray(Image.open(io.BytesIO(data)))
    assert picture.shape == (48, 48, 3)
    centres = picture[4::8, 4::8]
    filled = centres.min(axis=-1) < 225
    columns, lines = np.flatnonzero(filled.any(0)), np.flatnonzero(filled.any(1))
    width, height = np.ptp(columns) + 1, np.ptp(lines) + 1
    return (int(width), int(height), int(columns[0]), int(lines[0])), bool(
        filled.sum() == width * height
    )


@pytest.mark.slow
def test_answers_follow_from_the_pixels_and_no_held_out_picture_is_trained_on(
    rows: dict[str, list[dict]],
) -> None:
    seen = {}
    for split, split_rows in rows.items():
        seen[split] = set()
        for row in split_rows:
            (width, height, x, y), is_rectangle = _sides_in_pixels(row["images"][0]["bytes"])
            assert is_rectangle
            seen[split].add((width, height, x, y))
            expected = width * height if "area" in row["problem"] else 2 * (width + height)
            assert row["answer"] == f"\\boxed{{{expected}}}", row["id"]
    assert len(seen["train"]) == 365 and len(seen["val"]) == 76
    assert not seen["train"] & seen["val"]


def test_rows_have_the_form_of_real_data(rows: dict[str, list[dict]]) -> None:
    assert len(rows["train"]) == 34 * 2 * 80 and len(rows["val"]) == 152
    ids = [row["id"] for split in rows.values() for row in split]
    assert len(set(ids)) == len(ids)
    for row in rows["val"]:
        assert set(row) == {"id", "problem", "images", "answer"}
        assert re.fullmatch(r"<image>What is the (area|perimeter)\?", row["problem"])
        assert len(row["images"]) == 1


def test_rows_are_deterministic(rows: dict[str, list[dict]]) -> None:
    assert toy.toy_rows("val") == rows["val"]


def test_best_constant_accuracy_by_hand() -> None:
    rows = [{"problem": "a", "answer": x} for x in "112"] + [
        {"problem": "b", "answer": x} for x in "345"
    ]
    assert toy.best_constant_accuracy(rows) == pytest.approx((2 + 1) / 6)


def test_answering_without_looking_is_poor(rows: dict[str, list[dict]]) -> None:
    assert 0.1 < toy.best_constant_accuracy(rows["val"]) < 0.2


def test_dataset_path_writes_once_and_holds_the_rows(
    tmp_path: Path, rows: dict[str, list[dict]]
) -> None:
    path = toy_dataset_path("val", cache_dir=tmp_path)
    assert pq.read_table(path).to_pylist() == rows["val"]
    written = path.stat().st_mtime_ns
    assert toy_dataset_path("val", cache_dir=tmp_path) == path
    assert path.stat().st_mtime_ns == written


def test_cache_dir_from_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLINF_VL_CACHE", str(tmp_path))
    assert toy_dataset_path("val").is_relative_to(tmp_path)


def test_unknown_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'test'"):
        toy_dataset_path("test", cache_dir=tmp_path)


def test_failed_build_leaves_nothing_and_stale_remains_are_removed(tmp_path: Path) -> None:
    target = tmp_path / "thing"

    def fail(path: Path) -> None:
        path.mkdir()
        (path / "half").write_text("half")
        raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError, match="disk on fire"):
        build_once(target, fail)
    assert [p.name for p in tmp_path.iterdir()] == ["thing.lock"]
    (tmp_path / ".thing.tmp").mkdir()
    build_once(target, lambda path: path.write_text("whole") and None)
    assert target.read_text() == "whole"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["thing", "thing.lock"]


def _build_and_count(target: Path, start, builds) -> None:
    def build(path: Path) -> None:
        with builds.get_lock():
            builds.value += 1
        path.write_text("whole")

    start.wait()
    build_once(target, build)


def test_processes_that_ask_at_once_build_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    start, builds = context.Event(), context.Value("i", 0)
    processes = [
        context.Process(target=_build_and_count, args=(tmp_path / "x", start, builds))
        for _ in range(4)
    ]
    for process in processes:
        process.start()
    start.set()
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert builds.value == 1
