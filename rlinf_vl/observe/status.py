"""`status.json`: what a run is doing at this moment, for those who watch it from outside."""

import json
import os
import platform
import time
from pathlib import Path
from typing import Any


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
        }

    def update(self, **changes: Any) -> None:
        """Change some of: state (starting, running, done, stopped, failed), step, total_steps, phase, progress ({done, total}
        or None), workers ({name, node, pid, state, restarts} each)."""
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
