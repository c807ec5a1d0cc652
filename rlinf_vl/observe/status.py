"""`status.json`: the present state of a run, or why it ended; `environment.json`: its machine,
versions and code."""

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

#: Lines at most of a reason, and of the end of a traceback in it.
REASON_LINES, TRACE_LINES = 40, 8
#: Seconds within which a frequent change is written.
DELAY_S = 0.25
#: Keys that change several times a step.
OFTEN = {"phase", "progress", "step"}
#: Packages whose versions matter to a result.
PACKAGES = (
    "rlinf_vl",
    "torch",
    "transformers",
    "ray",
    "sglang",
    "numpy",
    "datasets",
    "math-verify",
    "tokenizers",
)


class StatusFile:
    """The file status.json, replaced as a whole. A run goes on if it can't be written.

    Changes of the keys in `OFTEN` are written within `DELAY_S`: replacing a file takes milliseconds
    on some disks.
    """

    _pending_write: threading.Timer | None = None  # None: everything is written

    def __init__(self, run_dir: Path) -> None:
        time_s = time.time()
        self._path = run_dir / "status.json"
        self._lock = threading.Lock()  # guards the status and the timer; never held while writing
        self._write_lock = threading.Lock()  # two writers would share one temporary file
        self._status: dict[str, Any] = {
            "pid": os.getpid(),
            "host": platform.node(),
            "time": time_s,
            "started": time_s,
            "state": "starting",
            "step": 0,
            "total_steps": 0,
            "phase": "",
            "phase_since": time_s,
            "progress": None,
            "workers": [],
            "reason": "",
        }

    def update(self, **changes: Any) -> None:
        """Change some keys and write the file.

        The keys are: state (starting, running, done, stopped, failed), reason (why it stopped or
        failed), step, total_steps, phase, progress ({done, total} or None), workers ({name, node,
        pid, state, restarts} each).
        """
        time_s = time.time()
        is_frequent = changes.keys() <= OFTEN
        if changes.get("phase", self._status["phase"]) != self._status["phase"]:
            changes = {"phase_since": time_s} | changes
        with self._lock:
            self._status |= changes | {"time": time_s}
            if is_frequent and self._pending_write is None:
                self._pending_write = threading.Timer(DELAY_S, self._write)
                self._pending_write.daemon = True
                self._pending_write.start()
        if not is_frequent:
            self._write()

    def _write(self) -> None:
        with self._write_lock:
            with self._lock:
                content, timer, self._pending_write = (
                    json.dumps(self._status),
                    self._pending_write,
                    None,
                )
            if timer is not None:
                timer.cancel()
            with suppress(OSError), write_aside(self._path, durable=False) as aside:
                aside.write_text(content)


def read_status(run_dir: Path) -> dict[str, Any]:
    """Return the content of `status.json`; empty if it is missing or torn.

    If the state is starting or running, but the process is no longer on this host, `state` is
    "gone" and `reason` says so. Processes of other hosts can't be checked.
    """
    try:
        status = dict(json.loads((run_dir / "status.json").read_bytes()))
        is_active = status["state"] in ("starting", "running")
        if (
            is_active
            and status["host"] == platform.node()
            and not _lives(status["pid"], status["started"])
        ):
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status["time"]))
            status["state"] = "gone"
            status["reason"] = (
                f"process {status['pid']} on {status['host']} ended without a word: killed (kill "
                f"-9, out of memory) or lost with its host. Its last news are of {since}, in step "
                f"{status['step']}, phase {status['phase'] or 'unknown'}"
            )
        return status
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def _lives(pid: int, started: float) -> bool:
    """Return whether that process runs, and not another one that got its id since."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() < started + 60
    except psutil.NoSuchProcess:
        return False


def last_words(error: BaseException) -> str:
    """Return why a run failed, in lines; an error that is not ours ends with the end of its
    traceback."""
    lines = reason_of(error).splitlines()
    if not isinstance(error, (RunError, ConfigError)):
        trace = "".join(traceback.format_exception(error)).splitlines()
        lines += [line for line in trace if line.strip()][-TRACE_LINES:]
    return without_colors("\n".join(lines[:REASON_LINES]))


def write_environment(run_dir: Path) -> None:
    """Write environment.json: command, machine, versions, and the state of the checkout."""
    import torch

    # By the driver's own tool: torch would take GPU memory for as long as this process lives.
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
    """Return the checkout that this file is tracked in; None without one, such as for an installed
    package."""
    if not _output("git", "ls-files", Path(__file__).name):
        return None
    return {
        "commit": _output("git", "rev-parse", "HEAD"),
        "branch": _output("git", "rev-parse", "--abbrev-ref", "HEAD"),
        "changed_files": len(
            _output("git", "status", "--porcelain", "--untracked-files=no").splitlines()
        ),
    }


def _output(*command: str) -> str:
    """Return the output of a command; empty if it fails or is missing."""
    try:
        folder = Path(__file__).parent
        return subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
