"""Describes the faults that end episodes, and logs each kind once.

Repetitions are logged at level DEBUG only, because the controller counts faults by reason and
reports the counts after each step.
"""

import logging
import re
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from traceback import FrameSummary
from typing import TypeAlias

from rlinf_vl.data.unusable import shorten
from rlinf_vl.errors import never_reported

log = logging.getLogger(__name__)
PACKAGE = str(Path(__file__).resolve().parents[2])
#: Limit on the characters of an error in a message.
MAX_ERROR_LENGTH = 500
#: File, line number, function and text of a line of code.
Frame: TypeAlias = tuple[str, int | None, str, str | None]


class RolloutFault(RuntimeError):
    """The engine or the environment failed, not the row.

    The message is "kind: reason"; the kind is `ENGINE_FAULT` or `ENVIRONMENT_FAULT`.
    """


class UserCodeError(Exception):
    """An error of users' code in another process, with what is left of it after the way here.

    Attributes:
        kind: the name of its type.
        frames: the lines of users' code that it came through.
        message: its message, as Python prints it.
    """

    def __init__(self, text: str, kind: str, message: str, frames: Sequence[Frame]) -> None:
        super().__init__(text, kind, message, frames)
        self.text, self.kind, self.message, self.frames = text, kind, message, frames

    def __str__(self) -> str:
        return self.text

    @classmethod
    def of(cls, error: BaseException) -> "UserCodeError":
        """Return what is sent of an error."""
        message = "".join(traceback.format_exception_only(error))
        return cls(error_text(error), type(error).__name__, message, _user_frames(error))


def error_text(error: BaseException) -> str:
    """Return an error's type and message, shortened to `MAX_ERROR_LENGTH` characters."""
    if isinstance(error, UserCodeError):
        return error.text
    try:
        return shorten(f"{type(error).__name__}: {error}", MAX_ERROR_LENGTH)
    except Exception:  # the `__str__` of a user's error may fail
        return type(error).__name__


class FaultLog:
    """The log of faults. A kind is an error's type and the line of user code that raised it.

    Args:
        first_report: whether no other process has reported a text.
    """

    def __init__(self, first_report: Callable[[str], bool] = never_reported) -> None:
        self._first_report = first_report
        self._logged: set[tuple[str, str]] = set()

    def add(self, problem_id: str, error: BaseException) -> None:
        """Log an error that ended an episode, as a warning if it is the first of its kind."""
        # A fault is raised from the error of the user's code.
        cause = error.__cause__ or error
        if not isinstance(cause, UserCodeError):
            cause = UserCodeError.of(cause)
        frames = cause.frames
        # Without a line of user code, the message without its numbers serves as the kind.
        origin = re.sub(r"\d+", "", str(error))
        if frames:
            filename, line, *_ = frames[-1]
            origin = f"{filename}:{line}"
        is_known = (cause.kind, origin) in self._logged
        self._logged.add((cause.kind, origin))
        # Other processes are asked last, because that is a call over the network.
        if is_known or not self._first_report(f"{cause.kind} {origin}"):
            log.debug("%s: %s", problem_id, error_text(error))
            return
        trace = ""
        if frames:
            # The frames of this package would hide the one line that the user can mend.
            summaries = [FrameSummary(name, line, f, line=text) for name, line, f, text in frames]
            lines = ["Traceback (most recent call last):\n", *traceback.format_list(summaries)]
            trace = "\n" + "".join([*lines, cause.message]).rstrip()
        log.warning("%s: %s (logged once)%s", problem_id, error_text(error), trace)


def _user_frames(error: BaseException) -> list[Frame]:
    """Return the frames of users' code through which an error came."""
    frames = traceback.extract_tb(error.__traceback__)
    return [(f.filename, f.lineno, f.name, f.line) for f in frames if _is_users(f.filename)]


def _is_users(filename: str) -> bool:
    """Return whether a file belongs neither to this package nor to a library."""
    return (
        not filename.startswith((PACKAGE, "<"))
        and "site-packages" not in filename
        and "/lib/python" not in filename
    )
