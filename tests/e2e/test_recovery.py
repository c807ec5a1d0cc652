"""Runs whose parts are killed for real: each ends as if nothing had happened, to the last digit, and leaves nothing behind.

What the loop decides when something fails is tested with fakes in milliseconds (tests/unit/controller); these four strikes show
that the real processes die, hang and stop as the fakes do.
"""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from whole_run import Run, comparable, rows_of

from rlinf_vl.observe.status import read_status

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

STEPS = 6
OVERRIDES = (
    f"runner.max_steps={STEPS}",
    "runner.save_interval=2",
    "runner.val_check_interval=3",
    "data.val_samples=16",
    "data.rollout_batch_size=4",
    "runner.heartbeat_timeout=6",
    "algorithm.n_minibatches=2",
    "runner.max_tokens_per_mbs=600",  # many micro-batches, and
    "rollout.max_running_requests=8",  # slow generation: both are easily struck in the middle
)


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def assert_none_leaked(before: set[str]) -> None:
    """Shared memory that was not there `before` belongs to a process that lives (another test's): none outlived its run."""
    deadline = time.monotonic() + 15
    while True:
        maps = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                maps.append(Path(f"/proc/{process.pid}/maps").read_text())
        leaked = [
            name
            for name in shared_memory() - before
            if not any(f"/dev/shm/{name}" in text for text in maps)
        ]
        if not leaked:
            return
        assert time.monotonic() < deadline, leaked
        time.sleep(0.5)


def events(run: Run, kind: str) -> list[str]:
    return [row["message"] for row in rows_of(run.folder / "events.jsonl") if row["kind"] == kind]


def check_ledger(folder: Path) -> None:
    """Every step once, every group once, and within an epoch every row at most once."""
    rows = rows_of(folder / "ledger.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    groups = [group for row in rows for group in row["groups"]]
    assert len(groups) == len(set(groups)) and all(
        f"train-{row['step']}-0" in row["groups"] for row in rows
    )
    trained = [row for step in rows for row in step["rows"]]
    assert len(trained) == len(set(trained)) == len(groups)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The metrics of a run that nothing happened to."""
    before = shared_memory()
    run = Run(tmp_path_factory.mktemp("undisturbed"), *OVERRIDES)
    run.finish()
    check_ledger(run.folder)
    assert_none_leaked(before)
    metrics = comparable(run.folder)
    assert sorted(metrics) == list(range(STEPS + 1))
    return metrics


def stop_in_generation(run: Run) -> psutil.Process:
    """Return a rollout worker that was stopped (SIGSTOP) while the controller waits for groups.

    The worker is stopped first, and the controller's phase read afterwards: so the generation
    cannot end in between, however slow this process is. Stopped at another moment, the worker goes
    on, and the next moment is tried.
    """
    while True:
        run.until(lambda: read_status(run.folder).get("phase") == "generate")
        (worker,) = run.actors("ray::RolloutRank")
        worker.suspend()
        time.sleep(2)  # the status file is written within a quarter of a second
        if read_status(run.folder)["phase"] == "generate":
            return worker
        worker.resume()


def test_a_rollout_worker_is_killed_in_generation(undisturbed, tmp_path):
    before = shared_memory()
    # The worker is stopped for some seconds before it is killed, which must not count as a hang.
    run = Run(tmp_path, *OVERRIDES, "runner.heartbeat_timeout=120")
    run.until_step(1)
    stop_in_generation(run).kill()
    output = run.finish()
    (message,) = events(run, "worker_replaced")
    assert message in output and "1 × worker replaced" in "\n".join(output.splitlines()[-6:])
    assert "no heartbeat" not in message and "groups are sent again" in message
    assert rows_of(run.folder / "metrics.jsonl")[-1]["rollout/worker_restarts"] == 1
    assert comparable(run.folder) == undisturbed
    check_ledger(run.folder)
    assert_none_leaked(before)


def test_an_actor_rank_is_stopped_in_training(undisturbed, tmp_path):
    before = shared_memory()
    run = Run(tmp_path, *OVERRIDES)
    run.until_step(3)
    # Written while step 3 is trained, or later.
    run.until((run.folder / "checkpoints/global_step_2").exists)
    rank = run.until(lambda: run.actors("ray::ActorRank.update"))[-1]
    rank.suspend()
    output = run.finish()
    (message,) = events(run, "actors_restarted")
    assert "actor rank" in message and "global_step_2" in message and message in output
    assert "no heartbeat" in message
    assert rows_of(run.folder / "metrics.jsonl")[-1]["actor/restarts"] == 1
    assert comparable(run.folder) == undisturbed
    check_ledger(run.folder)
    assert_none_leaked(before)


def test_the_controller_is_killed_while_a_checkpoint_is_written(undisturbed, tmp_path):
    run = Run(tmp_path, *OVERRIDES)
    run.until((run.folder / "checkpoints/.global_step_4.tmp/actor").exists)
    run.process.kill()
    run.finish(expect=-signal.SIGKILL)
    assert read_status(run.folder)["state"] == "gone"
    assert sorted(path.name for path in (run.folder / "checkpoints").glob("global_step_*")) == [
        "global_step_2"
    ]
    resumed = Run(tmp_path, *OVERRIDES, "runner.resume_dir=auto")
    assert "resumed from" in resumed.finish()
    assert comparable(run.folder) == undisturbed
    check_ledger(run.folder)


def test_a_run_that_is_asked_to_stop_saves_and_goes_on_later(undisturbed, tmp_path):
    before = shared_memory()
    run = Run(tmp_path, *OVERRIDES)
    run.until_step(3)
    os.killpg(run.process.pid, signal.SIGTERM)  # as a terminal does, and a scheduler
    assert "will stop with a checkpoint" in run.finish(expect=128 + signal.SIGTERM)
    steps = [
        int(path.name.split("_")[-1]) for path in (run.folder / "checkpoints").glob("global_step_*")
    ]
    status = read_status(run.folder)
    assert (status["state"], status["reason"]) == ("stopped", "stopped by SIGTERM")
    assert (
        max(steps) >= 3 and max(steps) == rows_of(run.folder / "metrics.jsonl")[-1]["step"] < STEPS
    )
    Run(tmp_path, *OVERRIDES, "runner.resume_dir=auto").finish()
    assert comparable(run.folder) == undisturbed
    check_ledger(run.folder)
    assert_none_leaked(before)
