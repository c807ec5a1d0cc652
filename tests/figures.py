"""Figures that tests measure for docs/models.md, kept in the file that RLINF_VL_FIGURES names: docs/models.json, to renew it."""

import json
import os
from pathlib import Path


def keep(family: str, column: str, *figures: float, limit: float) -> None:
    """Hold the figures of a cell to a limit, and keep them where that is asked for."""
    # Each by itself: `max` passes over a NaN that is not the first.
    assert all(figure <= limit for figure in figures), (family, column, figures)
    if path := os.environ.get("RLINF_VL_FIGURES"):
        file = Path(path)
        cells = json.loads(file.read_text()) if file.exists() else {}
        cells.setdefault(family, {})[column] = [float(f"{figure:.1e}") for figure in figures]
        file.write_text(json.dumps(cells, indent=2) + "\n")
