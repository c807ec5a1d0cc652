"""The training loop against a pool and a learner in memory: its schedule, what it survives, and what ends it."""

import json
import math
import signal
import time
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from unit.controller.fakes import START, FakeLearner, FakePool, FakeRun

from rlinf_vl.controller import loop
from rlinf_vl.controller.loop import RunState, TooManyBadSteps
from rlinf_vl.controller.mismatch import EngineMismatch
from rlinf_vl.controller.recorder import Recorder
from rlinf_vl.controller.tasks import make_tasks
from rlinf_vl.data.bad_rows import TooManyBadRows
from rlinf_vl.errors import RunError
from rlinf_vl.observe import alarms, spans
from rlinf_vl.observe.status import read_status
from rlinf_vl.runtime.checkpoints import CheckpointFailed
from rlinf_vl.runtime.ray_process import ActorsLost
from rlinf_vl.runtime.stop_request import Interrupted

SKIPPED = {"actor/skipped_steps": 1.0, "actor/grad_norm": math.inf}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that nothing happened to."""
    run = FakeRun(tmp_path_factory.mktemp("undisturbed"))
    run.train()
    return run.run_dir


@pytest.fixture
def undisturbed(whole):
    """Its metrics, by step."""
    return FakeRun(whole).metrics()


@pytest.fixture
def folder(tmp_path):
    return tmp_path


@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_a_validation_is_of_the_weights_of_its_step_whatever_the_interval_of_syncs(
    folder, schedule
):
    run = FakeRun(
        folder,
        f"runner.schedule={schedule}",
        "runner.weight_sync_interval=4",
        "runner.max_staleness=4",
        "runner.val_check_interval=3",
        "runner.max_steps=7",
        "runner.mismatch_check_interval=-1",
    )
    run.train()
    assert run.pool.versions == [3, 4, 6, 7]
    assert run.pool.validated == {f"val-{step}-{k}": step for step in (3, 6, 7) for k in range(8)}


def test_failed_answers_count_in_the_accuracy_of_a_validation(folder):
    """Of 8 problems, 2 fail in their environment: one row's answer can't make up for another's."""
    run = FakeRun(folder, "runner.max_steps=2")
    failed = {
        "error": ("environment: it hangs",),
        "rewards": [0.0],
        "correct": (False,),
        "status": ("error",),
    }
    right = {"rewards": [1.0]}
    for step in (0, 2):
        run.pool.changes |= {f"val-{step}-{k}": dict(failed if k < 2 else right) for k in range(8)}
    run.train()
    for row in run.rows():
        if "val/accuracy" in row:
            assert row["val/accuracy"] == 6 / 8 and row["val/accuracy_answered"] == 1.0
            assert row["val/problems"] == 8 and row["val/errors"] == 2


def test_the_best_checkpoint_is_the_best_by_the_metric_that_is_chosen(folder):
    """Set a has six of eight rows and is best at step 4, set b has two and is best at step 2."""
    right = {2: ("b",), 4: ("a",), 6: ()}
    kept = {}
    for metric in ("val/accuracy", "val/b/accuracy", "val/accuracy_by_set"):
        run = FakeRun(
            folder / metric.replace("/", "-"), "runner.max_steps=6", "runner.keep_last=1", "runner.keep_best=1",
            "runner.save_interval=2", "runner.val_check_interval=2", "data.val_group_by=source",
            f"runner.best_metric={metric}",
        )  # fmt: skip
        for step, sets in right.items():
            for k in range(8):
                name = "a" if k < 6 else "b"
                reward = float(name in sets or (step == 4 and k == 6))
                labels = {"source": name}
                run.pool.changes[f"val-{step}-{k}"] = {"rewards": [reward], "labels": labels}
        for k in range(8):
            labels = {"source": "a" if k < 6 else "b"}
            run.pool.changes[f"val-0-{k}"] = {"rewards": [0.0], "labels": labels}
        for step in range(1, 7):
            for k in range(4):
                labels = {"source": "ab"[k % 2]}
                run.pool.changes[f"train-{step}-{k}"] = {"labels": labels}
        run.train()
        kept[metric] = run.checkpoints()
        rows = {row["step"]: row for row in run.rows()}
        assert rows[4]["val/accuracy"] == 7 / 8 and rows[4]["val/accuracy_by_set"] == 0.75
        assert rows[2]["val/b/accuracy"] == 1.0 and rows[2]["val/a/problems"] == 6
    assert kept == {
        "val/accuracy": [4, 6],
        "val/b/accuracy": [2, 6],
        "val/accuracy_by_set": [4, 6],
    }
    run = FakeRun(
        folder / "none", "runner.best_metric=val/c/accuracy", "runner.keep_best=1", *EVERY_TWO
    )
    with pytest.raises(RunError, match="'val/c/accuracy' is no metric of the validation at step 0"):
        run.train()


