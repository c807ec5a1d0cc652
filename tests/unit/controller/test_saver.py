"""Checkpoints that are written while the loop goes on, with a learner in memory whose disk is as slow as a test wants."""

import threading
import time

import pytest
from unit.controller.fakes import FakeLearner, FakeRun
from unit.controller.test_supervise import Started, once

from rlinf_vl.controller.loop import RunState
from rlinf_vl.runtime.checkpoints import CheckpointFailed, find_checkpoint
from rlinf_vl.runtime.ray_process import ActorsLost

ASYNC = "runner.async_save=true"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The metrics of a run that waits for each of its checkpoints."""
    run = FakeRun(tmp_path_factory.mktemp("undisturbed"))
    run.train()
    return run.metrics()


@pytest.fixture
def undisturbed_parts(monkeypatch, tmp_path_factory):
    """The same of a run with all its parts."""
    folder = tmp_path_factory.mktemp("undisturbed")
    Started(monkeypatch, folder)()
    return FakeRun(folder).metrics()


class SlowLearner(FakeLearner):
    """Its checkpoints are written when it comes to update `until`; `written` are those, with the steps that were trained by then."""

    def __init__(self, until: int, disk=lambda: None) -> None:
        super().__init__(self.seen)
        self.until, self.disk, self.at = until, disk, 0
        self.reached = threading.Event()
        self.written: list[int] = []

    def seen(self, step):
        self.at = step
        if step >= self.until:
            self.reached.set()

    def write(self, folder):
        assert self.reached.wait(60), "training has waited for the checkpoint"
        self.written.append(self.at)
        self.disk()
        return super().write(folder)


def test_training_goes_on_while_a_checkpoint_is_written_which_is_of_its_own_step(
    tmp_path, undisturbed
):
    run = FakeRun(tmp_path, ASYNC, "runner.save_interval=2", learner=SlowLearner(until=4))
    run.train()
    assert run.metrics() == undisturbed and run.learner.written[0] >= 4
    assert run.checkpoints() == [4, 6]
    assert [row["step"] for row in run.rows() if "time/checkpoint_write" in row][-1] == 6
    again = FakeRun(tmp_path / "again", start=tmp_path / "checkpoints/global_step_4")
    again.train()
    assert again.metrics() == {step: row for step, row in undisturbed.items() if step >= 4}


def test_at_the_end_a_run_waits_for_its_last_checkpoint_which_must_not_fail(tmp_path):
    run = FakeRun(tmp_path, ASYNC, "runner.save_interval=5")

    def fill(step):
        while step == 6 and run.checkpoints() != [5]:  # it may still be written
            time.sleep(0.01)
        run.learner.disk_full = step == 6

    run.learner.strike = fill
    with pytest.raises(CheckpointFailed, match="step 6 .*The last good one is .*global_step_5"):
        run.train()
    assert run.events()[-1] == ("checkpoint_failed", 6)


def test_a_checkpoint_that_fails_meanwhile_is_an_event_and_the_next_one_is_tried(
    tmp_path, undisturbed
):
    learner = SlowLearner(until=3)
    learner.disk = lambda: setattr(learner, "disk_full", len(learner.written) == 1)
    run = FakeRun(tmp_path, ASYNC, "runner.save_interval=2", learner=learner)
    run.train()
    ((kind, step),) = run.events()
    assert kind == "checkpoint_failed" and 3 <= step <= 4 and run.checkpoints() == [4, 6]
    assert run.metrics() == undisturbed


def test_a_checkpoint_whose_state_can_not_be_copied_is_an_event_and_the_next_one_is_tried(
    tmp_path, undisturbed
):
    run = FakeRun(tmp_path, "runner.save_interval=2")
    stage = run.learner.stage

    def refused():
        run.learner.stage = stage
        raise OSError("the state was not copied to host memory: CUDA error 2")

    run.learner.stage = refused
    run.train()
    assert run.events() == [("checkpoint_failed", 2)] and run.checkpoints() == [4, 6]
    assert run.metrics() == undisturbed


@pytest.mark.slow
def test_a_learner_that_is_lost_while_it_writes_goes_back_to_the_checkpoint_before(
    monkeypatch, tmp_path, undisturbed_parts
):
    """In step 5, when the checkpoint of step 4 is half written."""
    struck, strike = threading.Event(), once(5)

    def dying(step):
        if step == 5:
            struck.set()
        strike(step)

    run = Started(monkeypatch, tmp_path, ASYNC, "runner.save_interval=2", strike=dying)
    write = FakeLearner.write

    def torn(learner, folder):
        digests = write(learner, folder)
        if "global_step_4" in folder and len(run.learners) == 1:
            assert struck.wait(60), "step 5 was not reached"
            raise ActorsLost("actor rank 1 died while it wrote")
        return digests

    monkeypatch.setattr(FakeLearner, "write", torn)
    run()
    assert FakeRun(tmp_path).metrics() == undisturbed_parts
    ((kind, _), back) = run.events()
    assert kind == "actors_restarted" and back == ("resumed", 2)


def test_a_checkpoint_that_was_damaged_since_is_set_aside_and_the_one_before_taken(
    monkeypatch, tmp_path, undisturbed_parts
):
    strike = once(6)

    def damaging(step):
        if step == 6 and not (tmp_path / "checkpoints/damaged.global_step_4").exists():
            (tmp_path / "checkpoints/global_step_4/actor/weight.json").write_text("0.125")
        strike(step)

    run = Started(monkeypatch, tmp_path, "runner.save_interval=2", strike=damaging)
    run()
    assert FakeRun(tmp_path).metrics() == undisturbed_parts
    assert run.events() == [("checkpoint_damaged", 6), ("actors_restarted", 6), ("resumed", 2)]


def test_a_person_in_a_hurry_does_not_wait_for_a_disk(tmp_path):
    learner = SlowLearner(until=100)
    learner.strike = lambda step: (_ for _ in ()).throw(KeyboardInterrupt) if step == 5 else None
    with pytest.raises(KeyboardInterrupt):
        FakeRun(tmp_path, ASYNC, learner=learner).train()
    assert find_checkpoint(tmp_path, "auto") is None
    learner.reached.set()


def test_the_best_checkpoint_stays(tmp_path):
    run = FakeRun(
        tmp_path, ASYNC, "runner.save_interval=2", "runner.keep_last=1", "runner.keep_best=1"
    )
    run.train()
    accuracies = {
        row["step"]: row["val/accuracy"]
        for row in run.rows()
        if row["step"] and "val/accuracy" in row
    }
    best = max(accuracies, key=lambda step: (accuracies[step], -step))
    assert run.checkpoints() == sorted({best, 6})
    assert RunState.read(find_checkpoint(tmp_path, "auto")).accuracies.items() >= accuracies.items()
