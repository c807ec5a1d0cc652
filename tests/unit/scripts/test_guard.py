"""A session of tests that is interrupted or killed leaves nothing running."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from guard import marked_processes

ROOT = Path(__file__).resolve().parents[3]
#: A test that waits, as one with a run does: for a child that ignores everybody, and has another.
TEST = """
import os, subprocess, sys
CHILD = "import signal, subprocess, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN); " \\
    "subprocess.Popen(['sleep', '600'], start_new_session=True); open(sys.argv[1], 'w').close(); time.sleep(600)"

def test_waits(tmp_path):
    subprocess.run([sys.executable, "-c", CHILD, os.environ["STARTED"]])
"""


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [[], ["-n", "1"]], ids=["one process", "xdist"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_session(tmp_path: Path, parallel: list[str], number: signal.Signals):
    """Also not where the signal reaches the first process alone, as one from a script does."""
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    (tmp_path / "test_waits.py").write_text(TEST)
    started = tmp_path / "started"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RLINF_VL_TEST_")}
    environment |= {"STARTED": str(started), "PYTHONPATH": str(ROOT / "tests")}
    # What a script starts behind `&` ignores interrupts, and so does what that starts: tests, too.
    command = [
        "env",
        "--default-signal=INT",
        sys.executable,
        "-m",
        "pytest",
        "-q",
        *parallel,
        "-p",
        "no:cacheprovider",
    ]
    session = subprocess.Popen(
        [*command, tmp_path, "--rootdir", tmp_path], cwd=tmp_path, env=environment,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    mark = f"RLINF_VL_TEST_RUN={session.pid}"
    deadline = time.monotonic() + 60
    while not started.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(marked_processes(mark)) >= 2, "the test's child, and its child"
    session.send_signal(number)
    session.wait(30)
    while marked_processes(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [process.cmdline() for process in marked_processes(mark)]
    guards = [p for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or [])]
    psutil.wait_procs(guards, timeout=10)
    assert not any(guard.is_running() for guard in guards), "the guard ends, too"
