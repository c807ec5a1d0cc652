"""The record of bad rows: one line a row, a table by kind, and the limit that stops the run."""

import json
import os
import pickle

import pytest
import tiny
from numpy.random import default_rng
from summaries import changed

from rlinf_vl.config import load_config
from rlinf_vl.data.bad_rows import BadRows, TooManyBadRows
from rlinf_vl.data.unusable import BadRow
from rlinf_vl.types import GroupSummary


def lines(run_dir):
    return [json.loads(line) for line in (run_dir / "bad_rows.jsonl").read_text().splitlines()]


def rows(n, kind="not an image", start=0, reason="…"):
    return [BadRow(kind, f"t:{i}", reason) for i in range(start, start + n)]


def test_a_row_is_recorded_once_with_its_first_reason(tmp_path):
    bad = BadRows(tmp_path, 0.5, {"train": 10, "val": 5})
    bad.add("train", [])
    assert (
        bad.counts() == {"train": 0, "val": 0}
        and bad.table("train") == ""
        and not bad.path.exists()
    )
    bad.add("train", [BadRow("answer missing", "t:3", "column 'answer' is empty")])
    bad.add("train", [BadRow("TimeoutError", "t:3", "later")], step=7)
    bad.add("val", [BadRow("TimeoutError", "t:3", "300 s")] * 2, step=7)
    assert lines(tmp_path) == [
        {
            "step": 0,
            "split": "train",
            "kind": "answer missing",
            "id": "t:3",
            "reason": "column 'answer' is empty",
        },
        {"step": 7, "split": "val", "kind": "TimeoutError", "id": "t:3", "reason": "300 s"},
    ]
    assert bad.counts() == {"train": 1, "val": 1}


def test_any_text_is_one_line_of_json(tmp_path):
    bad = BadRows(tmp_path, 1.0, {"train": 10})
    row = BadRow("KeyError", "t:\udc80", "a\nb\u2028c\x85d\x00 \ud800 ä")
    bad.add("train", [row], step=1)
    again = BadRows(tmp_path, 1.0, {"train": 10})
    again.add("train", [row], step=1)
    assert again.counts() == {"train": 1} and lines(tmp_path)[0]["reason"] == row.reason


def test_lines_are_on_the_disk_when_add_returns(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(
        os,
        "fsync",
        lambda descriptor: synced.append(os.fstat(descriptor).st_size) or fsync(descriptor),
    )
    bad = BadRows(tmp_path, 1.0, {"train": 1000})
    bad.add("train", rows(500))
    assert synced == [bad.path.stat().st_size] and len(lines(tmp_path)) == 500


def test_a_resumed_run_counts_no_row_twice(tmp_path):
    before = BadRows(tmp_path, 1.0, {"train": 10, "val": 10})
    before.add("train", rows(2))
    before.add("train", rows(1, "TimeoutError", start=5), step=5)
    before.add("val", rows(1, "TimeoutError", start=6), step=5)
    with before.path.open("a") as file:
        file.write('{"step": 6, "spl')  # torn by a crash
    after = BadRows(tmp_path, 1.0, {"train": 10})
    # What the filter found it finds again, unless it was repaired.
    assert after.counts() == {"train": 1}
    after.add("train", rows(1))
    after.add("train", rows(1, "TimeoutError", start=5), step=6)
    assert after.counts() == {"train": 2}
    assert [(line["step"], line["id"]) for line in lines(tmp_path)] == [(5, "t:5"), (0, "t:0")]


def test_groups_that_failed_are_recorded_with_kind_and_reason(tmp_path):
    def summary(name, *errors):
        made = GroupSummary.of(
            tiny.group(default_rng(0), [], [2] * len(errors), name), tiny.IMAGE_ID
        )
        return changed(made, error=errors)

    bad = BadRows(tmp_path, 1.0, {"train": 10})
    summaries = [
        summary("a", None, None),
        summary("b", None, "image can't be decoded: a: b"),
        summary("c", "engine: it gave up on this sample", None),
        summary("d", "environment: 'maze' failed: KeyError: 'x'", "no kind"),
    ]
    bad.add_failed("train", summaries, 4)
    assert [
        (line["id"], line["kind"], line["reason"], line["step"]) for line in lines(tmp_path)
    ] == [
        ("b", "image can't be decoded", "a: b", 4),
        ("d", "no kind", "no kind", 4),
    ]


def test_the_table_is_sorted_by_how_many_and_shows_the_first_of_each(tmp_path):
    bad = BadRows(tmp_path, 1.0, {"train": 100, "val": 1})
    bad.add(
        "train",
        rows(1, "answer missing", 50, "column 'answer' is empty") + rows(4, reason="x" * 200),
    )
    bad.add("val", rows(1, "TimeoutError"))
    assert bad.table("train").splitlines() == [
        f"     4  not an image    t:0: {'x' * 99}…",
        "     1  answer missing  t:50: column 'answer' is empty",
    ]


def test_above_the_limit_the_run_stops_and_says_where_to_look(tmp_path):
    bad = BadRows(tmp_path, 0.29, {"train": 100, "val": 0})
    bad.add("train", rows(29))
    bad.check()  # 29 of 100 is what 0.29 allows, though 0.29 · 100 < 29 in floating point
    bad.add("train", rows(1, "answer missing", 50))
    with pytest.raises(TooManyBadRows) as caught:
        bad.check()
    for part in (
        "data.max_bad_rows",
        "30 of the 100 rows of train",
        "30.0%",
        "0.29",
        bad.table("train"),
        str(bad.path),
    ):
        assert part in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(("limit", "stops"), [(0.0, True), (1.0, False)])
def test_the_ends_of_the_limit(tmp_path, limit, stops):
    bad = BadRows(tmp_path, limit, {"train": 100, "val": 1})
    bad.check()
    bad.add("val", rows(1))
    if stops:
        with pytest.raises(TooManyBadRows, match="rows of val"):
            bad.check()
    else:
        bad.check()


@pytest.mark.parametrize("limit", ["-0.1", "1.1", ".nan"])
def test_the_limit_is_a_share(limit):
    with pytest.raises(ValueError, match=r"data\.max_bad_rows"):
        load_config("toy-grpo-cpu", [f"data.max_bad_rows={limit}"])
