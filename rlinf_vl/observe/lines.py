"""A run's files of JSON lines: one line for each step, later ones dropped on resume; and the log of
events."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlinf_vl.runtime.files import LineFile, read_lines

logger = logging.getLogger(__name__)


class StepLines:
    """A file with one JSON object a line and step, `step` first.

    The file never has a step twice: resuming at a step drops later lines.

    Args:
        resume_step: the last step whose lines stay.
    """

    def __init__(self, path: str | Path, resume_step: int = -1) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = read_lines(self.path)[0] if self.path.exists() else []
        by_step = {
            row["step"]: row
            for row in rows
            if type(row.get("step")) is int and row["step"] <= resume_step
        }
        self._file = LineFile(self.path)
        self._file.keep([by_step[step] for step in sorted(by_step)])
        self.last_step: int | None = max(by_step, default=None)

    def append(self, step: int, values: Mapping[str, Any]) -> None:
        """Write one step's line, now or once the disk accepts it again.

        Raises:
            ValueError: the step is not after the last one, or a value is NaN or infinite.
        """
        if self.last_step is not None and step <= self.last_step:
            raise ValueError(f"{self.path}: step {step} logged after step {self.last_step}")
        self._file.append({"step": step, **values})
        self.last_step = step

    def flush(self) -> None:
        """Write the lines that the disk has refused so far; OSError if it still does."""
        self._file.flush()


class EventLog:
    """Events of a run beside its steps: in the log, and in `events.jsonl` as {time (Unix seconds),
    step, kind, message}.

    Resuming drops nothing here: a step that is trained again after a crash has its events twice.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self._file = LineFile(Path(run_dir) / "events.jsonl")
        self._counts: Counter[str] = Counter()
        # The controller's thread and the supervisor's both add events.
        self._lock = threading.Lock()

    def add(self, step: int, kind: str, message: str, level: int = logging.WARNING) -> None:
        """Log an event at `level` and write it down; `summary` counts events by `kind`."""
        logger.log(level, "step %d: %s", step, message)
        with self._lock:
            self._counts[kind] += 1
        self._file.append(
            {"time": round(time.time(), 3), "step": step, "kind": kind, "message": message}
        )

    def count(self, kind: str) -> int:
        """Return the number of such events in this process."""
        return self._counts[kind]

    def summary(self) -> str:
        """Return the counts of all kinds of events as one line."""
        with self._lock:
            counts = sorted(self._counts.items())
        return ", ".join(f"{n} × {kind.replace('_', ' ')}" for kind, n in counts)
