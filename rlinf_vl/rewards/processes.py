"""The processes in which users' reward functions run, with limits of time and memory.

A process is a fresh interpreter that imports the functions once and then answers calls, one at a
time, so that a function may keep state (a model, a cache). After a call that takes too long, a dead
process or an exception the answer has no verdict (`GradingError`); a dead process is replaced, and
all other calls go on.

Requests are pickled. Replies are JSON, since unpickling data of a user's process could run code.

Not pebble: it unpickles what a worker returns, and ends the worker alone, while the group killed
here includes what the function started.
"""

import atexit
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Protocol

from rlinf_vl.errors import never_reported
from rlinf_vl.rewards.forms import SIGNATURE, RewardFunction
from rlinf_vl.rewards.grading_pool import GradingError, GradingTimeout, limit_memory
from rlinf_vl.rewards.result import Answer, Result
from rlinf_vl.types import Problem
from rlinf_vl.user_code import end_with_parent, load_code

#: Seconds for a process to start, which imports the functions' files and all that they import.
START_TIMEOUT_S = 300.0
#: Seconds between two looks whether a process that computes is still there.
LOOK_S = 0.5
#: Memory that a process with functions of the user's may take beyond what it has when they are
#: imported, in GiB.
MEMORY_GB = 4.0
#: Largest number of tracebacks that a pool prints; equal errors are printed once.
MAX_TRACEBACKS = 10
#: Seconds of processor time per core beyond a call's limit, after which the kernel ends a process:
#: its parent, which should have done so, is dead.
ORPHAN_S = 60.0


@dataclass(frozen=True)
class Limits:
    """The limits of users' functions.

    Attributes:
        timeout_s: seconds for one call.
        memory_gb: address space of a process beyond its imports, in GiB.
        processes: largest number of processes.
    """

    timeout_s: float
    memory_gb: float
    processes: int


def load_function(name: str, kwargs: Mapping[str, Any], files: Mapping[str, str]) -> RewardFunction:
    """Return a user's function with its keywords. Raises CodeError: it can't be loaded."""
    function = load_code(name, {}, files, kind="reward function", signature=SIGNATURE)
    return RewardFunction(function, name, kwargs)


class UserFunctions(Protocol):
    """Runs users' reward functions, as `ProcessPool` does."""

    def __init__(
        self,
        functions: Sequence[tuple[str, Mapping[str, Any]]],
        files: Mapping[str, str],
        limits: Limits,
        first_report: Callable[[str], bool],
    ) -> None: ...
    def submit(
        self,
        function: int,
        problem: Problem,
        answers: Sequence[Answer],
        *,
        images: bool,
        together: bool,
    ) -> "list[Future[Result]]": ...
    def close(self) -> None: ...


