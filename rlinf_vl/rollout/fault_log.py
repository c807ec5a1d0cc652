"""Logs the faults that end episodes: each kind once, with the traceback of the user's code.

Repetitions are logged at level DEBUG only, because the controller counts faults by reason and
reports the counts after each step.
"""

import logging
import re
import traceback
from collections.abc import Callable
from pathlib import Path

from rlinf_vl.rollout.calls import described

log = logging.getLogger(__name__)
PACKAGE = str(Path(__file__).resolve().parents[1])


class FaultLog:
    """The log of faults. A kind is an error's type and the line of user code that raised it.

    Args:
        first_report: whether no other process has reported a text (`first_report` of
            `rlinf_vl.runtime.ray_process`); the default knows of this process only.
    """

    def __init__(self, first_report: Callable[[str], bool] = lambda text: True) -> None:
        self._first_report = first_report
        self._logged: set[tuple[type, str]] = set()

    def add(self, problem_id: str, error: BaseException) -> None:
        """Log an error that ended an episode, as a warning if it is the first of its kind."""
        cause = error.__cause__ or error
        frames = [
            frame
            for frame in traceback.extract_tb(cause.__traceback__)
            if _is_users(frame.filename)
        ]
        # Without a line of user code, the message without its numbers serves as the kind.
        origin = re.sub(r"\d+", "", str(error))
        if frames:
            origin = f"{frames[-1].filename}:{frames[-1].lineno}"
        kind = (type(cause), origin)
        is_new = kind not in self._logged and self._first_report(f"{type(cause)} {origin}")
        self._logged.add(kind)
        if not is_new:
            log.debug("%s: %s", problem_id, described(error))
            return
        lines = (
            ["Traceback (most recent call last):\n", *traceback.format_list(frames)]
            if frames
            else []
        )
        trace = (
            "".join([*lines, *traceback.format_exception_only(cause)]).rstrip() if frames else ""
        )
        log.warning(
            "%s: %s (logged once)%s", problem_id, described(error), f"\n{trace}" if trace else ""
        )


def _is_users(filename: str) -> bool:
    """Return whether a file belongs neither to this package nor to a library."""
    return (
        not filename.startswith((PACKAGE, "<"))
        and "site-packages" not in filename
        and "/lib/python" not in filename
    )
