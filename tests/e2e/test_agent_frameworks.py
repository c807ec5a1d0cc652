"""Agents of five frameworks, unmodified but for base URL and key, train together for three steps."""

import subprocess
import sys
from pathlib import Path

import pytest
from framework_agent import FOLDER
from fresh_environment import python_with
from whole_run import metrics_of

ROOT = Path(__file__).resolve().parents[2]
STEPS = 3

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def frameworks_python(tmp_path_factory) -> Path:
    requirements = FOLDER / "requirements.txt"
    return python_with(tmp_path_factory.mktemp("frameworks"), "-r", str(requirements))


@pytest.mark.nightly
def test_five_frameworks_train(frameworks_python, tmp_path):
    command = [
        *(sys.executable, "-m", "rlinf_vl", "train", "toy-grpo-cpu", "cluster.backend=local"),
        f"runner.output_dir={tmp_path}",
        f"runner.max_steps={STEPS}",
        "runner.val_check_interval=-1",
        "runner.save_interval=-1",
        "runner.seq_length=4096",
        "runner.max_tokens_per_mbs=8192",
        "data.rollout_batch_size=1",
        "algorithm.group_size=6",
        f"rollout.agent.command=[{frameworks_python},{ROOT / 'tests/framework_agent.py'}]",
        "rollout.agent.max_concurrent=3",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=800, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = metrics_of(tmp_path / "toy-grpo-cpu")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        assert row["rollout/errors"] == 0 and row["actor/rollout_train_abs_diff_mean"] <= 2e-5
    played = {name.removeprefix("env/") for row in rows for name in row}
    assert {path.stem for path in FOLDER.glob("*.py")} <= played
    assert all(row["agent/calls"] >= 1 for row in rows)
