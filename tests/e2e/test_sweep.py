"""A sweep of real runs: killed in the middle, resumed as a whole, with a setting that fails."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pyarrow.parquet as pq
import pytest
from whole_run import LOCAL

from rlinf_vl.extras.toy.task import toy_dataset_path
from rlinf_vl.observe.status import read_status
from rlinf_vl.tools.report.sweep import read_sweep

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A few of the toy's rows: checking all of them takes longer than two steps."""
    path = tmp_path_factory.mktemp("data") / "rows.parquet"
    pq.write_table(pq.read_table(toy_dataset_path("train")).slice(0, 16), path)
    return path


GRID = (
    # An infinite rate makes gradients that are not finite from the second step on.
    "actor.optim.lr=5e-4,1e30", "runner.max_steps=4", "runner.seed=1,2", "actor.optim.lr_warmup_steps=0",
)  # fmt: skip


def start(tmp_path, rows, *options):
    return subprocess.Popen(
        [
            sys.executable, "-m", "rlinf_vl", "train", "toy-grpo-cpu", "--multirun", LOCAL,
            "runner.max_steps=2", "runner.save_interval=1", "runner.val_check_interval=-1",
            f"data.train_data_paths={rows}", "data.rollout_batch_size=4", "algorithm.group_size=4",
            f"runner.output_dir={tmp_path}", "runner.experiment_name=sweep", *options,
        ],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ,
    )  # fmt: skip


def wait_for(condition, process):
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end and process.poll() is None, process.communicate()[0]
        time.sleep(0.1)


def test_a_sweep_that_was_killed_goes_on_where_it_stood(tmp_path, rows):
    folder = tmp_path / "sweep"
    good, bad = ([folder / f"lr-{lr}_seed-{seed}" for seed in (1, 2)] for lr in ("0.0005", "1e+30"))
    first = start(tmp_path, rows, *GRID)
    # Until the third run, the first setting's second seed, has begun to train.
    wait_for(lambda: read_status(good[1]).get("state") == "running", first)
    first.send_signal(signal.SIGINT)
    output, _ = first.communicate(timeout=300)
    assert first.returncode == 128 + signal.SIGINT, output
    assert "the same command again goes on with the sweep" in output
    assert read_status(good[0])["state"] == "done" and read_status(bad[0])["state"] == "failed"
    assert read_status(good[1])["state"] in ("stopped", "done") and not bad[1].exists()
    assert not any("sweep" in " ".join(p.cmdline()) for p in psutil.Process().children(True))

    untouched = (good[0] / "metrics.jsonl").stat().st_mtime_ns
    second = start(tmp_path, rows, *GRID, "--parallel", "2")
    output, _ = second.communicate(timeout=600)
    # A run that failed does not end the sweep, but the exit code says so, and the log why.
    assert second.returncode == 1, output
    assert "2 of 4 runs are done" in output
    assert f"run {bad[1].name} failed with exit code 1: " in output and "not finite" in output
    assert (good[0] / "metrics.jsonl").stat().st_mtime_ns == untouched
    assert f"{good[0].name}\n" not in output.split("runs are done", 1)[1]
    # Side by side, each run has its output in a file of its own.
    assert "step 4/4" in (folder / f"{good[1].name}.log").read_text()
    steps = [
        json.loads(line)["step"] for line in (good[1] / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps == [1, 2, 3, 4]  # the run went on, or began again; no step is there twice
    axes, members = read_sweep(folder)
    assert axes == ["actor.optim.lr", "runner.seed"]
    assert [m.state for m in members] == ["done", "failed", "done", "failed"]
    assert "2 settings, 4 runs, 2 of them done" in (folder / "report.html").read_text()
