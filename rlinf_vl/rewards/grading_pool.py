"""Compare formulas in worker processes with limits of time and memory.

A server, a fresh interpreter that imports math-verify and nothing of the caller's, forks one worker
for each question. So callers don't wait for each other's questions, and a worker inherits nothing
from earlier questions.

Protocol: a question is one packet on the server's standard input, [response, answer] as JSON and
the socket for the reply. The reply is "1" (the same), "0" (not the same) or "m" (out of memory).

Kernel timers end a worker, even inside one big-number operation. The server ends with its caller; a
server that hangs is replaced.

Not pebble: its workers are faster on plain formulas (25 ms for 114 ms on two busy cores), but after
an answer that reached a limit a new one imports math-verify, so the next question waited 11 s (here
0.1 s); it limits no processor time, and starts a script without a main guard again.
"""

import gc
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

from rlinf_vl.rewards.comparison import same

#: Servers that a question is given to; one that ends before it replies says nothing of it.
MAX_SERVERS = 5
#: Seconds from the closing of an ending server's sockets to its end.
EXIT_S = 0.05
#: Address space of a worker beyond the server's (some 60 MiB of it resident).
MEMORY_BYTES = 100 << 20


class GradingError(Exception):
    """The grading reached no verdict."""


class GradingTimeout(GradingError):
    """The grading reached no verdict within the limits of time and memory."""