class ProcessPool:
    """A pool of processes with the same functions, each started when it is first needed.

    Args:
        functions: the (name, kwargs) of each function.
        files: `runner.code_files`.
        limits: limits of the calls and the processes.
        first_report: as in `make_scorer`.
    """

    def __init__(
        self,
        functions: Sequence[tuple[str, Mapping[str, Any]]],
        files: Mapping[str, str],
        limits: Limits,
        first_report: Callable[[str], bool] = never_reported,
    ):
        self._first_report = first_report
        self._setup = pickle.dumps((list(functions), dict(files), limits))
        self._limits = limits
        self._threads = ThreadPoolExecutor(limits.processes, thread_name_prefix="reward process")
        self._thread_state = threading.local()  # `process`: the one process of a thread
        self._processes: weakref.WeakSet[_Process] = weakref.WeakSet()
        self._printed_errors: set[str] = set()  # errors whose tracebacks were printed
        self._printed_lock = threading.Lock()
        _pools.add(self)

    def submit(
        self,
        function: int,
        problem: Problem,
        answers: Sequence[Answer],
        *,
        images: bool,
        together: bool,
    ) -> "list[Future[Result]]":
        """Start to score answers; return the future of each.

        A future raises GradingError where the function reaches no verdict.

        Args:
            function: the function's position in `functions`.
            problem: the problem that was answered.
            answers: its answers.
            images: whether the function takes images; they are not sent otherwise.
            together: whether one call takes all answers.
        """
        problem = problem if images else replace(problem, images=())
        jobs = [answers] if together else [[answer] for answer in answers]
        futures: list[Future[Result]] = [Future() for _ in answers]
        for start, job in enumerate(jobs):
            job_futures = futures if together else futures[start : start + 1]
            self._threads.submit(
                self._run, pickle.dumps((function, problem, list(job))), job_futures
            )
        return futures

    def close(self) -> None:
        """End all processes and drop calls that have not begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in list(self._processes):
            process.end()

    def _run(self, request: bytes, futures: "Sequence[Future[Result]]") -> None:
        """Call a process and put its replies, or the error, into the futures."""
        futures = [future for future in futures if future.set_running_or_notify_cancel()]
        if not futures:
            return
        try:
            replies = self._call(request)
        except Exception as error:
            replies = [error] * len(futures)
        for future, reply in zip(futures, replies, strict=True):
            if isinstance(reply, Exception):
                future.set_exception(reply)
            else:
                future.set_result(reply)

    def _call(self, request: bytes) -> list[Result | Exception]:
        """Send a request to this thread's process, started or replaced first if need be."""
        process = getattr(self._thread_state, "process", None)
        if process is None or not process.alive:
            process = self._thread_state.process = _Process(self._setup, self._show_once)
            self._processes.add(process)
        return process.call(request, self._limits)

    def _show_once(self, error_text: str, trace: str) -> None:
        """Print an error's traceback to the log unless this pool or another has met it before."""
        with self._printed_lock:
            if error_text in self._printed_errors or len(self._printed_errors) >= MAX_TRACEBACKS:
                return
            self._printed_errors.add(error_text)
        if not self._first_report(error_text):
            return
        print(trace, end="", file=sys.stderr, flush=True)


# Weak, so that a scorer that nobody uses any more can be freed with its pool.
_pools: "weakref.WeakSet[ProcessPool]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End the processes of all pools with this process."""
    for pool in list(_pools):
        pool.close()


class _Process:
    """The parent's handle of one process. Raises RuntimeError: the process doesn't start."""

    def __init__(self, setup: bytes, show_once: Callable[[str, str], None]) -> None:
        self._show_once = show_once
        self._pipe, child_end = Pipe()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from rlinf_vl.rewards.processes import serve; serve({child_end.fileno()}, {os.getpid()})"
        )
        with child_end:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=2,  # a function's prints go to stderr, the log
                pass_fds=[child_end.fileno()],
                start_new_session=True,  # Ctrl-C reaches only the parent; `end` kills the group
            )
        self.alive = True
        first_reply = b"it died"
        try:
            self._pipe.send_bytes(setup)
            if self._wait_for_reply(START_TIMEOUT_S):
                first_reply = self._pipe.recv_bytes()
            else:
                first_reply = b"nothing within %d s" % START_TIMEOUT_S
        except (EOFError, OSError):
            pass
        if first_reply != b"ready":
            self.end()
            raise RuntimeError(
                "the process of reward functions doesn't start: "
                f"{first_reply.decode(errors='replace')}"
            )

    def call(self, request: bytes, limits: Limits) -> list[Result | Exception]:
        """Return the reply to each answer of a request.

        Raises:
            GradingError: the call took too long, or the process died.
        """
        begin = time.monotonic()
        try:
            self._pipe.send_bytes(request)
            # One second more, so that coroutines reach their own timeout first.
            if not self._wait_for_reply(limits.timeout_s + 1.0):
                self.end()
                raise GradingTimeout(f"no result within reward.timeout={limits.timeout_s:g} s")
            replies, tracebacks = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError, ValueError):
            self.end()
            raise GradingError(
                f"its process ended with {_status(self._process.returncode)} after "
                f"{time.monotonic() - begin:.1f} s"
            ) from None
        for error_text, trace in tracebacks.items():
            self._show_once(error_text, trace)
        if any(isinstance(reply, str) and reply.startswith("MemoryError") for reply in replies):
            self.end()  # the function may still hold the memory
        return [
            GradingError(reply) if isinstance(reply, str) else Result(*reply) for reply in replies
        ]

    def _wait_for_reply(self, timeout_s: float) -> bool:
        """Return whether a reply came in time. Raises EOFError: the process has ended."""
        deadline = time.monotonic() + timeout_s
        # What the function has forked may hold the pipe, so the process is watched as well.
        while not self._pipe.poll(min(LOOK_S, max(0.0, deadline - time.monotonic()))):
            if self._process.poll() is not None and not self._pipe.poll():
                raise EOFError
            if time.monotonic() >= deadline:
                return False
        return True

    def end(self) -> None:
        """Kill the process, and all processes that the function started."""
        self.alive = False
        self._pipe.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _status(code: int | None) -> str:
    """Return the words for an exit code; a negative one is a signal."""
    if code is not None and code < 0:
        return (
            f"signal {signal.Signals(-code).name}"
            if -code in set(signal.Signals)
            else f"signal {-code}"
        )
    return f"exit status {code}"


