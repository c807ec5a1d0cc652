"""A run's progress in a notebook: one output of the cell, updated in place. No widgets: it stays in
the notebook's file."""

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
    """Return whether this process is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


class NotebookProgress:
    """A progress bar, the present phase, and a table of the last steps."""

    def __init__(self) -> None:
        # Every kernel has IPython, other processes need none.
        from IPython.display import (
            HTML,
            display,
        )

        self._rows: deque[dict[str, str]] = deque(maxlen=ROWS)
        self._html: Any = HTML
        self._output: Any = display(HTML(""), display_id=True)
        self._updated_s = 0.0

    def show(
        self, step: int, total: int, phase: str, figures: Mapping[str, str] | None = None
    ) -> None:
        """Update the output; `figures` of a step that has just ended, by the name of their
        column."""
        if figures is not None:
            self._rows.append({"step": str(step), **figures})
        # Phases change many times a second, and every update is sent to the browser.
        elif time.monotonic() - self._updated_s < PAUSE_S:
            return
        self._updated_s = time.monotonic()
        names = list(dict.fromkeys(name for row in self._rows for name in row))
        lines = []
        for row in self._rows:
            lines.append(_line("td", [row.get(name, "") for name in names]))
        table = f"<table>{_line('th', names)}{''.join(lines)}</table>" if lines else ""
        bar = f'<progress value="{step}" max="{total or 1}"></progress>'
        self._output.update(
            self._html(f"<div>{bar} step {step}/{total} &nbsp; {html.escape(phase)}</div>{table}")
        )

    def end(self, step: int, total: int, message: str) -> None:
        """Show the last message of the run."""
        self._updated_s = 0.0  # shown however short the pause was
        self.show(step, total, message)


def _line(tag: str, texts: list[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(text)}</{tag}>' for text in texts)}</tr>"
