"""Runs whose parts are killed for real: each ends as if nothing had happened, to the last digit, and leaves nothing behind."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from whole_run import Run, comparable, rows_of

from rlinf_vl.observe.status import read_status

pytestmark = pytest.mark.e2e

STEPS = 8
OVERRIDES = (
    f"runner.max_steps={STEPS}",
    "runner.save_interval=3",
    "runner.val_check_interval=4",
    "data.val_samples=40",
    "runner.heartbeat_timeout=6",
    "algorithm.n_minibatches=2",
    "runner.max_tokens_per_mbs=600",  # many micro-batches, and
    "rollout.max_running_requests=16",  # slow generation: both are easily struck in the middle
)


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def events(run: Run, kind: str) -> list[str]:
    return [row["message"] for row in rows_of(run.folder / "events.jsonl") if row["kind"] == kind]


def check_ledger(folder: Path) -> None:
    """Every step once, every group once, and within an epoch every row at most once."""
    rows = rows_of(folder / "ledger.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    groups = [group for row in rows for group in row["groups"]]
    assert len(groups) == len(set(groups)) and all(f"train-{row['step']}-0" in row["groups"] for row in rows)
    trained = [row for step in rows for row in step["rows"]]
    assert len(trained) == len(set(trained)) == len(groups)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The metrics of a run that nothing happened to."""
    before = shared_memory()
    run = Run(tmp_path_factory.mktemp("undisturbed"), *OVERRIDES)
    run.finish()
    check_ledger(run.folder)
    assert shared_memory() <= before
    metrics = comparable(run.folder)
    assert sorted(metrics) == list(range(STEPS + 1))
    return metrics


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rollout_worker_is_killed_or_stopped_in_generation(undisturbed, tmp_path, number):
    before = shared_memory()
    run = Run(tmp_path, *OVERRIDES)
    run.until_step(2)
    run.until(lambda: not run.actors("ray::ActorRank."))  # no rank at work: the workers generate
    (worker,) = run.actors("ray::RolloutRank")
    worker.send_signal(number)
    output = run.finish()
    (message,) = events(run, "worker_replaced")
    assert message in output and "1 × worker replaced" in "\n".join(output.splitlines()[-6:])
    assert ("no heartbeat" in message) == (number == signal.SIGSTOP)
    assert rows_of(run.folder / "metrics.jsonl")[-1]["rollout/worker_restarts"] == 1
    assert comparable(run.folder) == undisturbed
    check_ledger(run.folder)
    assert shared_memory() <= before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_actor_rank_is_killed_or_stopped_in_training(undisturbed, tmp_path, number):
    before = shared_memory()
    run = Run(tmp_path, *OVERRIDES)
    run.until_step(4)
    rank = run.until(lambda: run.actors("ray::ActorRank.update"))[-1]
    rank.send_signal(number)
    output = run.finish()
    (message,) = events(run, "actors_restarted")
    assert "actor rank" in message and "global_step_3" in message and message in output
    assert ("no heartbeat" in message) == (number == signal.SIGSTOP)
    assert rows_of(run.folder / "metrics.jsonl")[-1]["actor/restarts"] == 1
    assert comparable(run.folder) == undisturbed
    check_ledger(run.folder)
    assert shared_memory() <= before


def test_actor_ranks_that_keep_dying_end_the_run(tmp_path):
    run = Run(tmp_path, *OVERRIDES, "runner.max_restarts=0")
    run.until_step(3)
    run.until(lambda: run.actors("ray::ActorRank.update"))[0].kill()
    output = run.finish(expect=1)
    assert "runner.max_restarts" in output and "global_step_3" in output.splitlines()[-1]
    status = read_status(run.folder)
    assert status["state"] == "failed" and "runner.max_restarts" in status["reason"]


def test_the_controller_is_killed_while_a_checkpoint_is_written(undisturbed, tmp_path):
    run = Run(tmp_path, *OVERRIDES)
    run.until((run.folder / "checkpoints/.global_step_6.tmp/actor").exists)
    run.process.kill()
    run.finish(expect=-signal.SIGKILL)
    assert read_status(run.folder)["state"] == "gone"
    assert sorted(path.name for path in (run.folder / "checkpoints").glob("global_step_*")) == ["global_step_3"]
    resumed = Run(tmp_path, *OVERRIDES, "runner.resume_dir=auto")
    assert "resumed from" in resumed.finish()
    assert comparable(run.folder) == undisturbed
    check_ledger(run.folder)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_told_to_stop_saves_and_goes_on_later(undisturbed, tmp_path, number):
    before = shared_memory()
    run = Run(tmp_path, *OVERRIDES)
    run.until_step(4)
    os.killpg(run.process.pid, number)  # as a terminal does, and a scheduler
    assert "will stop with a checkpoint" in run.finish(expect=128 + number, seconds=40)
    steps = [int(path.name.split("_")[-1]) for path in (run.folder / "checkpoints").glob("global_step_*")]
    status = read_status(run.folder)
    assert (status["state"], status["reason"]) == ("stopped", f"stopped by {signal.Signals(number).name}")
    assert max(steps) >= 4 and max(steps) == rows_of(run.folder / "metrics.jsonl")[-1]["step"] < STEPS
    Run(tmp_path, *OVERRIDES, "runner.resume_dir=auto").finish()
    assert comparable(run.folder) == undisturbed
    check_ledger(run.folder)
    assert shared_memory() <= before


