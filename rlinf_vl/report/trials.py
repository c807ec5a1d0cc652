"""The trials of a search, as `sweep.json` has them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf_vl.config.sweeps import SWEEP_FILE

#: Characters of a number that is shown with all its digits.
LONGEST_NUMBER = 8


@dataclass(frozen=True)
class Trial:
    """A trial of a search.

    Attributes:
        state: running, complete or failed.
        objective: mean over seeds of the metric that is searched for; None unless complete.
    """

    number: int
    state: str
    objective: float | None

    @property
    def rank(self) -> float:
        """A number that is lower for a better trial; trials without an objective come last."""
        return float("inf") if self.objective is None else -self.objective


def read_sweep_file(folder: Path) -> dict[str, Any]:
    """Return the content of `sweep.json`; empty where there is none."""
    file = folder / SWEEP_FILE
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def trials_in(sweep: dict[str, Any]) -> dict[int, Trial]:
    """Return number → trial, of the content of `sweep.json`; empty for a sweep that is no search."""
    return {
        record["trial"]: Trial(record["trial"], record["state"], record["objective"])
        for record in sweep.get("trials", [])
    }


def short_number(value: str) -> str:
    """Return a number that a search has drawn with four digits; any other text as it is."""
    if len(value) <= LONGEST_NUMBER:
        return value
    try:
        return f"{float(value):.4g}"
    except ValueError:
        return value
