"""Trackers, with the files they really write."""

import itertools
import json
import logging
import math
import shutil
import sys
import threading
import types

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.event_file_writer import AtomicCounter

from rlinf_vl.config import config_keys
from rlinf_vl.extras.trackers.hosted import open_wandb
from rlinf_vl.extras.trackers.tensorboard import TensorBoardTracker
from rlinf_vl.observe import tracker as tracker_module
from rlinf_vl.observe.lines import StepLines
from rlinf_vl.observe.tracker import (
    OPENERS,
    TrackedRun,
    Trackers,
    make_trackers,
)

NAMES = {"project_name": "p", "experiment_name": "e", "config": {"a": {"b": 1}}}


def strict_lines(path) -> list[dict]:
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    text = path.read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_jsonl_lines_are_sorted_flushed_and_valid(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    tracker = Trackers({}, StepLines(path))
    tracker.log(
        0,
        {
            "z": 1,
            "a": 0.5,
            "nan": math.nan,
            "inf": -math.inf,
            "np": np.float32(0.25),
            "torch": torch.tensor(2.0),
        },
    )
    # Read before close: the line is there.
    (row,) = strict_lines(path)
    assert row == {"step": 0, "a": 0.5, "inf": None, "nan": None, "np": 0.25, "torch": 2.0, "z": 1}
    assert list(row) == ["step", *sorted(set(row) - {"step"})]
    tracker.close()


def test_jsonl_never_has_a_step_twice(tmp_path):
    tracker = Trackers({}, StepLines(tmp_path / "metrics.jsonl"))
    tracker.log(1, {})
    for step in (1, 0):
        with pytest.raises(ValueError, match=f"step {step} logged after step 1"):
            tracker.log(step, {})
    with pytest.raises(ValueError, match="'step'"):
        tracker.log(2, {"step": 5})
    tracker.close()


def test_jsonl_resume_drops_later_and_torn_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tracker = Trackers({}, StepLines(path))
    for step in range(5):
        tracker.log(step, {"x": step / 10})
    tracker.close()
    with path.open("a") as file:
        file.write('{"step": 5, "x": 0.')

    resumed = Trackers({}, StepLines(path, resume_step=2))
    assert [row["step"] for row in strict_lines(path)] == [0, 1, 2]
    with pytest.raises(ValueError, match="step 2"):
        resumed.log(2, {})
    resumed.log(3, {"x": -1.0})
    resumed.close()
    assert [(row["step"], row["x"]) for row in strict_lines(path)] == [
        (0, 0.0),
        (1, 0.1),
        (2, 0.2),
        (3, -1.0),
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_jsonl_resume_keeps_a_whole_line_that_lost_its_newline_and_one_of_two_equal_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "x": 1}\n{"step": 1, "x": 2}\n\x00\x00\n{"step": 2, "x": 3}')
    StepLines(path, resume_step=2)
    assert strict_lines(path) == [{"step": 1, "x": 2}, {"step": 2, "x": 3}]


def scalars(folder, name) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


@pytest.mark.slow
@pytest.mark.parametrize("made", [0, 8, 9])
def test_tensorboard_file_reads_back_and_resume_hides_later_steps(tmp_path, monkeypatch, made):
    # a process numbers its files, and TensorBoard sorts names: 10 before 9
    monkeypatch.setattr(
        "tensorboard.summary.writer.event_file_writer._global_uid", AtomicCounter(made)
    )
    tracker = TensorBoardTracker(tmp_path)
    for step in range(4):
        tracker.log(step, {"actor/loss": step + 0.5, "reward/mean": torch.tensor(1.0)})
    assert scalars(tmp_path, "actor/loss") == [(0, 0.5), (1, 1.5), (2, 2.5), (3, 3.5)]
    tracker.close()
    resumed = TensorBoardTracker(tmp_path, first_step=2)
    resumed.log(2, {"actor/loss": -1.0})
    resumed.close()
    assert scalars(tmp_path, "actor/loss") == [(0, 0.5), (1, 1.5), (2, -1.0)]
    fresh = TensorBoardTracker(tmp_path, first_step=0)
    fresh.log(1, {"actor/loss": 7.0})
    fresh.close()
    assert scalars(tmp_path, "actor/loss") == [(1, 7.0)]


class Broken:
    calls = 0

    def log(self, step, metrics):
        self.calls += 1
        raise ConnectionError("no route")

    def close(self):
        raise ConnectionError("no route")


def test_a_failing_tracker_warns_once_and_the_others_go_on(tmp_path, caplog):
    broken = Broken()
    trackers = Trackers({"broken": lambda: broken}, StepLines(tmp_path / "metrics.jsonl"))
    for step in range(3):
        trackers.log(step, {"x": 1.0})
    trackers.close()
    assert len(strict_lines(tmp_path / "metrics.jsonl")) == 3
    assert broken.calls == 3
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        "tracker broken failed (ConnectionError('no route')); training goes on without it"
    ]


def test_a_tracker_that_hangs_holds_up_nobody(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(tracker_module, "MOST_CALLS", 10)
    monkeypatch.setattr(tracker_module, "CLOSE_S", 0.1)
    gate = threading.Event()
    try:
        trackers = Trackers({"stuck": gate.wait}, StepLines(tmp_path / "metrics.jsonl"))
        for step in range(30):
            trackers.log(step, {"x": 1.0})
        trackers.close()
    finally:
        gate.set()
    assert len(strict_lines(tmp_path / "metrics.jsonl")) == 30
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        "tracker stuck is 10 calls behind; steps are missing there"
    ]


