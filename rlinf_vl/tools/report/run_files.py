"""The files of a run's folder, trajectories aside, as far as they can be read, and notes on the
others."""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from rlinf_vl.extras.eval.figures import render
from rlinf_vl.observe.alarms import ALARMS, OVER
from rlinf_vl.observe.metrics_file import (
    flatten,
    is_number,
    read_metrics,
    read_or_note,
    read_records,
)
from rlinf_vl.observe.replay_file import FOLDER, SUFFIX
from rlinf_vl.observe.spans import read_spans
from rlinf_vl.observe.status import read_status

#: Rows at most of the table of events, and of that of skipped rows: the newest ones.
MAX_TABLE_ROWS = 1000
#: Replay files that the summary names, the newest ones.
SHOWN_REPLAYS = 3
#: A run's folder has at least one of these.
RUN_FILES = ("metrics.jsonl", "config.yaml", "status.json", "trajectories")


@dataclass
class RunFiles:
    """A run as its files describe it. `notes` list the files that are missing, torn or left out."""

    path: Path
    name: str
    metrics: list[dict[str, float | None]]
    config: dict[str, str]
    state: str
    reason: str
    planned_steps: int | None
    environment: dict[str, str]
    events: list[dict[str, Any]]
    bad_rows: list[dict[str, Any]]
    baselines: dict[str, float]
    spans: dict[tuple[str, str], tuple[int, float]]  # (process, phase) → count, total seconds
    evaluation: str  # tables, where the run is an evaluation
    notes: list[str]

    @property
    def step(self) -> int:
        """Return the last step logged."""
        return int(self.metrics[-1]["step"] or 0) if self.metrics else 0

    @property
    def validations(self) -> list[dict[str, Any]]:
        """Return {"step", "value", "error"} of every validation; see `standard_error`."""
        rows = [row for row in self.metrics if row.get("val/accuracy") is not None]
        return [
            {"step": r["step"], "value": r["val/accuracy"], "error": standard_error(r)}
            for r in rows
        ]

    @property
    def best_validation(self) -> dict[str, Any] | None:
        """Return the latest of the best validations; None before the first one."""
        return max(self.validations, key=lambda row: (row["value"], row["step"]), default=None)

    @property
    def no_events(self) -> str:
        """Return the sentence that stands in place of the events of a run that recorded none."""
        failures = int(self.total("rollout/errors") + self.total("val/errors"))
        if self.state in ("failed", "gone", "stopped"):
            reason = f": {self.reason.splitlines()[0]}" if self.reason else ""
            ending = {"failed": "failed", "stopped": "was stopped", "gone": "ended without a word"}[
                self.state
            ]
            return (
                f"The run {ending} at step {self.step}{reason}. No event was recorded before that."
            )
        if failures:
            return f"No event was recorded, but {failures:,} answers failed: see their errors among the trajectories."
        if not self.step:
            return "No event is recorded, and no step is done yet."
        return "Nothing happened beside the steps: no restart, no lost group, no skipped step."

    @property
    def alarms(self) -> list[dict[str, Any]]:
        """Return the newest event of each kind of alarm; `over` says when it was over, "" that it
        holds."""
        # `events` is newest first; reversed, the newest event of a kind replaces the older ones
        newest = {event.get("kind"): event for event in reversed(self.events)}
        alarms = []
        for alarm in ALARMS:
            if event := newest.get(alarm.kind):
                end = newest.get(alarm.kind + OVER, {})
                is_over = (end.get("step") or -1) > (event.get("step") or -1)
                alarms.append(event | {"over": end.get("message", "") if is_over else ""})
        return alarms

    @property
    def replays(self) -> list[Path]:
        """Return the newest files of steps that were written for `rlinf-vl replay`, newest first."""
        files = (self.path / FOLDER).glob(f"*{SUFFIX}")
        return sorted(files, key=lambda file: file.stat().st_mtime, reverse=True)[:SHOWN_REPLAYS]

    @property
    def event_counts(self) -> Counter[str]:
        return Counter(str(event.get("kind")) for event in self.events)

    def total(self, metric: str) -> float:
        """Return a metric's sum over all steps."""
        return sum(row.get(metric) or 0.0 for row in self.metrics)

    def last(self, metric: str) -> str:
        """Return a metric's newest value as text."""
        values = [row[metric] for row in self.metrics if row.get(metric) is not None]
        return f"{values[-1]:.4g}" if values else "–"


