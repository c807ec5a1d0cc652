"""The spans of a run's processes as one file for a viewer of traces."""

import argparse
import json
from pathlib import Path
from typing import Any

from rlinf_vl.observe.spans import FOLDER, read_spans


def write_timeline(run_dir: Path, output: Path | None = None) -> Path:
    """Merge a run's spans into a file for chrome://tracing or ui.perfetto.dev (Chrome's Trace Event
    Format).

    It is `timeline.json` in the run's folder unless `output` names another. Clocks of several hosts
    are not aligned.

    Raises:
        ValueError: the folder has no spans.
    """
    rows = read_spans(run_dir)
    if not rows:
        raise ValueError(f"{run_dir / FOLDER} holds no spans; is {run_dir} the folder of a run?")
    start = min(row["start"] for row in rows)
    names = sorted({row["process"] for row in rows})
    processes = {name: i for i, name in enumerate(names)}
    # metadata events ("M") name the rows of the timeline, which are numbers otherwise
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": i, "tid": 0, "args": {"name": name}}
        for name, i in processes.items()
    ]
    for row in rows:  # complete events ("X"), microseconds since the first span
        event = {
            "ph": "X",
            "name": row["name"],
            "pid": processes[row["process"]],
            "tid": row["thread"],
        }
        event |= {
            "ts": round((row["start"] - start) * 1e6, 1),
            "dur": round((row["end"] - row["start"]) * 1e6, 1),
        }
        events.append(
            event | {"args": row["about"] | ({"count": row["count"]} if row["count"] > 1 else {})}
        )
    output = output or run_dir / "timeline.json"
    output.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return output


def main(arguments: argparse.Namespace) -> None:
    """Run the verb `timeline`: write the spans of a run's processes, and print the file's path."""
    print(write_timeline(arguments.run_dir, arguments.output))
