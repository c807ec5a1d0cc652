"""`status.json`: what a run is doing at this moment, or why it ended, for those who watch it from outside."""

import json
import os
import platform
import time
import traceback
from pathlib import Path
from typing import Any

import psutil

from rlinf_vl.errors import ConfigError, RunError, reason_of

#: Lines that a reason has at most, and of a traceback, its last ones.
REASON_LINES, TRACE_LINES = 40, 8


class StatusFile:
    """The file, replaced as a whole at every change, so that a reader never sees half of one. That it can't be written stops
    nothing."""

    def __init__(self, run_dir: Path) -> None:
        now = time.time()
        self._path = run_dir / "status.json"
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
        now = time.time()
        if changes.get("phase", self._status["phase"]) != self._status["phase"]:
            changes = {"phase_since": now} | changes
        self._status |= changes | {"time": now}
        scratch = self._path.with_suffix(".tmp")
        try:
            scratch.write_text(json.dumps(self._status))
            os.replace(scratch, self._path)
        except OSError:
            pass


def read_status(run_dir: Path) -> dict[str, Any]:
    """What `status.json` says; empty if it is not there or torn.

    A run that says it goes on, and whose process is not on this host any more, has `state` "gone" and a `reason`. Of another
    host's process nothing is known.
    """
    try:
        status = dict(json.loads((run_dir / "status.json").read_bytes()))
        if status["state"] in ("starting", "running") and status["host"] == platform.node() and not _lives(status):
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status["time"]))
            status |= {"state": "gone"}
            status["reason"] = (
                f"process {status['pid']} on {status['host']} ended without a word: killed (kill -9, out of memory) or lost "
                f"with its host. Its last news are of {since}, in step {status['step']}, phase {status['phase'] or 'unknown'}"
            )
        return status
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def _lives(status: dict[str, Any]) -> bool:
    """Whether that process runs, and not another one that has got its id since."""
    try:
        process = psutil.Process(status["pid"])
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() < status["started"] + 60
    except psutil.NoSuchProcess:
        return False


def last_words(error: BaseException) -> str:
    """Why a run failed, in lines: what went wrong, and for an error that is not ours the end of its traceback."""
    lines = reason_of(error).splitlines()
    if not isinstance(error, (RunError, ConfigError)):
        lines += [line for line in "".join(traceback.format_exception(error)).splitlines() if line.strip()][
            -TRACE_LINES:
        ]
    return "\n".join(lines[:REASON_LINES])
