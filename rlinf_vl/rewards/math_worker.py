"""The grading server: for each question it forks a worker that answers it and ends (run by `GradingPool`).

A question is a packet on the socket that is standard input: [response, answer] as JSON, and with it the socket for the
reply: "1" or "0", or "m" where memory doesn't suffice. Timers of the kernel's end a worker that takes too long, even
while Python is stuck in one big-number operation and whether or not anybody still waits for it.
"""

import gc
import json
import os
import resource
import signal
import socket
import sys

from rlinf_vl.rewards.algebra import algebra
from rlinf_vl.rewards.comparison import same

MEMORY_BYTES = 100 << 20
"""Address space that a worker may take beyond what the server has (some 60 MiB of it resident)."""


def main(limit_s: float, wall_limit_s: float) -> None:
    """Answer questions until the other end is closed, each within `limit_s` of processor time and `wall_limit_s`."""
    questions = socket.socket(fileno=0)
    try:  # imports, and fills the parser's caches
        algebra(r"\sqrt{12}+\sin(\frac{30\pi}{180})", r"\frac{1}{2}+2\cdot3^{1/2}")
        algebra("2(x+1)=y", "y=2x+2")
    except Exception as e:
        questions.send(f"{type(e).__name__}: {e}".encode())
        return
    gc.freeze()  # workers share these pages as long as nothing writes to them
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    questions.send(b"ready")
    while True:
        question, sockets, *_ = socket.recv_fds(questions, 1 << 16, 1)  # two boxes, all escaped, are shorter
        if not sockets:
            return
        if os.fork() == 0:
            questions.close()  # or the server's death would go unnoticed while a worker lives
            _limit(limit_s, wall_limit_s)
            os.write(sockets[0], _answer(question))
            os._exit(0)
        os.close(sockets[0])


def _limit(limit_s: float, wall_limit_s: float) -> None:
    for timer, seconds, end in (
        (signal.ITIMER_PROF, limit_s, signal.SIGPROF),
        (signal.ITIMER_REAL, wall_limit_s, signal.SIGALRM),
    ):
        signal.signal(end, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [end])
        signal.setitimer(timer, seconds)
    with open("/proc/self/statm") as f:
        limit = int(f.read().split()[0]) * resource.getpagesize() + MEMORY_BYTES
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _answer(question: bytes) -> bytes:
    try:
        response, answer = json.loads(question)
        return b"1" if same(response, answer, algebra) else b"0"
    except MemoryError:
        return b"m"
    except Exception:  # RecursionError too: what can't be understood is wrong
        return b"0"


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]))
