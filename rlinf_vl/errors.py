"""Errors that end a run and are no fault of the program: they need no traceback."""

import difflib
import os
import re
import shlex
import sys
from collections.abc import Iterable, Sequence


class _WithoutTraceback:
    # IPython calls a method of this name to show an error.
    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows: the message alone, which names the remedy."""
        return [f"{type(self).__name__}: {self}"]


class ConfigError(_WithoutTraceback, ValueError):
    """Mistakes of the user, each in one line that names the key, its value and the remedy."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        text = (
            problems[0]
            if len(problems) == 1
            else "\n".join([f"{len(problems)} problems:", *problems])
        )
        super().__init__(text)


class RunError(_WithoutTraceback, RuntimeError):
    """The run can't go on. The message names the reason, what was saved, and the remedy."""


def reason_of(error: BaseException) -> str:
    """Return the message of an error without its traceback. For an error that Ray brought from
    another process, it is the message of the original."""
    cause = getattr(error, "cause", None)  # a RayTaskError has one
    if isinstance(cause, BaseException):
        return reason_of(cause)
    text = str(error).strip()
    if isinstance(error, RunError | ConfigError):
        return text
    # Errors of Ray have tracebacks in their messages; the last line "Name: …" begins the message.
    if "\n  File " in text:
        lines = text.splitlines()
        starts = [i for i, line in enumerate(lines) if re.match(r"[\w.]+(: |$)", line)]
        return "\n".join(lines[starts[-1] :]) if starts else lines[-1].strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def missing_package(error: ModuleNotFoundError) -> str | None:
    """Return which package this Python lacks and what to do; None for a module of rlinf_vl."""
    package = (error.name or "").partition(".")[0]
    if package in ("", "rlinf_vl"):
        return None
    lack = f"{package} is not installed in {sys.prefix}, whose Python runs this"
    environments = [name for name in (".venv", ".venv-sglang") if os.path.isdir(name)]
    if sys.prefix in map(os.path.abspath, environments):
        return f"{lack}; {pip_install(package)}"
    environment = next(iter(environments), ".venv")
    return f"{lack}; use the environment of rlinf_vl: source {environment}/bin/activate"


def pip_install(requirement: str) -> str:
    """Return the command that installs a requirement into the environment that runs this."""
    return f"{sys.executable} -m pip install {shlex.quote(requirement)}"


def never_reported(text: str) -> bool:
    """Return True: no other process has reported `text`, as a process on its own assumes.

    A worker of a run asks the other processes instead (`first_report` of
    `rlinf_vl.runtime.ray_process`), so that all workers together report an error once.
    """
    return True


def without_colors(text: str) -> str:
    """Return a text without the escape sequences that color it on a terminal."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def nearest(name: str, known_names: Iterable[str]) -> str:
    """Return " did you mean 'a'?" with the known name that is most like this one; "" if none is."""
    return did_you_mean(difflib.get_close_matches(name, list(known_names), n=1))


def did_you_mean(names: Sequence[str]) -> str:
    """Return the question, which begins with a blank; "" without names."""
    return f" did you mean {' or '.join(map(repr, names))}?" if names else ""