#: A validation of each step that is saved.
EVERY_TWO = ("runner.save_interval=2", "runner.val_check_interval=2")


def test_a_run_validates_trains_syncs_saves_and_logs_on_schedule(folder):
    run = FakeRun(folder, "runner.weight_sync_interval=2", "runner.max_steps=5")
    last = run.train()
    rows = {row["step"]: row for row in run.rows()}
    assert sorted(rows) == [0, 1, 2, 3, 4, 5] and last["val/accuracy"] == rows[5]["val/accuracy"]
    assert [step for step, row in rows.items() if "val/accuracy" in row] == [0, 2, 4, 5]
    assert rows[0].keys() == {
        "step",
        *(
            f"val/{n}"
            for n in "accuracy accuracy_answered problems errors ungradable response_length_mean".split()
        ),
    }
    assert run.pool.versions == [2, 4, 5], "engines have the weights of the start before"
    assert run.checkpoints() == [3, 5]
    assert [len(groups) for groups in run.pool.asked] == [8, 4, 4, 8, 4, 4, 8, 4, 8]
    assert not run.pool.alive, "a group was not released"
    assert run.learner.trained == [[f"train-{step}-{k}" for k in range(4)] for step in range(1, 6)]
    ledger = run.rows("ledger")
    assert [row["groups"][0] for row in ledger] == [f"train-{step}-0" for step in range(1, 6)]
    assert len({row for step in ledger for row in step["rows"]}) == 20
    checked = [step for step, row in rows.items() if "mismatch/one_image" in row]
    assert checked == [1] == run.learner.checked, (
        "step 4 has groups from older weights than the learner's"
    )
    assert (
        rows[5]["data/epoch"] == 0
        and rows[5]["data/bad_rows"] == rows[5]["rollout/worker_restarts"] == 0
    )
    phases = {"time/step", "time/generate", "time/train"}
    assert phases | {"time/validate", "time/sync", "time/checkpoint"} <= rows[5].keys()
    assert (
        phases | {"time/validate", "time/sync"} <= rows[4].keys()
        and "time/checkpoint" not in rows[4]
    )
    assert phases | {"time/check"} <= rows[1].keys()
    assert (
        phases <= rows[3].keys()
        and "time/sync" not in rows[3]
        and rows[3]["time/step"] > rows[3]["time/train"]
    )
    while (status := read_status(folder))["step"] < 5:  # written in a moment
        time.sleep(0.01)
    assert (status["state"], status["step"], status["total_steps"]) == ("running", 5, 5)
    assert [worker["name"] for worker in status["workers"]] == ["actor 0", "rollout 0"]


def test_a_run_need_not_validate_before_it_trains(undisturbed, folder):
    run = FakeRun(folder, "runner.val_before_train=false")
    run.train()
    assert run.metrics() == {step: row for step, row in undisturbed.items() if step}
    assert len(run.pool.asked[0]) == 4, "training groups"


def test_what_a_checkpoint_holds_is_the_run_after_its_step(folder):
    run = FakeRun(folder)
    run.train()
    state = RunState.read(folder / "checkpoints/global_step_3")
    assert (state.step, state.bad_steps, state.sampler) == (3, 0, {"epoch": 0, "rows": 12})
    assert state.accuracies == {
        row["step"]: row["val/accuracy"] for row in run.rows()[:4] if "val/accuracy" in row
    }
    logged = run.rows()[3]
    assert {name: logged[name] for name in state.metrics} == state.metrics
    written = json.loads((folder / "checkpoints/global_step_3/controller.json").read_text())
    assert written == json.loads(json.dumps(asdict(state)))