def test_tensorboard_goes_on_after_its_disk_was_full(tmp_path, monkeypatch):
    # TensorBoard knows a newer file by the second in its name
    seconds = itertools.count(1_800_000_000.0)
    clock = types.SimpleNamespace(time=lambda: next(seconds))
    monkeypatch.setattr("tensorboard.summary.writer.event_file_writer.time", clock)
    tracker = TensorBoardTracker(tmp_path)
    tracker.log(1, {"x": 1.0})
    monkeypatch.setattr(
        tracker._writer, "flush", lambda: (_ for _ in ()).throw(OSError(28, "No space left"))
    )
    with pytest.raises(OSError, match="No space left"):
        tracker.log(2, {"x": 2.0})
    tracker.log(3, {"x": 3.0})
    tracker.close()
    assert scalars(tmp_path, "x")[-1] == (3, 3.0) and (1, 1.0) in scalars(tmp_path, "x")


def test_a_metrics_file_that_can_not_be_written_does_not_stop_training(tmp_path):
    trackers = Trackers({}, StepLines(tmp_path / "gone" / "metrics.jsonl"))
    shutil.rmtree(tmp_path / "gone")
    trackers.log(1, {})
    with pytest.raises(FileNotFoundError):
        trackers.flush()


def test_make_trackers_writes_the_run_folder(tmp_path):
    trackers = make_trackers(tmp_path, ["tensorboard", "tensorboard"], **NAMES)
    trackers.log(1, {"val/accuracy": 0.5})
    trackers.close()
    assert strict_lines(tmp_path / "metrics.jsonl") == [{"step": 1, "val/accuracy": 0.5}]
    assert scalars(tmp_path / "tensorboard", "val/accuracy") == [(1, 0.5)]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


def test_make_trackers_names_what_is_wrong(tmp_path, monkeypatch):
    for backend in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, backend, None)  # as if not installed
        with pytest.raises(
            ImportError,
            match=f"has {backend}, which isn't installed: run `.*pip install {backend}`",
        ):
            make_trackers(tmp_path, [backend], **NAMES)


class FakeWandb(types.ModuleType):
    """Records what the tracker asks of wandb's own interface."""

    Settings = dict

    def __init__(self, mode="online"):
        super().__init__("wandb")
        self.inits, self.logged, self.axes, self.finished = [], [], [], 0
        self.setup = lambda: types.SimpleNamespace(settings=types.SimpleNamespace(mode=mode))

    def init(self, **options):
        self.inits.append(options)
        run = types.SimpleNamespace(id=options["id"] or f"id{len(self.inits)}")
        run.log = lambda values: self.logged.append((run.id, values))
        run.define_metric = lambda name, step_metric: self.axes.append((name, step_metric))
        run.finish = lambda: setattr(self, "finished", self.finished + 1)
        return run


def test_wandb_goes_on_in_the_same_run_after_a_resume(tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    # The last goes on from a's checkpoint.
    for folder, resume_step, step in (
        ("a", -1, 1),
        ("a", 1, 2),
        ("b", 1, 1),
    ):
        (tmp_path / folder).mkdir(exist_ok=True)
        trackers = make_trackers(tmp_path / folder, ["wandb"], **NAMES, resume_step=resume_step)
        trackers.log(step, {"x": 0.5})
        trackers.close()
    steps = [("id1", 1), ("id1", 2), ("id3", 1)]
    assert wandb.logged == [(run, {"x": 0.5, "step": step}) for run, step in steps]
    assert wandb.finished == 3 and set(wandb.axes) == {("*", "step")}
    assert wandb.inits[0]["project"] == "p" and wandb.inits[0]["name"] == "e"
    assert wandb.inits[0]["config"] == {"a": {"b": 1}}
    assert [options["resume"] for options in wandb.inits] == [None, "allow", None]


def test_users_code_goes_to_no_tracker(tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = {
        "runner": {"code_files": {"/me/reward.py": "SECRET = 1"}, "seed": 1},
        "data": {"seed": 2},
    }
    make_trackers(tmp_path, ["wandb"], **(NAMES | {"config": config})).close()
    (sent,) = [options["config"] for options in wandb.inits]
    assert "SECRET" not in str(sent)
    assert list(sent["runner"]["code_files"]) == ["/me/reward.py"] and sent["data"] == {"seed": 2}
    assert config["runner"]["code_files"] == {"/me/reward.py": "SECRET = 1"}, (
        "the run's own config is as it was"
    )


@pytest.mark.parametrize("mode", ["online", "offline"])
@pytest.mark.parametrize("primary", [True, False])
def test_wandb_is_shared_where_it_is_online_and_one_process_leads(
    tmp_path, monkeypatch, mode, primary
):
    wandb = FakeWandb(mode)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    (tmp_path / "wandb_id").write_text("id7")
    open_wandb(TrackedRun(tmp_path, "p", "e", {} if primary else None))
    (options,) = wandb.inits
    settings = options["settings"]
    shared = {"mode": "shared", "x_primary": primary, "x_update_finish_state": primary}
    assert {name: settings[name] for name in shared if name in settings} == (
        shared if mode == "online" else {}
    )
    assert (options["id"], options["resume"]) == ("id7", "allow")


def test_a_backend_that_can_not_start_is_a_warning(tmp_path, monkeypatch, caplog):
    wandb = FakeWandb()
    wandb.init = lambda **options: (_ for _ in ()).throw(ConnectionError("offline"))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    make_trackers(tmp_path, ["wandb"], **NAMES).close()
    assert "wandb could not start" in caplog.text


def test_every_backend_that_the_config_allows_can_be_opened():
    assert set(OPENERS) == set(config_keys()["runner.logger.logger_backends"].allowed)
