"""Spans of several threads, merged where they follow each other, and a timeline that Chrome's format describes."""

import json
import threading
import time

import pytest

from rlinf_vl.observe import spans
from rlinf_vl.tools.report.timeline import write_timeline


@pytest.fixture
def recording(tmp_path, monkeypatch):
    monkeypatch.setattr(spans, "_path", None)
    monkeypatch.setattr(spans, "_last", {})
    monkeypatch.setattr(spans, "_rows", [])
    (tmp_path / spans.FOLDER).mkdir()
    spans.record_spans(tmp_path, "actor 3")
    return tmp_path


def test_without_a_folder_nothing_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(spans, "_path", None)
    spans.record_spans(tmp_path, "actor 0")
    with spans.span("forward"):
        pass
    with pytest.raises(ValueError, match="holds no spans"):
        write_timeline(tmp_path)


def test_spans_have_their_times_and_consecutive_ones_are_one(recording):
    before = time.time()
    for _ in range(5):
        with spans.span("decode"):
            time.sleep(0.002)
    with spans.span("forward", micro_batch=0):
        pass
    with spans.span("forward", micro_batch=1):
        pass
    with pytest.raises(KeyError), spans.span("fails"):
        raise KeyError
    spans.flush_spans()
    rows = spans.read_spans(recording)
    assert [(row["name"], row["count"], row["about"]) for row in rows] == [
        ("decode", 5, {}), ("forward", 1, {"micro_batch": 0}), ("forward", 1, {"micro_batch": 1}), ("fails", 1, {}),
    ]  # fmt: skip
    assert {row["process"] for row in rows} == {"actor 3"}
    assert before - 0.01 <= rows[0]["start"] and 0.01 <= rows[0]["end"] - rows[0]["start"] < 5
    assert all(a["end"] <= b["end"] for a, b in zip(rows, rows[1:], strict=False))


def test_a_second_run_in_a_process_has_its_own_spans_alone(recording, tmp_path_factory):
    second = tmp_path_factory.mktemp("second")
    (second / spans.FOLDER).mkdir()
    with spans.span("sync", step=0):
        pass
    spans.record_spans(second, "actor 3")
    with spans.span("train", step=1):
        pass
    spans.flush_spans()
    assert [[row["name"] for row in spans.read_spans(run)] for run in (recording, second)] == [
        ["sync"],
        ["train"],
    ]


def test_threads_do_not_mix(recording):
    def work(name):
        for _ in range(50):
            with spans.span(name):
                pass

    threads = [threading.Thread(target=work, args=(f"t{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans.flush_spans()
    rows = spans.read_spans(recording)
    assert sorted(
        (name, sum(r["count"] for r in rows if r["name"] == name))
        for name in {r["name"] for r in rows}
    ) == [(f"t{i}", 50) for i in range(4)]


def test_the_timeline_is_in_chromes_format(recording):
    with spans.span("train", step=4), spans.span("forward"):
        time.sleep(0.003)
    spans.flush_spans()
    (recording / "spans/rollout-0.jsonl").write_text('{"name": "decode", "sta')  # torn
    path = write_timeline(recording)
    assert path == recording / "timeline.json"
    named, inner, outer = json.loads(path.read_text())["traceEvents"]
    assert (named["ph"], named["args"]) == ("M", {"name": "actor 3"})
    assert (outer["name"], outer["args"], inner["ph"]) == ("train", {"step": 4}, "X")
    assert outer["ts"] == 0 and inner["ts"] >= 0 and 3000 <= inner["dur"] <= outer["dur"]
