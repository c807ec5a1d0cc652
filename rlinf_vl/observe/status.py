"""`status.json`: what a run is doing at this moment, or why it ended; `environment.json`: what it runs on and from."""

import json
import os
import platform
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from rlinf_vl.errors import ConfigError, RunError, reason_of, without_colors
from rlinf_vl.runtime.files import write_aside

REASON_LINES, TRACE_LINES = 40, 8
"""Lines that a reason has at most, and a traceback in it, its last ones."""
DELAY_S = 0.25
OFTEN = {"phase", "progress", "step"}
PACKAGES = ("rlinf_vl", "torch", "transformers", "ray", "sglang", "numpy", "datasets", "math-verify", "tokenizers")
"""Packages whose versions matter to a result."""


class StatusFile:
    """status.json, replaced as a whole. A run goes on if it can't be written.

    What changes several times a step (`OFTEN`) is written within `DELAY_S`: to replace a file takes milliseconds on some disks.
    """

    _due: threading.Timer | None = None  # writes what is not written yet

    def __init__(self, run_dir: Path) -> None:
        now = time.time()
        self._path = run_dir / "status.json"
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._status: dict[str, Any] = {
            "pid": os.getpid(),
            "host": platform.node(),
            "time": now,
            "started": now,
            "state": "starting",
            "step": 0,
            "total_steps": 0,
            "phase": "",
            "phase_since": now,
            "progress": None,
            "workers": [],
            "reason": "",
        }

    def update(self, **changes: Any) -> None:
        """Change some of: state (starting, running, done, stopped, failed), reason (why it stopped or failed), step,
        total_steps, phase, progress ({done, total} or None), workers ({name, node, pid, state, restarts} each)."""
        now, often = time.time(), changes.keys() <= OFTEN
        if changes.get("phase", self._status["phase"]) != self._status["phase"]:
            changes = {"phase_since": now} | changes
        with self._lock:
            self._status |= changes | {"time": now}
            if often and self._due is None:
                self._due = threading.Timer(DELAY_S, self._write)
                self._due.daemon = True
                self._due.start()
        if not often:
            self._write()

    def _write(self) -> None:
        with self._writing:
            with self._lock:
                content, due, self._due = json.dumps(self._status), self._due, None
            if due is not None:
                due.cancel()
            with suppress(OSError), write_aside(self._path, durable=False) as aside:
                aside.write_text(content)


def read_status(run_dir: Path) -> dict[str, Any]:
    """The content of `status.json`; empty if it is missing or torn.

    If the run says that it goes on and its process is not on this host any more, `state` is "gone" and `reason` says so.
    Nothing is known of another host's process.
    """
    try:
        status = dict(json.loads((run_dir / "status.json").read_bytes()))
        going = status["state"] in ("starting", "running")
        if going and status["host"] == platform.node() and not _lives(status["pid"], status["started"]):
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status["time"]))
            status["state"] = "gone"
            status["reason"] = (
                f"process {status['pid']} on {status['host']} ended without a word: killed (kill -9, out of memory) or lost "
                f"with its host. Its last news are of {since}, in step {status['step']}, phase {status['phase'] or 'unknown'}"
            )
        return status
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def _lives(pid: int, started: float) -> bool:
    """Whether that process runs, and not another one that has got its id since."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() < started + 60
    except psutil.NoSuchProcess:
        return False


def last_words(error: BaseException) -> str:
    """Why a run failed, in lines; an error that is not ours ends with the end of its traceback."""
    lines = reason_of(error).splitlines()
    if not isinstance(error, (RunError, ConfigError)):
        trace = "".join(traceback.format_exception(error)).splitlines()
        lines += [line for line in trace if line.strip()][-TRACE_LINES:]
    return without_colors("\n".join(lines[:REASON_LINES]))


def write_environment(run_dir: Path) -> None:
    """Write environment.json: command, machine, versions, and the state of the checkout that is run."""
    import torch

    # by the driver's own tool: torch would take GPU memory for as long as this process lives
    gpus = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    packages = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    environment = {
        "command": " ".join(sys.orig_argv),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": gpus.splitlines(),
        "cuda": torch.version.cuda if gpus else None,
        "packages": packages,
        "git": _checkout(),
    }
    (run_dir / "environment.json").write_text(json.dumps(environment, indent=1) + "\n")


def _checkout() -> dict[str, Any] | None:
    """The checkout that this file is tracked in; None without one, such as for an installed package."""
    if not _output("git", "ls-files", Path(__file__).name):
        return None
    return {
        "commit": _output("git", "rev-parse", "HEAD"),
        "branch": _output("git", "rev-parse", "--abbrev-ref", "HEAD"),
        "changed_files": len(_output("git", "status", "--porcelain", "--untracked-files=no").splitlines()),
    }


def _output(*command: str) -> str:
    """What a command prints; empty if it fails or is missing."""
    try:
        folder = Path(__file__).parent
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
