"""Files of a run's folder, read as far as they can be, with notes on the rest."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from rlinf_vl.runtime.files import read_lines


def read_metrics(path: Path, notes: list[str]) -> list[dict[str, float | None]]:
    """Return a row for each step, in order; None for values that are no finite number."""
    rows = [
        row for row in read_records(path / "metrics.jsonl", notes) if type(row.get("step")) is int
    ]
    by_step = {}  # of a step that is there twice, the later line counts
    for row in rows:
        by_step[row["step"]] = {
            name: value if is_number(value) else None for name, value in row.items()
        }
    return [by_step[step] for step in sorted(by_step)]


def read_records(path: Path, notes: list[str], expected: bool = True) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines, with a note on torn lines."""
    rows, torn = read_or_note(path, read_lines, ([], 0), notes, expected)
    if torn:
        notes.append(f"{path.name}: {torn} torn line{'s' if torn > 1 else ''} left out.")
    return rows


def read_or_note(
    path: Path, read: Callable[[Path], Any], default: Any, notes: list[str], expected: bool = True
) -> Any:
    """Return the result of `read` for a file; the default, and a note, if it fails or (if
    `expected`) the file is missing."""
    try:
        return read(path)
    except FileNotFoundError:
        notes += [f"{path.name} is missing."] * expected
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        notes.append(f"{path.name} could not be read: {str(error).splitlines()[0]}.")
    return default


def flatten(tree: Any, prefix: str = "") -> dict[str, str]:
    """Return dotted name → value as text.

    {"a": {"b": None}, "c": [1]} gives {"a.b": "null", "c": "[1]"}.
    """
    if isinstance(tree, Mapping) and (tree or not prefix):
        parts = [
            flatten(value, f"{prefix}.{key}" if prefix else str(key)) for key, value in tree.items()
        ]
        return {name: value for part in parts for name, value in part.items()}
    return {
        prefix: tree if isinstance(tree, str) else json.dumps(tree, ensure_ascii=False, default=str)
    }


def is_number(value: Any) -> bool:
    """Return whether a value of a JSON line is a finite number, and not a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
