"""Whole runs on three hosts that are struck at random, for five minutes each.

RLINF_VL_CHAOS_MINUTES: how long each run is struck, such as 30; without it, as short as stands beside each.
"""

import importlib.util
import os
import subprocess
import sys

import pytest
from hosts import POSSIBLE, ROOT

MINUTES = os.environ.get("RLINF_VL_CHAOS_MINUTES")
#: Seconds for what is not struck: the undisturbed run, starts, and what is left of the run after the last strike.
BESIDE_S = 1800

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.e2e,
    pytest.mark.timeout(BESIDE_S + 240 * float(MINUTES or 5)),
    pytest.mark.skipif(not POSSIBLE, reason="needs root, and ip of iproute2"),
]


def strike(folder, default_minutes: str, *arguments: str) -> None:
    """Have benchmarks/chaos.py strike a run, and look at what is left of it."""
    minutes = MINUTES or default_minutes
    command = [
        sys.executable,
        str(ROOT / "benchmarks/chaos.py"),
        "--minutes",
        minutes,
        "--folder",
        str(folder),
    ]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    print(done.stdout)


def test_a_run_that_is_struck_ends_as_one_that_is_left_alone(tmp_path):
    strike(tmp_path, "2")


@pytest.mark.skipif(
    MINUTES is None, reason="takes a quarter of an hour at least: ask with RLINF_VL_CHAOS_MINUTES"
)
def test_so_does_an_async_one_with_slow_workers_and_environments_that_never_close(tmp_path):
    strike(tmp_path, "5", "--hard")


@pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None, reason="SGLang is not installed here"
)
def test_so_does_one_with_sglang_engines(tmp_path):
    strike(tmp_path, "5", "--config", "toy-grpo-cpu-sglang", "--steps", "100")
