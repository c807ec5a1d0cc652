"""Files of JSON objects, one a line: what a step wrote is there whole or not at all, and can be taken back by step."""

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class StepLines:
    """One JSON object a line and step, `step` first, flushed line by line.

    The file never has a step twice, nor a torn line once it is open: resuming at step k drops what was written after k.

    Args:
        path: the file; its folder is made.
        resume_step: the last step whose lines are kept.

    Raises:
        ValueError: (`append`) a step not after the last one.
    """

    def __init__(self, path: str | Path, resume_step: int = -1) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.last_step: int | None = None
        if self.path.exists():
            self._drop_after(resume_step)
        self._file = self.path.open("a", encoding="utf-8")

    def append(self, step: int, values: Mapping[str, Any]) -> None:
        """Write one step's line; ValueError for a step not after the last one, or a NaN."""
        if self.last_step is not None and step <= self.last_step:
            raise ValueError(f"{self.path}: step {step} logged after step {self.last_step}")
        self._file.write(json.dumps({"step": step, **values}, allow_nan=False) + "\n")
        self._file.flush()
        self.last_step = step

    def close(self) -> None:
        """Close the file; nothing is appended after it."""
        self._file.close()

    def _drop_after(self, step: int) -> None:
        """Rewrites the file atomically with its whole lines of steps up to `step`."""
        rows = {row["step"]: row for row in read_steps(self.path) if row["step"] <= step}
        scratch = self.path.with_name(self.path.name + ".tmp")
        with scratch.open("w", encoding="utf-8") as file:
            for kept in sorted(rows):
                file.write(json.dumps(rows[kept], allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, self.path)
        self.last_step = max(rows, default=None)


def read_steps(path: str | Path) -> list[dict[str, Any]]:
    """The rows of such a file, in its order. Lines that a crash left torn are skipped."""
    rows = []
    for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            logger.warning("%s: skipped a torn line: %.80s", path, line)
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


class EventLog:
    """What happened to a run beside its steps: to the log, and to `run_dir/events.jsonl` as {time (Unix seconds), step, kind,
    message}. Nothing is ever taken back: a step that is trained again after a crash has its events twice."""

    def __init__(self, run_dir: str | Path) -> None:
        self._path = Path(run_dir) / "events.jsonl"
        self._counts: Counter[str] = Counter()

    def add(self, step: int, kind: str, message: str, level: int = logging.WARNING) -> None:
        """Write that something happened, and say so in the log at `level`; `kind` is what `summary` counts."""
        logger.log(level, "step %d: %s", step, message)
        self._counts[kind] += 1
        row = {"time": round(time.time(), 3), "step": step, "kind": kind, "message": message}
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:  # the disk may be full, which is perhaps just what is to be told
            logger.warning("%s: %s", self._path, error)

    def count(self, kind: str) -> int:
        """How often this has happened, to this process's knowledge."""
        return self._counts[kind]

    def summary(self) -> str:
        """Kinds and how often, for the run's last words."""
        return ", ".join(f"{n} × {kind.replace('_', ' ')}" for kind, n in sorted(self._counts.items()))
