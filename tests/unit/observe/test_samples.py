"""Samples in the trackers' own files, read back with their own readers; what is hostile in them stays text."""

import io
import itertools
import json
import logging
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html

from rlinf_vl.observe.samples import MAX_SAMPLES, MAX_SIDE, MAX_TEXT, inert
from rlinf_vl.observe.tracker import Trackers, make_trackers

NAMES = {"project_name": "p", "experiment_name": "e"}
HOSTILE = """<img src=x onerror=alert(1)><script>alert(2)</script> **bold** [a](javascript:x) ![b](http://evil/c.png)
```
</pre></code><b>out</b>
[ref]: http://evil
\x1b[31m\x0b<b>tab</b>\r<i>cr</i>\u2028<u>ls</u>"""


def png(width, height, color="red") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), color).save(file, "PNG")
    return file.getvalue()


def row(**changes):
    return {
        "split": "train",
        "problem_id": "geo-7",
        "prompt": "<image> How long?",
        "response": HOSTILE,
        "answer": "42",
        "reward": 0.5,
        "advantage": None,
        "correct": True,
        "error": None,
        "finish_reason": "stop",
        "images": [png(60, 40)],
    } | changes


def tensorboard(run_dir) -> EventAccumulator:
    return EventAccumulator(str(run_dir / "tensorboard" / "samples")).Reload()


def texts(events, tag) -> dict[int, str]:
    return {
        e.step: e.tensor_proto.string_val[0].decode() for e in events.Tensors(f"{tag}/text_summary")
    }


