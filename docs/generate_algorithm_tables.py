"""Writes the tables of docs/algorithms.md from the files of the built-in losses and advantage
estimators: `python docs/generate_algorithm_tables.py`. A test compares the page with it."""

import inspect
import re
from pathlib import Path

from rlinf_vl.config.algorithm_files import BuiltIn, built_ins

PAGE = Path(__file__).with_name("algorithms.md")


def render(page: str) -> str:
    """Return the page with the rows of its tables written anew, those below each marker."""
    for folder in ("estimators", "losses"):
        rows = "".join(row(name, built_in) for name, built_in in built_ins(folder).items())
        table = re.compile(rf"(<!-- {folder}: .*-->\n\n\|.*\n\|.*\n)(?:\|.*\n)*")
        page = table.sub(lambda match, rows=rows: match[1] + rows, page)
    return page


def row(name: str, built_in: BuiltIn) -> str:
    """Return a table row: name, formula, keys that it sets, source."""
    paragraphs = re.split(r"\n\n(?=\S)|\n\n(?=    )", inspect.cleandoc(built_in.docstring))
    formula = next(text for text in paragraphs if text.startswith("    "))
    defaults = "; ".join(f"`{key}: {value}`" for key, value in built_in.defaults.items())
    cells = (
        f"`{name}`",
        formula,
        defaults.replace("True", "true").replace("False", "false"),
        paragraphs[-1],
    )
    return f"| {' | '.join(' '.join(cell.split()) for cell in cells)} |\n"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
