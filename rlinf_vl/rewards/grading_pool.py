"""Grading in worker processes: what takes too much time or memory is killed with its worker.

Invariants kept here:
- Every question has a worker of its own, forked from a server that has everything imported: callers wait for nobody
  else's question, and nothing that an answer does to its worker is there for the next.
- The server is a fresh interpreter, never a fork of the caller: it imports its own module and nothing of the caller's.
- Nothing outlives the caller: a closed socket ends the server, and its limits end a worker.
- No call waits for ever: a server that stands still is replaced.
"""

import atexit
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


class GradingError(Exception):
    """There is no verdict."""


class GradingTimeout(GradingError):
    """There is no verdict, since the worker reached a limit of time or memory."""


class GradingPool:
    """A server, started on first use and replaced after a crash, and its workers, one for each question under way.

    Args:
        limit_s: a worker's processor time; on a machine with a core to spare, that is its time on the clock.
        wall_limit_s: its time on the clock, whatever else the machine does.
        start_limit_s: time for the server to start (imports), not counted in the others.
    """

    def __init__(self, limit_s: float = 0.5, wall_limit_s: float = 5.0, start_limit_s: float = 120.0) -> None:
        self.limit_s, self.wall_limit_s, self.start_limit_s = limit_s, wall_limit_s, start_limit_s
        self._questions: socket.socket | None = None
        self._forget()
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self.close)

    def same(self, response: str, answer: str) -> bool:
        """Whether two normalised answers are the same by `rlinf_vl.rewards.comparison`; safe in any thread.

        Raises:
            GradingTimeout: the worker was ended by its limits, or the server doesn't react.
            GradingError: the worker died otherwise, and so did a second one.
            RuntimeError: the server can't be started.
        """
        question = json.dumps([response, answer]).encode()
        for _ in range(2):
            questions = self._server()
            begin = time.monotonic()
            try:
                reply, lost = self._ask(questions, question), False
            except OSError:  # the server is gone or stands still
                reply, lost = b"", True
            if reply == b"m":
                raise GradingTimeout(f"no verdict within the limit of memory: {response[:80]!r}")
            if reply:
                return reply == b"1"
            seconds = time.monotonic() - begin
            late = seconds > self.limit_s / 2  # the kernel's timers are not exact
            if lost or not late:
                self._drop(questions)
            if late:
                raise GradingTimeout(f"no verdict in {seconds:.1f} s: {response[:80]!r}")
        raise GradingError(f"the grading worker died twice: {response[:80]!r}")

    def close(self) -> None:
        """End the server; the next question starts another."""
        with self._lock:
            self._kill()

    def _ask(self, questions: socket.socket, question: bytes) -> bytes:
        """The worker's reply to one question; empty if it died without one."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                socket.send_fds(questions, [question], [theirs.fileno()])
            ours.settimeout(self.wall_limit_s + 0.5)  # the worker's own timer goes first
            return ours.recv(1)

    def _forget(self) -> None:
        """Begin anew; also in a forked child, which must not share the parent's server."""
        self._lock = threading.Lock()
        if self._questions is not None:
            self._questions.close()
        self._questions = self._process = None

    def _server(self) -> socket.socket:
        """The socket that takes questions, with a live server behind it."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._kill()
                self._start()
            assert self._questions is not None
            return self._questions

    def _drop(self, questions: socket.socket) -> None:
        """End the server behind this socket, unless another thread did."""
        with self._lock:
            if self._questions is questions:
                self._kill()

    def _start(self) -> None:
        questions, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._questions = questions
        path = os.pathsep.join(filter(None, [str(_PACKAGE_ROOT), os.environ.get("PYTHONPATH")]))
        limits = [str(self.limit_s), str(self.wall_limit_s)]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rlinf_vl.rewards.math_worker", *limits],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C is for the parent
            )
        questions.settimeout(self.start_limit_s)
        try:
            reply = questions.recv(4096)
        except OSError as e:
            reply = str(e).encode()
        if reply != b"ready":
            self._kill()
            raise RuntimeError(f"the grading worker doesn't start: {reply.decode() or 'it died'}")
        questions.settimeout(self.wall_limit_s)

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._questions is not None:
            self._questions.close()
        self._questions = self._process = None
