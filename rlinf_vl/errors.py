"""What ends a run without being a fault of the program."""


class RunError(RuntimeError):
    """The run can't go on. The message says why, what was kept, and the way out: it needs no traceback."""
