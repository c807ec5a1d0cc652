"""What ends a run without being a fault of the program."""

import difflib
import re
from collections.abc import Iterable, Sequence


class _Told:
    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the message, which says what to do."""
        return [f"{type(self).__name__}: {self}"]


class ConfigError(_Told, ValueError):
    """Mistakes of the user: every problem found, each naming the key, its value and the way out, on one line."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        text = problems[0] if len(problems) == 1 else "\n".join([f"{len(problems)} problems:", *problems])
        super().__init__(text)


class RunError(_Told, RuntimeError):
    """The run can't go on. The message says why, what was saved, and the way out: it needs no traceback."""


def reason_of(error: BaseException) -> str:
    """The message of an error without its traceback; of an error that Ray brought from another process, the original's."""
    cause = getattr(error, "cause", None)  # a RayTaskError's
    if isinstance(cause, BaseException):
        return reason_of(cause)
    text = str(error).strip()
    if isinstance(error, RunError | ConfigError):
        return text
    if "\n  File " in text:  # Ray's errors have tracebacks in their messages
        lines = text.splitlines()
        ends = [i for i, line in enumerate(lines) if re.match(r"[\w.]+(: |$)", line)]
        return "\n".join(lines[ends[-1] :]) if ends else lines[-1].strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def without_colors(text: str) -> str:
    """Return a text without the escape sequences that color it on a terminal."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def nearest(name: str, known: Iterable[str]) -> str:
    """ " did you mean 'a'?" of the one known name that looks most like this one; "" if none does."""
    return did_you_mean(difflib.get_close_matches(name, list(known), n=1))


def did_you_mean(names: Sequence[str]) -> str:
    """The question, which begins with a blank; "" without names."""
    return f" did you mean {' or '.join(map(repr, names))}?" if names else ""
