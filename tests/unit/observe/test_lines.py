"""Files of JSON lines: taken back by step, and whole whatever happened to them."""

import json
import threading
import time

import pytest

from rlinf_vl.observe.lines import EventLog, StepLines
from rlinf_vl.runtime import files


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_resuming_drops_what_was_written_after(tmp_path):
    path = tmp_path / "folder/ledger.jsonl"
    lines = StepLines(path)
    for step in range(1, 6):
        lines.append(step, {"groups": [f"train-{step}-0"]})
    again = StepLines(path, resume_step=3)
    assert again.last_step == 3
    again.append(4, {"groups": []})
    assert [(row["step"], len(row["groups"])) for row in lines_of(path)] == [
        (1, 1),
        (2, 1),
        (3, 1),
        (4, 0),
    ]


def test_a_torn_last_line_is_dropped_before_the_next_is_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1}\n{"step": 2, "a"')
    lines = StepLines(path, resume_step=9)
    lines.append(2, {"a": 3})
    assert lines_of(path) == [{"step": 1, "a": 1}, {"step": 2, "a": 3}]


def test_a_step_is_written_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = StepLines(path)
    lines.append(3, {})
    with pytest.raises(ValueError, match="step 3 logged after step 3"):
        lines.append(3, {})


def test_events_are_counted_written_and_summed_up(tmp_path, caplog):
    events = EventLog(tmp_path)
    assert events.summary() == ""
    events.add(4, "worker_replaced", "no heartbeat for 9 s")
    events.add(5, "worker_replaced", "it died")
    events.add(5, "step_skipped", "not finite")
    assert (events.count("worker_replaced"), events.count("resumed")) == (2, 0)
    assert events.summary() == "1 × step skipped, 2 × worker replaced"
    rows = lines_of(tmp_path / "events.jsonl")
    assert [(row["step"], row["kind"]) for row in rows] == [
        (4, "worker_replaced"),
        (5, "worker_replaced"),
        (5, "step_skipped"),
    ]
    assert "step 4: no heartbeat for 9 s" in caplog.text


def test_events_that_can_not_be_written_are_still_told(tmp_path, caplog):
    events = EventLog(tmp_path / "absent")
    events.add(1, "checkpoint_failed", "the disk is full")
    assert events.count("checkpoint_failed") == 1 and "the disk is full" in caplog.text


def test_threads_that_add_events_lose_none_and_write_none_twice(tmp_path, monkeypatch):
    """A slow disk leaves time for the other thread between a line's arrival and the end of its writing."""
    append = files._append

    def slow_append(*arguments):
        time.sleep(0.002)
        append(*arguments)

    monkeypatch.setattr(files, "_append", slow_append)
    events = EventLog(tmp_path)

    def add_many(kind):
        for number in range(25):
            events.add(number, kind, f"{kind} {number}")

    threads = [
        threading.Thread(target=add_many, args=(kind,)) for kind in ("trained", "watched", "saved")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    written = [(row["kind"], row["step"]) for row in lines_of(tmp_path / "events.jsonl")]
    assert sorted(written) == sorted(
        (kind, n) for kind in ("trained", "watched", "saved") for n in range(25)
    )
    assert events.summary() == "25 × saved, 25 × trained, 25 × watched"