def test_a_checkpoint_of_the_first_release_loads(folder):
    """Its `controller.json`, as it was written."""
    old = {
        "step": 2,
        "sampler": {"epoch": 0, "rows": 8},
        "best": {"val/accuracy": 0.25, "step": 0},
        "bad_steps": 1,
    }
    path = folder / "old"
    (path / "actor").mkdir(parents=True)
    (path / "controller.json").write_text(
        json.dumps(old | {"metrics": {"reward/mean": 0.5}}, indent=1)
    )
    (path / "actor/weight.json").write_text("0.125")
    run = FakeRun(folder, start=path)
    run.train()
    rows = run.rows()
    assert [row["step"] for row in rows] == [2, 3, 4, 5, 6] and rows[0] == {
        "step": 2,
        "reward/mean": 0.5,
    }
    assert run.pool.versions[0] == 2 and run.events() == [("resumed", 2)]


@pytest.mark.parametrize("call", range(10))
def test_a_run_that_is_told_to_stop_saves_and_goes_on_as_if_nothing_had_been(
    undisturbed, folder, call
):
    """In each of its rollouts, four of them validations: `RolloutPool` asks between two groups."""

    def strike(calls):
        if calls == call:
            run.stop.number = signal.SIGTERM
            run.stop.check()

    run = FakeRun(folder, pool=FakePool(strike))
    validating = call in (3, 6, 9)
    with pytest.raises(Interrupted):
        run.train()
    done = (0, 0, 1, 2, 2, 3, 4, 4, 5, 6)[call]
    assert [row["step"] for row in run.rows()][-1:] == ([done] if call else [])
    assert run.checkpoints()[-1:] == ([done] if done else [])
    (message,) = [row["message"] for row in run.rows("events") if row["kind"] == "interrupted"]
    assert message.startswith("stopped by SIGTERM; ")
    assert (
        ("runner.resume_dir=auto" in message)
        == (done > 0)
        != ("nothing was trained yet" in message)
    )
    again = FakeRun(folder)
    again.train()
    metrics = again.metrics()
    if validating:  # the step's own validation was given up with it
        metrics[done] |= {
            name: value for name, value in undisturbed[done].items() if name.startswith("val/")
        }
    assert metrics == undisturbed


def test_a_signal_before_the_first_step_leaves_no_checkpoint(folder):
    run = FakeRun(folder, "runner.val_check_interval=-1")
    run.stop.number = signal.SIGTERM
    with pytest.raises(Interrupted):
        run.train()
    assert not run.rows() and not run.checkpoints()