def test_a_second_ctrl_c_leaves_at_once(tmp_path):
    run = Run(tmp_path, *OVERRIDES)
    run.until_step(1)
    run.until(lambda: run.actors("ray::ActorRank.update"))
    for process in run.actors("ray::ActorRank"):  # so that the first can't be heeded
        process.send_signal(signal.SIGSTOP)
    os.killpg(run.process.pid, signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        run.process.wait(timeout=2)
    os.killpg(run.process.pid, signal.SIGINT)
    run.finish(expect=130, seconds=20)


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of its own, and the means to resize it."""
    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("mounting a small disk takes root")
    folder = tmp_path / "disk"
    folder.mkdir()

    def resize(megabytes: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={megabytes}m", folder], check=True)

    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=60m", "tmpfs", folder], check=True, capture_output=True)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no disk can be mounted here: {error.stderr}")
    yield folder, resize
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_keeps_the_last_good_checkpoint_and_says_what_is_needed(undisturbed, small_disk):
    """One checkpoint is 9 MB: the first is too large in the writing, the second fits, for the third there is no room."""
    folder, resize = small_disk
    run = Run(folder, *OVERRIDES, "runner.logger.logger_backends=[]")
    run.until((run.folder / "config.yaml").exists)  # a disk that holds no checkpoint would be refused before that
    resize(5)
    run.until(lambda: events(run, "checkpoint_failed"))
    resize(15)
    output = run.finish(expect=1)
    first, last = events(run, "checkpoint_failed")
    assert "step 3" in first and "needs at least" in first and first.endswith("The last good one is none")
    assert "MB are free" in last and "runner.keep_last" in last and last.endswith("global_step_6")
    assert last in output.splitlines()[-1]
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["global_step_6"]
    resize(60)
    Run(folder, *OVERRIDES, "runner.logger.logger_backends=[]", "runner.resume_dir=auto").finish()
    assert comparable(run.folder) == undisturbed
    check_ledger(run.folder)


def test_two_ranks_one_rank_two_ranks(undisturbed, tmp_path):
    """A checkpoint fits any number of ranks; who computes what is then rounded differently, nothing else."""
    for last, slots in ((3, "0-1"), (6, "0"), (STEPS, "0-1")):
        placement = f"cluster.component_placement={{actor: {slots}, rollout: 0}}"
        run = Run(tmp_path, *OVERRIDES, placement, "runner.resume_dir=auto", "runner.keep_last=-1")
        run.until_step(last)
        if last < STEPS:
            run.process.kill()
        run.finish(expect=0 if last == STEPS else -signal.SIGKILL)
    found = comparable(run.folder)
    assert found.keys() == undisturbed.keys()
    for step, expected in undisturbed.items():
        names = [name for name in expected if name.startswith(("reward/", "actor/", "val/"))]
        assert {name: found[step][name] for name in names} == pytest.approx(
            {name: expected[name] for name in names}, rel=1e-5, abs=1e-5
        )
    check_ledger(run.folder)


def test_a_run_that_goes_back_takes_another_branch_with_other_settings(tmp_path):
    """From an older checkpoint, at another learning rate, the vision tower trained before and frozen now."""
    common = ("data.val_samples=20", "runner.val_check_interval=2", "runner.save_interval=1")
    first = Run(
        tmp_path, *common, "runner.max_steps=3", "runner.keep_last=-1", "actor.model.freeze_vision_tower=false",
        "actor.optim.lr=0.02", "actor.optim.lr_warmup_steps=0",
    )  # fmt: skip
    first.finish()
    before = comparable(first.folder)
    back = Run(
        tmp_path, *common, "runner.max_steps=4", "runner.keep_last=1", "actor.model.freeze_vision_tower=true",
        "actor.optim.lr=0.001", "actor.optim.lr_warmup_steps=9", "algorithm.kl_beta=0.01", "runner.mismatch_check_interval=1",
        f"runner.resume_dir={first.folder}/checkpoints/global_step_1",
    )  # fmt: skip
    output = back.finish()
    assert "what came after step 1 is now in" in output and "actor.optim.lr: 0.02 → 0.001" in output
    assert [path.name for path in (back.folder / "checkpoints").iterdir()] == ["global_step_4"]
    left = back.folder / "abandoned-1"
    assert {path.name for path in (left / "checkpoints").iterdir()} == {"global_step_2", "global_step_3"}
    assert comparable(left) == before
    found = comparable(back.folder)
    assert sorted(found) == [0, 1, 2, 3, 4] and [found[step] for step in (0, 1)] == [before[step] for step in (0, 1)]
    # what the step after this one trains with, as before: `factor` of a warm-up over nine optimizer steps
    assert [found[step]["actor/lr"] for step in (2, 3, 4)] == pytest.approx([0.0003, 0.0004, 0.0005])
    for step in (2, 3, 4):  # float32: engine and trainer agree, images included
        assert found[step]["actor/rollout_train_abs_diff_max"] < 1e-4 and found[step]["mismatch/one_image"] < 1e-4
        assert found[step]["actor/ref_kl"] > 1e-3, "the policy has left the base model behind, and its tower"
    assert {path.name for path in (back.folder / "trajectories").iterdir()} == {f"step_{n}.parquet" for n in range(5)}

    again = Run(tmp_path, *common, "runner.max_steps=1")
    assert "is now in" in again.finish()
    aside = tmp_path / f"{again.folder.name}.previous-1"
    assert comparable(aside) == found and (aside / "abandoned-1/checkpoints/global_step_3").is_dir()
    assert sorted(comparable(again.folder)) == [0, 1]
    assert not (again.folder / "checkpoints/global_step_4").exists()
