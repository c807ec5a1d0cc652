"""Ends a process of users' code with the one that started it."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the process `parent`, which started it, ends.

    It does so at the end of the thread that started it, too.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # It may have ended before.
    if os.getppid() != parent:
        os._exit(0)
