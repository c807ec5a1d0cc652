"""A run's progress in a notebook: one output of the cell, updated in place. No widgets: it stays in the notebook's file."""

import html
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

#: Seconds between two updates of the same step.
PAUSE_S = 0.2
#: Steps shown below the bar.
ROWS = 10


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


class NotebookProgress:
    """A bar, what is happening now, and a table of the last steps."""

    def __init__(self) -> None:
        from IPython.display import HTML, display  # a kernel has it

        self._rows: deque[dict[str, str]] = deque(maxlen=ROWS)
        self._html: Any = HTML
        self._output: Any = display(HTML(""), display_id=True)
        self._shown = 0.0

    def show(self, step: int, total: int, phase: str, figures: Mapping[str, str] | None = None) -> None:
        """`figures`: of a step that has just ended, by the name of their column."""
        if figures is not None:
            self._rows.append({"step": str(step), **figures})
        elif time.monotonic() - self._shown < PAUSE_S:
            return
        self._shown = time.monotonic()
        names = list(dict.fromkeys(name for row in self._rows for name in row))
        lines = [_line("td", [row.get(name, "") for name in names]) for row in self._rows]
        table = f"<table>{_line('th', names)}{''.join(lines)}</table>" if lines else ""
        bar = f'<progress value="{step}" max="{total or 1}"></progress>'
        self._output.update(self._html(f"<div>{bar} step {step}/{total} &nbsp; {html.escape(phase)}</div>{table}"))

    def end(self, step: int, total: int, said: str) -> None:
        self._shown = 0.0
        self.show(step, total, said)


def _line(tag: str, texts: list[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(text)}</{tag}>' for text in texts)}</tr>"