def serve(descriptor: int, parent: int) -> None:
    """Answer calls until the process `parent` closes its end of the pipe, or ends."""
    end_with_parent(parent)
    # Else a command that a function starts keeps the pipe open when this process has ended.
    os.set_inheritable(descriptor, False)
    pipe: Connection = Connection(descriptor)
    (entries, files, limits) = pickle.loads(pipe.recv_bytes())
    try:
        functions = [load_function(name, kwargs, files) for name, kwargs in entries]
    except Exception as error:
        pipe.send_bytes(f"{type(error).__name__}: {error}".encode())
        return
    # After the imports, so that memory_gb is for the calls alone.
    limit_memory(int(limits.memory_gb * 2**30))
    pipe.send_bytes(b"ready")
    sent_errors: set[str] = set()
    while True:
        try:
            number, problem, answers = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        _limit_time(limits.timeout_s)
        try:
            results: list[Any] = functions[number].results(problem, answers, limits.timeout_s)
        except BaseException as error:  # SystemExit, which a function must not end the process with
            results = [error] * len(answers)
        replies = [error_text(r, limits) if isinstance(r, BaseException) else r for r in results]
        tracebacks: dict[str, str] = {}
        for result, reply in zip(results, replies, strict=True):
            is_error = isinstance(result, BaseException)
            if is_error and reply not in sent_errors and len(sent_errors) < MAX_TRACEBACKS:
                sent_errors.add(reply)
                tracebacks[reply] = trace_of(result)
        pipe.send_bytes(json.dumps([replies, tracebacks]).encode())


def error_text(error: BaseException, limits: Limits) -> str:
    """Return an error's name and message, with the limit that was reached."""
    if isinstance(error, MemoryError):
        return (
            f"MemoryError: more than {limits.memory_gb:g} GiB beyond the imports; load what is "
            "large when the file is imported"
        )
    if isinstance(error, TimeoutError) and not str(error):
        return f"TimeoutError: no result within reward.timeout={limits.timeout_s:g} s"
    try:
        return f"{type(error).__name__}: {error}"[:500]
    except Exception:  # the error's own __str__ fails
        return type(error).__name__


def trace_of(error: BaseException) -> str:
    """Return an error's traceback from the user's function on.

    Return "" for an error of this package, whose message is enough.
    """
    package = str(Path(__file__).resolve().parents[1])
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(package):
        frame = frame.tb_next
    return "" if frame is None else "".join(traceback.format_exception(type(error), error, frame))


def _limit_time(timeout_s: float) -> None:
    """Bound the processor time of the next call, in case that the parent died and can't end it."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    max_s = int(time.process_time() + (timeout_s + ORPHAN_S) * (os.cpu_count() or 1))
    resource.setrlimit(
        resource.RLIMIT_CPU, (max_s if hard == resource.RLIM_INFINITY else min(max_s, hard), hard)
    )
