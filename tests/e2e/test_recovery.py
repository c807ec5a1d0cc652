"""Runs whose parts are killed for real: each ends as if nothing had happened, to the last digit, and leaves nothing behind."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from whole_run import Run, comparable, rows_of

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


def test_the_controller_is_killed_while_a_checkpoint_is_written(undisturbed, tmp_path):
    run = Run(tmp_path, *OVERRIDES)
    run.until((run.folder / "checkpoints/.global_step_6.tmp/actor").exists)
    run.process.kill()
    run.finish(expect=-signal.SIGKILL)
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
    if number == signal.SIGINT:
        os.killpg(run.process.pid, number)  # as a terminal does
    else:
        run.process.send_signal(number)
    assert "will stop with a checkpoint" in run.finish(expect=128 + number, seconds=40)
    steps = [int(path.name.split("_")[-1]) for path in (run.folder / "checkpoints").glob("global_step_*")]
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
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", folder], check=True, capture_output=True)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no disk can be mounted here: {error.stderr}")
    yield folder, resize
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_keeps_the_last_good_checkpoint_and_says_what_is_needed(undisturbed, small_disk):
    """One checkpoint is 9 MB: the first is too large in the writing, the second fits, for the third there is no room."""
    folder, resize = small_disk
    run = Run(folder, *OVERRIDES, "runner.logger.logger_backends=[]")
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
