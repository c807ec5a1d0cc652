"""Whole runs with the real SGLang as rollout engine: its numbers fit the trainer's, and no process outlives a run."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from whole_run import FIXED_METRICS, marked

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None,
        reason="SGLang is not installed here; `bash requirements/install.sh --sglang --dev` makes an environment",
    ),
]
#: Seconds until a run has started its engine and trained a step, on a machine that is busy with something else.
STARTED = 400
#: Seconds after its end in which a run's last process must be gone: the Ray agents of a killed driver try for up to a minute to
#: report to its GCS, which is dead as well, before they go.
GONE = 150


def start(folder: Path, *overrides: str) -> tuple[subprocess.Popen, dict[str, str]]:
    """A small run, and the mark that all its processes carry; what it writes is in `folder`/output."""
    mark = {"RLINF_VL_TEST_RUN": str(folder)}
    command = [
        sys.executable,
        "-m",
        "rlinf_vl",
        "train",
        "toy-grpo-cpu-sglang",
        f"runner.output_dir={folder}",
    ]
    small = ["data.rollout_batch_size=8", "data.val_samples=8", "runner.save_interval=-1"]
    with (folder / "output").open("w") as output:
        run = subprocess.Popen(
            [*command, *small, *overrides],
            env=os.environ | mark,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    return run, mark


def wait_until(reached, run: subprocess.Popen, folder: Path) -> None:
    deadline = time.monotonic() + STARTED
    while not reached():
        assert run.poll() is None and time.monotonic() < deadline, (folder / "output").read_text()
        time.sleep(0.2)


def metrics(folder: Path) -> list[dict]:
    written = folder / "toy-grpo-cpu-sglang/metrics.jsonl"
    return (
        [json.loads(line) for line in written.read_text().splitlines()] if written.exists() else []
    )


def commands(mark: dict[str, str]) -> str:
    """The command lines of the run's processes."""
    lines = []
    for process in marked(mark):
        try:
            lines.append(f"{process.pid}: {' '.join(process.cmdline())[:100]}")
        except psutil.Error:
            continue
    return "\n".join(lines)


def assert_all_gone(mark: dict[str, str]) -> None:
    deadline = time.monotonic() + GONE
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.5)
    left = commands(mark)
    for process in marked(mark):
        process.kill()
    assert not left


def strike(
    run: subprocess.Popen, mark: dict[str, str], folder: Path, number: signal.Signals, code: int
) -> None:
    """Send a run a signal after its third step: it ends with this code, and with all its processes."""
    try:
        wait_until(lambda: len(metrics(folder)) > 3, run, folder)
        titles = ("sglang::scheduler", "ray::ActorRank")
        # A process that is just changing its title has neither for a moment.
        wait_until(lambda: all(title in commands(mark) for title in titles), run, folder)
        run.send_signal(number)
        assert run.wait(timeout=60) == code
    finally:
        run.kill()
    assert_all_gone(mark)


def assert_numbers_agree(folder: Path) -> None:
    """In the first three steps the engine has the weights of the step before, and the trainer's logprobs."""
    rows = metrics(folder)[:4]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows[1:]:
        assert row.keys() >= FIXED_METRICS
        assert all(value is not None for value in row.values())
        assert 0 < row["actor/rollout_train_abs_diff_mean"] <= 1e-4
        assert row["rollout/errors"] == row["rollout/worker_restarts"] == 0
    versions = [
        (row["rollout/weight_version_min"], row["rollout/weight_version_max"]) for row in rows[1:]
    ]
    assert versions == [(0, 0), (1, 1), (2, 2)]
    assert rows[1]["mismatch/one_image"] <= 1e-4 < rows[1]["mismatch/blank_images"]


def test_a_run_trains_and_its_numbers_agree_and_interrupted_it_leaves_no_process(tmp_path):
    run, mark = start(tmp_path)
    strike(run, mark, tmp_path, signal.SIGINT, 128 + signal.SIGINT)
    assert_numbers_agree(tmp_path)


def test_a_killed_run_with_an_engine_over_two_ranks_agrees_and_leaves_no_process(tmp_path):
    """The engine sleeps and wakes with both, and on waking has the weights that the sync brings, and no others."""
    run, mark = start(
        tmp_path,
        "cluster.component_placement={actor: 0-1, rollout: 0-1}",
        "rollout.tensor_parallel_size=2",
    )
    strike(run, mark, tmp_path, signal.SIGKILL, -signal.SIGKILL)
