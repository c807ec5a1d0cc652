"""What a run's folder says of itself, trajectories aside: whatever of it can be read, and a note of what can't."""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from rlinf_vl.observe.spans import read_spans
from rlinf_vl.observe.status import read_status

#: Of events and of skipped rows, the last so many are shown.
MAX_TABLE_ROWS = 1000


@dataclass
class RunFolder:
    """A run as its files tell it. `step` is the last one logged; `notes` tells a reader what is missing, torn or left out."""

    path: Path
    name: str
    metrics: list[dict[str, float | None]]
    config: dict[str, str]
    step: int
    state: str
    reason: str
    planned_steps: int | None
    environment: dict[str, str]
    events: list[dict[str, Any]]
    bad_rows: list[dict[str, Any]]
    baselines: dict[str, float]
    spans: dict[tuple[str, str], tuple[int, float]]  # (process, phase) → how often, and seconds in all
    notes: list[str]

    @property
    def validations(self) -> list[dict[str, Any]]:
        """{"step", "value", "error"} of every validation; see `standard_error`."""
        rows = [row for row in self.metrics if row.get("val/accuracy") is not None]
        return [{"step": r["step"], "value": r["val/accuracy"], "error": standard_error(r)} for r in rows]

    @property
    def event_counts(self) -> Counter[str]:
        return Counter(str(event.get("kind")) for event in self.events)

    def total(self, metric: str) -> float:
        """Sum over all steps."""
        return sum(row.get(metric) or 0.0 for row in self.metrics)

    def last(self, metric: str) -> str:
        """The newest value there is."""
        values = [row[metric] for row in self.metrics if row.get(metric) is not None]
        return f"{values[-1]:.4g}" if values else "–"


def read_run(path: Path) -> RunFolder:
    """Reads everything but the trajectories. Missing and broken files become notes.

    Raises:
        ValueError: the folder isn't there, or isn't a run's.
    """
    if not any((path / name).exists() for name in ("metrics.jsonl", "config.yaml", "trajectories")):
        raise ValueError(f"{path} is not a run's folder: it has no metrics.jsonl, config.yaml or trajectories")
    notes: list[str] = []
    rows = [row for row in _read_lines(path / "metrics.jsonl", notes) if type(row.get("step")) is int]
    by_step = {row["step"]: {k: v if is_number(v) else None for k, v in row.items()} for row in rows}
    config = flatten(_read_mapping(path / "config.yaml", yaml.safe_load, notes))
    baselines = _read_mapping(path / "baselines.json", json.loads, notes, expected=False)
    planned = config.get("runner.max_steps", "")
    status = read_status(path)
    return RunFolder(
        path=path,
        name=path.resolve().name,
        metrics=[by_step[step] for step in sorted(by_step)],
        config=config,
        step=max(by_step, default=0),
        state=str(status.get("state", "")),
        reason=str(status.get("reason", "")),
        planned_steps=int(planned) if planned.isdecimal() else None,
        environment=flatten(_read_mapping(path / "environment.json", json.loads, notes)),
        events=_newest(path / "events.jsonl", notes),
        bad_rows=_newest(path / "bad_rows.jsonl", notes),
        baselines={name.replace("_", " "): value for name, value in baselines.items() if is_number(value)},
        spans=_span_totals(path),
        notes=notes,
    )


def _span_totals(path: Path) -> dict[tuple[str, str], tuple[int, float]]:
    totals: dict[tuple[str, str], tuple[int, float]] = {}
    for row in read_spans(path):
        count, seconds = totals.get((row["process"], row["name"]), (0, 0.0))
        totals[row["process"], row["name"]] = count + row["count"], seconds + row["end"] - row["start"]
    return dict(sorted(totals.items(), key=lambda item: (item[0][0], -item[1][1])))


def standard_error(row: Mapping[str, float | None]) -> float | None:
    """Of `val/accuracy` p over `val/problems` n independent problems: √(p(1−p)/n)."""
    accuracy, problems = row.get("val/accuracy"), row.get("val/problems")
    if accuracy is None or not problems or not 0 <= accuracy <= 1:
        return None
    return math.sqrt(accuracy * (1 - accuracy) / problems)


def flatten(tree: Any, prefix: str = "") -> dict[str, str]:
    """Dotted name → value as text: {"a": {"b": None}, "c": [1]} gives {"a.b": "null", "c": "[1]"}."""
    if isinstance(tree, Mapping) and (tree or not prefix):
        parts = [flatten(value, f"{prefix}.{key}" if prefix else str(key)) for key, value in tree.items()]
        return {name: value for part in parts for name, value in part.items()}
    return {prefix: tree if isinstance(tree, str) else json.dumps(tree, ensure_ascii=False, default=str)}


def is_number(value: Any) -> bool:
    """Whether a value of a JSON line can be drawn: a finite number, no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _read_text(path: Path, notes: list[str], expected: bool) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        if expected:
            notes.append(f"{path.name} is missing.")
    except OSError as error:
        notes.append(f"{path.name} could not be read: {error}.")
    return None


def _read_lines(path: Path, notes: list[str], expected: bool = True) -> list[dict[str, Any]]:
    """As `observe.lines.read_steps`, but rows need no step, and what can't be read is noted."""
    rows, torn = [], 0
    for line in filter(str.strip, (_read_text(path, notes, expected) or "").split("\n")):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            torn += 1
    if torn:
        notes.append(f"{path.name}: {torn} torn line{'s' if torn > 1 else ''} left out.")
    return rows


def _read_mapping(path: Path, parse: Callable[[str], Any], notes: list[str], expected: bool = True) -> dict[str, Any]:
    text = _read_text(path, notes, expected)
    if text is None:
        return {}
    try:
        value = parse(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        value = str(error).splitlines()[0]
    if isinstance(value, dict):
        return value
    notes.append(f"{path.name} could not be read: {value or 'it is empty'}.")
    return {}


def _newest(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """The last lines of a log, newest first, their times as text."""
    rows = _read_lines(path, notes, expected=False)  # no such file: nothing happened
    if len(rows) > MAX_TABLE_ROWS:
        notes.append(f"{path.name}: the oldest {len(rows) - MAX_TABLE_ROWS:,} of {len(rows):,} lines are left out.")
    rows = rows[-MAX_TABLE_ROWS:][::-1]
    for row in rows:
        if is_number(row.get("time")) and abs(row["time"]) < 1e11:
            row["time"] = datetime.fromtimestamp(row["time"], UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return rows
