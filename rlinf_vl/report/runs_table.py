"""The runs of a folder as a table for a terminal: `report results/`."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlinf_vl.observe.status import read_status
from rlinf_vl.report.run_files import check_is_run, read_metrics


class Column(NamedTuple):
    """A column of figures: the last value of each run, or its best."""

    heading: str
    metric: str
    is_best: bool = False


COLUMNS = [
    Column("reward", "reward/mean"),
    Column("accuracy", "reward/accuracy"),
    Column("val", "val/accuracy"),
    Column("best val", "val/accuracy", is_best=True),
]
HEADINGS = ["run", "state", "step", *(column.heading for column in COLUMNS), "began"]


def runs_in(folder: Path) -> list[Path]:
    """Return the runs in a folder, those that began last first; none where the folder is itself a
    run's."""
    if _is_run(folder) or not folder.is_dir():
        return []
    runs = [path for path in folder.iterdir() if path.is_dir() and _is_run(path)]
    return sorted(runs, key=lambda run: (-float(read_status(run).get("started") or 0), run.name))


def runs_table(runs: Sequence[Path]) -> str:
    """Return a table of runs, one a line: its state, its steps and its figures."""
    lines = [HEADINGS, *map(_line, runs)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    padded_lines = []
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        padded_lines.append("  ".join(cells).rstrip())
    return "\n".join(padded_lines)


def _line(run: Path) -> list[str]:
    """Return the cells of a run."""
    status = read_status(run)
    rows = read_metrics(run, [])
    figures = [_figure(rows, column) for column in COLUMNS]
    started_s = status.get("started")  # Unix seconds
    began_text = time.strftime("%Y-%m-%d %H:%M", time.localtime(started_s)) if started_s else ""
    step = str(rows[-1]["step"]) if rows else "0"
    total = status.get("total_steps")
    progress = f"{step}/{total}" if total else step
    return [run.name, str(status.get("state", "")), progress, *figures, began_text]


def _figure(rows: Sequence[dict[str, Any]], column: Column) -> str:
    """Return a run's figure; "" if it has not logged the metric."""
    values = [row[column.metric] for row in rows if row.get(column.metric) is not None]
    if not values:
        return ""
    return f"{max(values) if column.is_best else values[-1]:.3f}"


def _is_run(path: Path) -> bool:
    try:
        check_is_run(path)
    except ValueError:
        return False
    return True
