"""Ends a process with the one that started it."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the process `parent`, which started it, ends.

    It does so at the end of the thread that started it, too.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    # It may have ended before.
    if os.getppid() != parent:
        os._exit(0)
