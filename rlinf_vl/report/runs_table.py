"""The runs of a folder as a table for a terminal: `report results/`."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlinf_vl.observe.status import read_status
from rlinf_vl.report.run_folder import check_is_run, read_metrics

#: Heading, metric, and whether the best of the run is shown instead of the last.
COLUMNS = (
    ("reward", "reward/mean", False),
    ("accuracy", "reward/accuracy", False),
    ("val", "val/accuracy", False),
    ("best val", "val/accuracy", True),
)
HEADINGS = ("run", "state", "step", *(heading for heading, *_ in COLUMNS), "began")


def runs_in(folder: Path) -> list[Path]:
    """Return the runs in a folder that is no run itself, those that began last first; none where it is one."""
    if _is_run(folder) or not folder.is_dir():
        return []
    runs = [path for path in folder.iterdir() if path.is_dir() and _is_run(path)]
    return sorted(runs, key=lambda run: (-float(read_status(run).get("started") or 0), run.name))


def runs_table(runs: Sequence[Path]) -> str:
    """Return a table of runs, one a line: how each ended, how far it came and what it learned."""
    lines = [HEADINGS, *map(_line, runs)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)
    return "\n".join(padded)


def _line(run: Path) -> tuple[str, ...]:
    status = read_status(run)
    rows = read_metrics(run, [])
    figures = [_figure(rows, metric, is_best) for _, metric, is_best in COLUMNS]
    began = status.get("started")
    began_text = time.strftime("%Y-%m-%d %H:%M", time.localtime(began)) if began else ""
    step = str(rows[-1]["step"]) if rows else "0"
    total = status.get("total_steps")
    progress = f"{step}/{total}" if total else step
    return run.name, str(status.get("state", "")), progress, *figures, began_text


def _figure(rows: Sequence[dict[str, Any]], metric: str, is_best: bool) -> str:
    values = [row[metric] for row in rows if row.get(metric) is not None]
    if not values:
        return ""
    return f"{max(values) if is_best else values[-1]:.3f}"


def _is_run(path: Path) -> bool:
    try:
        check_is_run(path)
    except ValueError:
        return False
    return True
