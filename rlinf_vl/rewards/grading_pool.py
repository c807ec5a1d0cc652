"""The process that does the algebra of grading: what takes too long is killed with it.

Invariants kept here:
- The worker is a fresh interpreter, never a fork: it imports its own module and nothing of the caller's.
- It never outlives its parent: end of input ends it, and while it computes its processor-time limit does.
- Threads take turns; time counts from the moment the worker has the question.
"""

import atexit
import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

WALL_FACTOR = 4
"""On a busy machine an honest answer may take this much longer than its processor time."""

_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


class GradingPool:
    """One worker process, started on first use and replaced after an overrun or a crash.

    Args:
        limit_s: the worker's processor time for one question; beyond it, or beyond `WALL_FACTOR` times as much on the
            clock, the verdict is False.
        start_limit_s: time for the worker to start (imports), not counted in `limit_s`.
    """

    def __init__(self, limit_s: float = 1.5, start_limit_s: float = 120.0) -> None:
        self.limit_s, self.start_limit_s = limit_s, start_limit_s
        self._forget()
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self.close)

    def same(self, response: str, answer: str) -> bool:
        """Whether two normalised answers are the same by `rlinf_vl.rewards.comparison`, algebra included.

        Raises:
            RuntimeError: the worker can't be started.
        """
        question = json.dumps([response, answer]).encode() + b"\n"
        with self._lock:
            self._ensure_ready()
            try:
                self._process.stdin.write(question)
                self._process.stdin.flush()
                reply = self._read_line(WALL_FACTOR * self.limit_s)
            except OSError:
                reply = None
            if reply is None:
                self._kill()
                self._start()  # warms up while nobody waits
                return False
            return json.loads(reply)["same"]

    def close(self) -> None:
        """End the worker; the next question starts another."""
        with self._lock:
            self._kill()

    def _forget(self) -> None:
        """Begin anew; also in a forked child, whose copies of the parent's pipes must not be used."""
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._ready = False

    def _ensure_ready(self) -> None:
        if self._process is None or self._process.poll() is not None:
            self._kill()
            self._start()
        if self._ready:
            return
        reply = self._read_line(self.start_limit_s)
        error = "no reply" if reply is None else json.loads(reply).get("error")
        if error:
            self._kill()
            raise RuntimeError(f"the grading worker doesn't start: {error}")
        self._ready = True

    def _start(self) -> None:
        path = os.pathsep.join(filter(None, [str(_PACKAGE_ROOT), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rlinf_vl.rewards.math_worker", str(self.limit_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for the parent
        )

    def _kill(self) -> None:
        process, self._process, self._ready = self._process, None, False
        if process is not None:
            process.kill()
            process.wait()
            process.stdout.close()
            try:
                process.stdin.close()
            except OSError:  # unsent input
                pass

    def _read_line(self, seconds: float) -> bytes | None:
        """One line from the worker; None if it doesn't come in time or the worker is gone."""
        deadline, line = time.monotonic() + seconds, b""
        descriptor = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                return None
            chunk = os.read(descriptor, 65536)
            if not chunk:
                return None
            line += chunk
        return line