def check_is_run(path: Path) -> None:
    """Raise ValueError for a folder that isn't there, or isn't a run's."""
    if not any((path / name).exists() for name in RUN_FILES):
        raise ValueError(
            f"{path} is not a run's folder: it has no {', '.join(RUN_FILES[:-1])} or "
            f"{RUN_FILES[-1]}"
        )


def read_run(path: Path) -> RunFiles:
    """Read everything but the trajectories. Missing and broken files become notes.

    Raises:
        ValueError: the folder isn't there, or isn't a run's.
    """
    check_is_run(path)
    notes: list[str] = []
    metrics = read_metrics(path, notes)
    config = flatten(_mapping(path / "config.yaml", yaml.safe_load, notes))
    baselines = _mapping(path / "baselines.json", json.loads, notes, expected=False)
    planned = config.get("runner.max_steps", "")
    status = read_status(path)
    return RunFiles(
        path=path,
        name=path.resolve().name,
        metrics=metrics,
        config=config,
        state=str(status.get("state", "")),
        reason=str(status.get("reason", "")),
        planned_steps=int(planned) if planned.isdecimal() else None,
        environment=flatten(_mapping(path / "environment.json", json.loads, notes)),
        events=_newest(path / "events.jsonl", notes),
        bad_rows=_newest(path / "bad_rows.jsonl", notes),
        baselines={
            name.replace("_", " "): value for name, value in baselines.items() if is_number(value)
        },
        spans=_span_totals(path),
        evaluation=_evaluation(path / "eval.json", notes),
        notes=notes,
    )


def _span_totals(path: Path) -> dict[tuple[str, str], tuple[int, float]]:
    """Return (process, phase) → count and total seconds, by process, the longest phase first."""
    totals: dict[tuple[str, str], tuple[int, float]] = {}
    for row in read_spans(path):
        count, seconds = totals.get((row["process"], row["name"]), (0, 0.0))
        totals[row["process"], row["name"]] = (
            count + row["count"],
            seconds + row["end"] - row["start"],
        )
    return dict(sorted(totals.items(), key=lambda item: (item[0][0], -item[1][1])))


def standard_error(row: Mapping[str, float | None]) -> float | None:
    """Return the standard error of `val/accuracy` p over `val/problems` n independent problems:
    √(p(1−p)/n)."""
    accuracy, problems = row.get("val/accuracy"), row.get("val/problems")
    if accuracy is None or not problems or not 0 <= accuracy <= 1:
        return None
    return math.sqrt(accuracy * (1 - accuracy) / problems)


def _evaluation(path: Path, notes: list[str]) -> str:
    """Return the figures of `eval.json` as tables of text; "" without such a file."""
    figures = _mapping(path, json.loads, notes, expected=False)
    try:
        return render(figures) if figures else ""
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        notes.append(f"{path.name} does not hold an evaluation: {type(error).__name__}: {error}.")
        return ""


def _mapping(
    path: Path, parse: Callable[[str], Any], notes: list[str], expected: bool = True
) -> dict[str, Any]:
    """Return a file's content, which must be a mapping; empty, with a note, if it can't be read."""

    def read(path: Path) -> dict[str, Any]:
        value = parse(path.read_text(encoding="utf-8", errors="replace"))
        if not isinstance(value, dict):
            raise ValueError(str(value) if value else "it is empty")
        return value

    return read_or_note(path, read, {}, notes, expected)


def _newest(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Return the last lines of a log, newest first, their times as text."""
    rows = read_records(path, notes, expected=False)  # without the file nothing happened
    if len(rows) > MAX_TABLE_ROWS:
        notes.append(
            f"{path.name}: the oldest {len(rows) - MAX_TABLE_ROWS:,} of {len(rows):,} lines are "
            "left out."
        )
    rows = rows[-MAX_TABLE_ROWS:][::-1]
    for row in rows:
        # a broken time may be too large for datetime
        if is_number(row.get("time")) and abs(row["time"]) < 1e11:
            row["time"] = datetime.fromtimestamp(row["time"], UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return rows
