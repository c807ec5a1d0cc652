"""The log of what ends episodes: each fault once with the traceback of the user's code, and silently from then on.

The controller counts faults by reason and tells the counts after each step, so no more lines are needed.
"""

import logging
import re
import traceback
from pathlib import Path

from rlinf_vl.rollout.calls import described

log = logging.getLogger(__name__)
PACKAGE = str(Path(__file__).resolve().parents[1])


class FaultLog:
    """Faults that were logged, by their error's type and the line that raised it."""

    def __init__(self) -> None:
        self._known: set[tuple[object, ...]] = set()

    def add(self, problem_id: str, error: BaseException) -> None:
        """Log an error that ended an episode: as a warning if it is the first of its kind."""
        cause = error.__cause__ or error
        frames = [frame for frame in traceback.extract_tb(cause.__traceback__) if _is_users(frame.filename)]
        kind: tuple[object, ...] = (type(cause), re.sub(r"\d+", "", str(error)))
        if frames:
            kind = (type(cause), frames[-1].filename, frames[-1].lineno)
        if kind in self._known:
            log.debug("%s: %s", problem_id, described(error))
            return
        self._known.add(kind)
        lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames)] if frames else []
        trace = "".join([*lines, *traceback.format_exception_only(cause)]).rstrip() if frames else ""
        log.warning("%s: %s (told once)%s", problem_id, described(error), f"\n{trace}" if trace else "")


def _is_users(filename: str) -> bool:
    """Return whether a file is neither this package's nor a library's."""
    return not filename.startswith((PACKAGE, "<")) and "site-packages" not in filename and "/lib/python" not in filename