@pytest.mark.parametrize("step", range(1, 7))
def test_a_run_whose_learner_is_lost_goes_back_and_ends_the_same(undisturbed, folder, step):
    def strike(now):
        if now == step and not run.events("actors_restarted"):
            raise ActorsLost("actor rank 1 died")

    run = FakeRun(folder, learner=FakeLearner(strike))
    with pytest.raises(ActorsLost):
        run.train()
    run.log.event("actors_restarted", "as `run` records it")
    run.pool.release()
    run.learner = FakeLearner(strike)
    run.train()
    assert run.metrics() == undisturbed
    back = 3 * ((step - 1) // 3)
    assert run.events() == [("actors_restarted", step), *([("resumed", back)] if back else [])]
    assert run.pool.versions == [*range(1, step), back, *range(back + 1, 7)], (
        "engines must forget the lost weights"
    )
    assert [row["step"] for row in run.rows("ledger")] == [1, 2, 3, 4, 5, 6]
    assert read_status(folder)["workers"][0]["restarts"] == 1 == run.rows()[-1]["actor/restarts"]


@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_a_replay_gets_the_weights_before_its_step(folder, monkeypatch, schedule):
    """An alarm is judged when they are gone, with a validation beside the next step even later."""
    monkeypatch.setattr(alarms, "WINDOW", 1)
    gap = "actor/rollout_train_abs_diff_mean"
    weights = {}  # before each update

    def strike(step):
        weights[step] = {"weight": run.learner.weight}
        return {gap: 0.2 if step == 4 else 0.01}

    run = FakeRun(folder, f"runner.schedule={schedule}", learner=FakeLearner(strike))
    run.config.runner.trajectories.max_gb = 1.0
    calls, replays = [], {}
    writer = SimpleNamespace(
        begin=lambda *call: calls.append(call), result=lambda timeout_s: True, kill=lambda: None
    )
    run.log.recorder = Recorder(run.config.runner, lambda: writer, run.log.event)
    run.train()
    for method, *arguments in calls:
        if method == "write" and len(arguments) > 2:
            step, _, _, replays[step] = arguments
    assert replays == {4: weights[4]} and weights[4] != weights[3]


def test_a_crash_between_a_checkpoint_and_its_log_line_loses_no_line(
    undisturbed, folder, monkeypatch
):
    run = FakeRun(folder)
    end_step = run.log.end_step

    def crash(step, metrics):
        if step == 3:
            raise MemoryError
        return end_step(step, metrics)

    monkeypatch.setattr(run.log, "end_step", crash)
    with pytest.raises(MemoryError):
        run.train()
    assert run.rows()[-1]["step"] == 2 and run.checkpoints() == [3]
    again = FakeRun(folder)
    again.train()
    assert again.metrics() == undisturbed


def test_a_run_that_starts_from_anothers_checkpoint_goes_on_from_there(undisturbed, whole, folder):
    source = whole / "checkpoints/global_step_3"
    run = FakeRun(folder, "runner.save_interval=-1", start=source)
    run.stop.number = signal.SIGTERM
    with pytest.raises(Interrupted):
        run.train()
    assert run.checkpoints() == [], "nothing was trained beyond it"
    assert f"runner.resume_dir={source}" in run.rows("events")[-1]["message"]
    run.stop.number = None
    run.train()
    assert {step: run.metrics()[step] for step in (3, 4, 5, 6)} == {
        step: undisturbed[step] for step in (3, 4, 5, 6)
    }


def test_nothing_is_left_of_a_run_that_is_done(undisturbed, whole, caplog):
    run = FakeRun(whole)
    with caplog.at_level("INFO"):
        run.train()
    assert "nothing left: step 6 of 6; raise runner.max_steps" in caplog.text
    assert run.pool.asked == [] and run.metrics() == undisturbed


def test_groups_that_died_with_their_worker_are_sampled_again(undisturbed, folder):
    run = FakeRun(folder)
    run.learner.lost = [[], [1, 3], [3]]
    run.train()
    assert run.events() == [("groups_lost", 2), ("groups_lost", 2)]
    assert run.pool.asked[2:5] == [
        [f"train-2-{k}" for k in range(4)],
        ["train-2-1", "train-2-3"],
        ["train-2-3"],
    ]
    assert run.metrics() == undisturbed and not run.pool.alive


def test_steps_whose_gradient_is_not_finite_are_counted_and_a_few_in_a_row_end_the_run(
    folder, monkeypatch
):
    monkeypatch.setattr(loop, "MAX_BAD_STEPS", 2)
    run = FakeRun(folder, "runner.save_interval=1")
    run.learner.strike = lambda step: SKIPPED if step in (2, 4, 5) else None
    with pytest.raises(TooManyBadSteps, match="2 steps in a row .*global_step_4"):
        run.train()
    assert [row.get("actor/skipped_steps") for row in run.rows()] == [None, 0, 1, 0, 1]
    assert run.rows()[2]["actor/grad_norm"] is None
    assert run.events() == [("step_skipped", step) for step in (2, 4, 5)]
    assert RunState.read(folder / "checkpoints/global_step_4").bad_steps == 1


def test_bad_steps_before_a_stop_still_count_after_it(folder, monkeypatch):
    monkeypatch.setattr(loop, "MAX_BAD_STEPS", 2)

    def told_to_stop(step):
        run.stop.number = signal.SIGTERM if step == 3 else None
        return SKIPPED if step == 3 else None

    run = FakeRun(folder, learner=FakeLearner(told_to_stop))
    with pytest.raises(Interrupted):
        run.train()
    again = FakeRun(
        folder,
        learner=FakeLearner(lambda step: SKIPPED if step == 4 else None),
    )
    with pytest.raises(TooManyBadSteps):
        again.train()


def test_a_checkpoint_that_fails_is_an_event_and_only_the_last_one_ends_the_run(folder):
    run = FakeRun(folder, "runner.save_interval=2")
    run.learner.strike = lambda step: setattr(run.learner, "disk_full", step in (2, 6))
    with pytest.raises(CheckpointFailed, match="step 6 .*The last good one is .*global_step_4"):
        run.train()
    assert run.events() == [
        ("checkpoint_failed", 2),
        ("checkpoint_failed", 6),
    ] and run.checkpoints() == [4]
    assert [row["step"] for row in run.rows()] == [0, 1, 2, 3, 4, 5]


def test_a_blind_engine_ends_the_run_before_it_trains(folder):
    run = FakeRun(folder)
    run.learner.difference, run.learner.blank_difference = 3.0, 0.0
    with pytest.raises(EngineMismatch, match="blind"):
        run.train()
    assert run.learner.weight == START and run.learner.checked == [1]


@pytest.mark.parametrize(
    ("interval", "checked", "logged"), [(4, [4], True), (5, [4, 5], False), (-1, [], False)]
)
def test_a_resumed_run_checks_its_engine_at_once_but_logs_what_one_never_stopped_logs(
    whole, folder, interval, checked, logged
):
    run = FakeRun(
        folder,
        f"runner.mismatch_check_interval={interval}",
        start=whole / "checkpoints/global_step_3",
    )
    run.train()
    assert run.learner.checked == checked
    assert ("mismatch/one_image" in run.metrics()[4]) == logged


def test_without_the_engines_logprobs_nothing_can_be_checked(folder):
    run = FakeRun(folder, "rollout.return_logprobs=false", "runner.max_steps=1")
    run.train()
    assert run.learner.checked == []


def test_rows_that_go_bad_while_training_are_counted_until_there_are_too_many(folder):
    run = FakeRun(folder, "data.max_bad_rows=0.04")
    run.pool.changes["train-2-1"] = {"error": ("image can't be decoded: no", None, None, None)}
    run.pool.changes["train-5-0"] = {"error": (None, "image can't be decoded: no", None, None)}
    with pytest.raises(TooManyBadRows, match="2 of the 40 rows of train"):
        run.train()
    assert [row["step"] for row in run.rows("bad_rows")] == [2, 5]
    assert [row.get("data/bad_rows") for row in run.rows()] == [None, 0, 1, 1, 1]


def test_faults_of_the_engine_are_events_and_a_step_without_any_trajectory_ends_the_run(folder):
    run = FakeRun(folder)
    run.pool.changes["train-2-1"] = {"error": ("engine: timed out", None, None, None)}
    run.pool.changes |= {f"train-4-{k}": {"error": ("answer unusable: x",) * 4} for k in range(4)}
    with pytest.raises(
        RunError, match="step 4: every trajectory failed, 16 of 16 with: answer unusable: x"
    ):
        run.train()
    assert run.events() == [("trajectories_failed", 2)]


def test_whatever_happens_names_the_step_that_is_being_trained(folder, monkeypatch):
    """The step of the ledger and of metrics.jsonl, in events and spans alike."""
    (folder / "spans").mkdir()
    monkeypatch.setattr(spans, "_path", None)
    spans.record_spans(folder, "controller")
    run = FakeRun(folder, "runner.save_interval=1")

    def strike(calls):
        if calls == 5:  # the rollout of step 4, after two validations
            run.pool.restarts += 1
            run.log.event("worker_replaced", "as the pool reports it")

    run.pool.strike = strike
    run.train()
    spans.flush_spans()
    monkeypatch.setattr(spans, "_path", None)
    assert run.events() == [("worker_replaced", 4)]
    assert [row.get("rollout/worker_restarts") for row in run.rows()] == [None, 0, 0, 0, 1, 1, 1]
    assert read_status(folder)["workers"][1]["restarts"] == 1
    for phase in ("step", "generate", "train", "sync", "checkpoint"):
        seen = {span["about"]["step"] for span in spans.read_spans(folder) if span["name"] == phase}
        assert seen == {1, 2, 3, 4, 5, 6}, phase


def test_a_sample_has_a_stream_of_its_own_and_validation_the_same_every_time():
    train, later = (make_tasks("train", [7, 8], 3, 1, step) for step in (1, 2))
    seeds = [seed for task in (*train, *later) for seed in task.seeds]
    assert len(set(seeds)) == 12
    first, again = (make_tasks("val", [7, 8], 1, 1, step) for step in (1, 2))
    assert [task.seeds for task in first] == [task.seeds for task in again]
    assert [task.group_id for task in again] == ["val-2-0", "val-2-1"]
    assert make_tasks("val", [7], 1, 2, 1)[0].seeds != first[0].seeds


DYNAMIC = "algorithm.dynamic_sampling.enable=true"


class Tying(FakePool):
    """Two thirds of its training groups tie: those of rows that 3 doesn't divide."""

    def submit(self, tasks, events=None):
        for task in tasks:
            if task.split == "train" and task.row % 3:
                self.changes[task.group_id] = {"rewards": (1.0,) * 4}
        return super().submit(tasks, events)


def test_groups_that_tie_are_replaced_by_groups_of_further_rows(folder):
    run = FakeRun(folder, DYNAMIC, pool=Tying())
    run.train()
    for row, line in zip(run.rows()[1:], run.rows("ledger"), strict=True):
        asked = [
            group
            for groups in run.pool.asked
            for group in groups
            if group.startswith(f"train-{row['step']}-")
        ]
        assert asked == [f"train-{row['step']}-{k}" for k in range(len(asked))], (
            "each is drawn once, in order"
        )
        assert (
            row["rollout/generated_groups"]
            == len(asked)
            == len(line["groups"]) + len(line["dropped_groups"])
        )
        assert (
            sorted(line["groups"] + line["dropped_groups"]) == sorted(asked)
            and len(line["groups"]) == 4
        )
        tied = sum(r % 3 > 0 for r in line["rows"])
        assert row["rollout/tied_groups_trained"] == tied and (
            not tied or row["rollout/rounds"] == 4
        )
        assert not tied or all(r % 3 for r in line["dropped_rows"]), (
            "nothing that teaches is dropped for what does not"
        )
        assert row["reward/zero_std_groups"] == sum(
            r % 3 > 0 for r in line["rows"] + line["dropped_rows"]
        )
    lines = run.rows("ledger")
    taken = [r for line in lines for r in line["rows"] + line["dropped_rows"]]
    assert sum(row["rollout/rounds"] > 1 for row in run.rows()[1:]) > 3
    state = RunState.read(folder / "checkpoints/global_step_6")
    assert state.sampler["epoch"] * 40 + state.sampler["rows"] == len(taken), (
        "rows of all rounds are handed out"
    )
    assert {taken.count(r) for r in range(40)} <= {len(taken) // 40, len(taken) // 40 + 1}
    assert not run.pool.alive, "a dropped group was not released"


@pytest.mark.parametrize("call", [2, 3, 5, 8, 12])
def test_dynamic_sampling_goes_on_as_if_nothing_had_been(folder, call, tmp_path_factory):
    """A run that is told to stop in any round of any step."""
    whole = FakeRun(tmp_path_factory.mktemp("whole"), DYNAMIC, pool=Tying())
    whole.train()

    def strike(calls):
        if calls == call:
            run.stop.number = signal.SIGTERM
            run.stop.check()

    run = FakeRun(folder, DYNAMIC, pool=Tying(strike))
    with pytest.raises(Interrupted):
        run.train()
    again = FakeRun(folder, DYNAMIC, pool=Tying())
    again.train()
    plain = {
        step: {k: v for k, v in row.items() if not k.startswith("val/")}
        for step, row in again.metrics().items()
    }
    assert plain == {
        step: {k: v for k, v in row.items() if not k.startswith("val/")}
        for step, row in whole.metrics().items()
    }
    assert again.rows("ledger") == whole.rows("ledger")


def test_where_every_group_ties_a_step_trains_on_the_first_ones(folder):
    pool = Tying()
    pool.changes = {
        f"train-{step}-{k}": {"rewards": (1.0,) * 4} for step in (1, 2) for k in range(20)
    }
    run = FakeRun(
        folder, DYNAMIC, "algorithm.dynamic_sampling.max_rounds=3", "runner.max_steps=2", pool=pool
    )
    run.train()
    assert [row["rollout/rounds"] for row in run.rows()[1:]] == [3, 3]
    assert [line["groups"] for line in run.rows("ledger")] == [
        [f"train-{s}-{k}" for k in range(4)] for s in (1, 2)
    ]
    assert run.events("groups_tie") == [("groups_tie", 1), ("groups_tie", 2)]
    plain = FakeRun(folder / "plain", "runner.max_steps=1")
    plain.train()
    assert "rollout/rounds" not in plain.rows()[1] and set(plain.rows("ledger")[0]) == {
        "step",
        "groups",
        "rows",
    }
