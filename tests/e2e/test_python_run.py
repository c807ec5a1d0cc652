"""The script of docs/python.md, as it stands there; and a run in a Ray that its program has started."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs/python.md"

pytestmark = pytest.mark.e2e


def test_the_script_of_the_page(tmp_path):
    (script,) = re.findall(r"```py\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len([line for line in script.splitlines() if line.strip()]) <= 15
    # in a cluster of the program's own, whose processes know nothing of the run's settings
    own_ray = 'import ray\n\nray.init("local", num_cpus=2, include_dashboard=False)\n'
    (tmp_path / "own.py").write_text(f"{own_ray}{script}\nassert ray.is_initialized()\n")
    command = [sys.executable, "own.py"]
    mine = {
        name: value
        for name, value in os.environ.items()
        if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    }
    done = subprocess.run(
        command, cwd=tmp_path, env=mine, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "results/toy-grpo-cpu"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(
        row["rollout/errors"] == 0 and row["reward/mean"] < row["reward/accuracy"] for row in rows
    )
    assert (
        f"{folder}/report.html" in done.stdout and f"{folder}/models/global_step_3" in done.stdout
    )
    assert "boxed" in done.stdout.splitlines()[-1]
    assert "step 3/3" in done.stderr, "progress is shown"
    known = json.loads((folder / "datasets.json").read_text())["train"]
    (path,) = known
    assert (
        path.startswith(f"{tmp_path}/results/datasets/train-") and len(known[path]["sha256"]) == 64
    )