class GradingPool:
    """The client of a grading server, which starts on first use and is replaced after a crash.

    Args:
        limit_s: a worker's processor time, in seconds.
        wall_limit_s: a worker's time on the clock, however busy the machine is.
        start_limit_s: time for the server to start (imports), not counted in the other limits.
    """

    def __init__(
        self, limit_s: float = 0.5, wall_limit_s: float = 5.0, start_limit_s: float = 120.0
    ) -> None:
        self.limit_s = limit_s
        self.wall_limit_s = wall_limit_s
        self.start_limit_s = start_limit_s
        # Few questions run at once: wall_limit_s is meant for a worker that gets a processor.
        self._slots = threading.Semaphore((os.cpu_count() or 1) + 4)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._questions: socket.socket | None = None

    def same(self, response: str, answer: str) -> bool:
        """Return whether two normalised answers are the same by `rlinf_vl.rewards.comparison`.

        It is safe in any thread.

        Raises:
            GradingTimeout: the worker was ended by its limits, or the server hangs.
            GradingError: the worker died otherwise, and so did a second one; or `MAX_SERVERS`
                servers did.
            RuntimeError: the server can't be started.
        """
        question = json.dumps([response, answer]).encode()
        worker_deaths = 0
        for _ in range(MAX_SERVERS):
            # Before the clock starts: a question that queues is not late, and may get a new server.
            with self._slots:
                with self._lock:
                    questions = self._server()
                begin = time.monotonic()
                try:
                    reply = self._ask(questions, question)
                except TimeoutError:
                    self.close(questions)  # it hangs
                    raise GradingTimeout(
                        f"no verdict in {time.monotonic() - begin:.1f} s: {response[:80]!r}"
                    ) from None
                except OSError:
                    self.close(questions)
                    continue
                seconds = time.monotonic() - begin
            if reply == b"m":
                raise GradingTimeout(f"no verdict within the limit of memory: {response[:80]!r}")
            if reply:
                return reply == b"1"
            if self._is_gone(questions):
                continue
            # A worker that died early crashed and is tried again; one that died late hit a limit.
            # Half of the limit tells them apart, since the kernel's timers are not exact.
            if seconds > self.limit_s / 2:
                raise GradingTimeout(f"no verdict in {seconds:.1f} s: {response[:80]!r}")
            self.close(questions)
            worker_deaths += 1
            if worker_deaths == 2:
                raise GradingError(f"the grading worker died twice: {response[:80]!r}")
        raise GradingError(f"the grading server died {MAX_SERVERS} times: {response[:80]!r}")

    def _ask(self, questions: socket.socket, question: bytes) -> bytes:
        """Return the worker's reply; b"" if it died without one.

        Raises:
            TimeoutError: there is none in time.
            OSError: the server is gone, or takes no question: this one was not sent.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                try:
                    socket.send_fds(questions, [question], [theirs.fileno()])
                except TimeoutError as error:
                    raise ConnectionError("the server takes no question") from error
            # Longer, so that the worker's timer ends first.
            ours.settimeout(self.wall_limit_s + 0.5)
            return ours.recv(1)

    def _is_gone(self, questions: socket.socket) -> bool:
        """Return whether a server has ended: a question without a reply may be unread."""
        with self._lock:
            process, is_replaced = self._process, self._questions is not questions
        if is_replaced or process is None:
            return is_replaced
        try:
            # Its sockets close a moment before its end can be seen.
            process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _server(self) -> socket.socket:
        """Return the socket for questions; start the server first if none is alive."""
        if (
            self._questions is not None
            and self._process is not None
            and self._process.poll() is None
        ):
            return self._questions
        self._kill()
        self._questions, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = f"import sys; sys.path[:] = {sys.path!r}; from rlinf_vl.rewards.grading_pool import serve; serve"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"{code}({self.limit_s}, {self.wall_limit_s})"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the parent
            )
        self._questions.settimeout(self.start_limit_s)
        try:
            reply = self._questions.recv(4096)
        except OSError as e:
            reply = str(e).encode()
        if reply != b"ready":
            self._kill()
            raise RuntimeError(f"the grading worker doesn't start: {reply.decode() or 'it died'}")
        self._questions.settimeout(self.wall_limit_s)
        return self._questions

    def close(self, questions: socket.socket | None = None) -> None:
        """End the server; the next question starts a new one.

        With `questions` end only the server of that socket: another thread may have replaced it.
        """
        with self._lock:
            # A thread that saw a server fail must not kill the new one of another thread.
            if questions in (None, self._questions):
                self._kill()

    def _kill(self) -> None:
        if self._process is not None and self._questions is not None:
            self._questions.close()
            self._process.kill()
            self._process.wait()
        self._process = None
        self._questions = None


def serve(limit_s: float, wall_limit_s: float) -> None:
    """Answer the questions on standard input until the caller closes its end."""
    questions = socket.socket(fileno=0)
    try:  # import math-verify and fill the parser's caches, so that workers find both done
        same(r"\sqrt{12}+\sin(\frac{30\pi}{180})", r"\frac{1}{2}+2\cdot3^{1/2}", algebra=True)
        same("2(x+1)=y", "y=2x+2", algebra=True)
        same("2x+2y=1", "0.5=x+y", algebra=True)
    except Exception as e:
        questions.send(f"{type(e).__name__}: {e}".encode())
        return
    gc.freeze()  # workers share these pages as long as nothing writes to them
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    questions.send(b"ready")
    while True:
        # Two boxes of the greatest length with every character escaped fit into 64 KiB.
        question, sockets, *_ = socket.recv_fds(questions, 1 << 16, 1)
        if not sockets:
            return
        if os.fork() == 0:
            # An open copy would hide the server's death from the caller while a worker lives.
            questions.close()
            limit(limit_s, wall_limit_s)
            os.write(sockets[0], reply_to(question))
            os._exit(0)
        os.close(sockets[0])


def limit(limit_s: float, wall_limit_s: float) -> None:
    """End this process after its limits of processor time and time on the clock; bound its memory.

    A fork inherits the signal mask, so blocked timer signals are unblocked first.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    signal.setitimer(signal.ITIMER_REAL, wall_limit_s)
    limit_memory(MEMORY_BYTES)


def limit_memory(extra_bytes: int) -> None:
    """Bound this process's address space to `extra_bytes` above its present size; write no core."""
    with open("/proc/self/statm") as f:
        memory = int(f.read().split()[0]) * resource.getpagesize() + extra_bytes
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(
        resource.RLIMIT_AS, (memory if hard == resource.RLIM_INFINITY else min(memory, hard), hard)
    )
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def reply_to(question: bytes) -> bytes:
    """Return the reply of one question: b"1", b"0" or b"m"; any error but of memory is b"0"."""
    try:
        return b"1" if same(*json.loads(question), algebra=True) else b"0"
    except MemoryError:
        return b"m"
    except Exception:  # RecursionError too: an answer that can't be parsed is wrong
        return b"0"
