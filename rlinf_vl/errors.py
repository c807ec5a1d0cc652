"""What ends a run without being a fault of the program."""

import re

from rlinf_vl.config.keys import ConfigError


class RunError(RuntimeError):
    """The run can't go on. The message says why, what was kept, and the way out: it needs no traceback."""


def reason_of(error: BaseException) -> str:
    """What went wrong, without where: of an error that Ray brought from another process, that error's own message."""
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