def test_tensorboard_shows_text_and_images(tmp_path):
    trackers = make_trackers(tmp_path, ["tensorboard"], **NAMES)
    images = [png(60, 40), b"torn", png(4000, 2000, "blue")]
    trackers.log_samples(3, [row(images=images), row(split="val", images=[], error="no answer")])
    trackers.close()
    events = tensorboard(tmp_path)
    (image,) = events.Tensors("train/0")
    width, height, *encoded = image.tensor_proto.string_val
    assert (image.step, int(width), int(height)) == (3, 60 + 4 + MAX_SIDE, MAX_SIDE // 2)
    pixels = np.asarray(Image.open(io.BytesIO(encoded[0])))
    assert pixels[0, 0].tolist() == [255, 0, 0] and pixels[0, -1].tolist() == [0, 0, 255]
    text = texts(events, "train/0")[3]
    assert "    problem_id: geo-7 · reward: 0.5 · correct: True · finish_reason: stop" in text
    assert "no answer" in texts(events, "val/0")[3] and "val/0" not in events.Tags()["tensors"]


def test_tensorboard_takes_hostile_text_as_text(tmp_path):
    trackers = make_trackers(tmp_path, ["tensorboard"], **NAMES)
    trackers.log_samples(1, [row()])
    trackers.close()
    html = markdown_to_safe_html(texts(tensorboard(tmp_path), "train/0")[1])
    for tag in ("<img", "<script", "<b>", "<i>", "<u>", "<a ", "\x1b"):
        assert tag not in html
    for shown in (
        "&lt;img src=x onerror=alert(1)&gt;",
        "**bold** [a](javascript:x)",
        "[ref]: http://evil",
    ):
        assert shown in html


def test_samples_do_not_hide_scalars_and_a_run_that_goes_back_hides_what_was_later(
    tmp_path, monkeypatch
):
    # TensorBoard knows a newer file by the second in its name
    seconds = itertools.count(1_800_000_000.0)
    clock = types.SimpleNamespace(time=lambda: next(seconds))
    monkeypatch.setattr("tensorboard.summary.writer.event_file_writer.time", clock)
    scalars = make_trackers(tmp_path, ["tensorboard"], **NAMES, config={})
    scalars.log(1, {"x": 1.0})
    trackers = make_trackers(tmp_path, ["tensorboard"], **NAMES)
    for step, answer in ((1, "a"), (2, "b"), (3, "c"), (2, "d")):
        trackers.log_samples(step, [row(answer=answer)])
    scalars.log(2, {"x": 2.0})
    trackers.close()
    scalars.close()
    assert {step: text[-1] for step, text in texts(tensorboard(tmp_path), "train/0").items()} == {
        1: "a",
        2: "d",
    }
    resumed = make_trackers(tmp_path, ["tensorboard"], **NAMES)
    resumed.log_samples(1, [row(answer="e")])
    resumed.close()
    assert {step: text[-1] for step, text in texts(tensorboard(tmp_path), "train/0").items()} == {
        1: "e"
    }
    assert [
        e.step for e in EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tensors("x")
    ] == [1, 2]


class Kept:
    """Keeps what it is given."""

    def __init__(self):
        self.logged, self.closed = [], False

    def log_samples(self, step, split, samples):
        self.logged.append((step, split, samples))

    def close(self):
        self.closed = True


def test_samples_are_few_spread_and_short():
    kept = Kept()
    trackers = Trackers({"kept": lambda: kept})
    trackers.log_samples(
        1,
        [row(problem_id=f"{i}", images=[]) for i in range(100)]
        + [row(split="val", prompt="x" * 9999)],
    )
    trackers.close()
    (_, train, samples), (_, val, (long,)) = kept.logged
    assert (train, val) == ("train", "val")
    chosen = [int(sample.values["problem_id"]) for sample in samples]
    assert len(chosen) <= MAX_SAMPLES and chosen == list(range(0, 100, 7))
    assert long.values["prompt"] == "x" * MAX_TEXT + f"… ({9999 - MAX_TEXT} characters more)"


def test_one_that_fails_warns_once_and_the_others_go_on(caplog):
    kept, opened = Kept(), []

    def closed_door():
        opened.append(1)
        raise ConnectionError("no route")

    broken = types.SimpleNamespace(log_samples=lambda *_: 1 / 0, close=lambda: 1 / 0)
    trackers = Trackers({"door": closed_door, "broken": lambda: broken, "kept": lambda: kept})
    for step in range(3):
        trackers.log_samples(step, [row()])
    trackers.close()
    assert len(kept.logged) == 3 and kept.closed and len(opened) == 1
    assert sorted(r.getMessage() for r in caplog.records if r.levelno == logging.WARNING) == [
        "tracker broken failed (ZeroDivisionError('division by zero')); training goes on without it",
        "tracker door could not start (ConnectionError('no route')); training goes on without it",
    ]


def test_what_is_unknown_or_never_began(tmp_path, caplog):
    trackers = make_trackers(tmp_path, ["wandb"], **NAMES)
    trackers.log_samples(1, [row()])
    trackers.close()
    assert "tracker wandb could not start (FileNotFoundError" in caplog.text
    make_trackers(tmp_path, [], **NAMES).log_samples(1, [row()])


def test_inert_text_is_no_markup():
    text = inert(HOSTILE)
    assert text.replace("\u200b", "") == HOSTILE
    html = markdown_to_safe_html(text)
    for tag in ("<img", "<script", "<b>", "<i>", "<a "):
        assert tag not in html


def python(code, **environment):
    """What a new process prints that runs `code`, with this file's helpers."""
    code = f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom test_samples import *\n{code}"
    # Of a process that is none of its parents.
    inherited = {k: v for k, v in os.environ.items() if k != "WANDB_SERVICE"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env=inherited | environment,
        timeout=120,
        stdout=subprocess.PIPE,
        text=True,
    )
    return done.stdout


def record_samples(run_dir, backend):
    """Logs samples in another process, as the recorder does."""
    python(f"""
trackers = make_trackers({str(run_dir)!r}, [{backend!r}], **NAMES)
trackers.log_samples(1, [row(), row(images=[])])
trackers.close()
""")


def wandb_records(data: bytes):
    """The records of wandb's file: LevelDB's log format behind a header of 7 bytes."""
    at, parts = 7, []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def test_wandb_gets_a_table_in_the_run_of_the_scalars(tmp_path):
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    code = f"""
scalars = make_trackers({str(tmp_path)!r}, ["wandb"], **NAMES, config={{"a": 1}})
scalars.log(1, {{"x": 0.5}})
record_samples({str(tmp_path)!r}, "wandb")
scalars.log(2, {{"x": 0.25}})
scalars.close()
"""
    python(code, WANDB_MODE="offline", WANDB_SILENT="true", WANDB_DATA_DIR=str(tmp_path))
    logged = []
    for path in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")):
        for data in wandb_records(path.read_bytes()):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "run":
                assert record.run.run_id == (tmp_path / "wandb_id").read_text()
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                values = {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}
                logged.append({k: v for k, v in values.items() if not k.startswith("_")})
    assert {"step": 1, "x": 0.5} in logged and {"step": 2, "x": 0.25} in logged
    (samples,) = [
        values for values in logged if any(name.startswith("samples/train") for name in values)
    ]
    assert samples["step"] == 1
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/samples/*.json")
    table = json.loads(table.read_text())
    first, second = (dict(zip(table["columns"], values, strict=True)) for values in table["data"])
    assert (
        first["response"].startswith("<\u200bimg")
        and first["images"] is not None
        and second["images"] is None
    )
    assert (first["reward"], first["correct"], first["advantage"]) == (0.5, True, None)


def test_trackio_gets_a_table_in_the_run_of_the_scalars(tmp_path):
    pytest.importorskip("trackio")
    code = f"""
for run in range(2):  # the second one begins anew, under the same name
    trackers = make_trackers({str(tmp_path)!r}, ["trackio"], **NAMES, config={{"a": 1}})
    if run:
        time.sleep(2)  # a step takes longer than trackio takes to write
        record_samples({str(tmp_path)!r}, "trackio")
    trackers.log(1, {{"x": 0.5 + run}})
    trackers.close()
trackers = make_trackers({str(tmp_path)!r}, ["trackio"], **NAMES, config={{"a": 1}}, resume_step=1)
trackers.log(2, {{"x": 2.5}})
trackers.close()
from trackio.sqlite_storage import SQLiteStorage
print("\\nLOGS", json.dumps(SQLiteStorage.get_logs("p", "e")))
"""
    lines = python(code, TRACKIO_DIR=str(tmp_path / "trackio")).splitlines()
    (line,) = [line for line in lines if line.startswith("LOGS")]
    logs = json.loads(line.removeprefix("LOGS"))
    assert [(log["step"], log["x"]) for log in logs if "x" in log] == [(1, 1.5), (2, 2.5)]
    (table,) = [log["samples/train"]["_value"] for log in logs if "samples/train" in log]
    assert (
        table[0]["response"].startswith("<\u200bimg")
        and table[0]["images"]["_type"] == "trackio.image"
    )
    assert (tmp_path / "trackio" / "media" / table[0]["images"]["file_path"]).exists() and table[1][
        "images"
    ] is None
