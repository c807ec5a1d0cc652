"""Reward functions of users, in processes of their own with limits of time and memory.

A process is a fresh interpreter that imports the functions once and then answers calls, one at a time, so that what a function keeps
(a model, a cache) stays. A call that takes too long, a process that dies, an exception: the answer has no verdict (`GradingError`),
the process is replaced if need be, and everybody else goes on. Requests are pickled (by us), replies are JSON (of users' processes).
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
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from rlinf_vl.code import load_code
from rlinf_vl.rewards.forms import SIGNATURE, RewardFunction
from rlinf_vl.rewards.grading_pool import GradingError, GradingTimeout, limit_memory
from rlinf_vl.rewards.result import Answer, Result
from rlinf_vl.types import Problem

#: Seconds for a process to start: to import what the functions' files import.
START_S = 300.0
#: Tracebacks of functions that are printed, each error once for all processes of a pool.
MOST_TRACEBACKS = 10
#: Seconds of processor time, on each core, after which a process ends itself although nobody has ended it: its parent is dead.
ORPHAN_S = 60.0


@dataclass(frozen=True)
class Limits:
    timeout_s: float
    memory_gb: float
    processes: int


def load_function(name: str, kwargs: Mapping[str, Any], files: Mapping[str, str]) -> RewardFunction:
    """A user's function. Raises CodeError."""
    found = load_code(name, {}, files, kind="reward function", signature=SIGNATURE)
    return RewardFunction(found, name, kwargs)


class ProcessPool:
    """Processes with the same functions; started when there is work for one more.

    Args:
        functions: (name, kwargs) of each.
        files: `runner.code_files`.
    """

    def __init__(self, functions: Sequence[tuple[str, Mapping[str, Any]]], files: Mapping[str, str], limits: Limits):
        self._setup = pickle.dumps((list(functions), dict(files), limits))
        self._limits = limits
        self._threads = ThreadPoolExecutor(limits.processes, thread_name_prefix="reward process")
        self._own = threading.local()
        self._processes: weakref.WeakSet[_Process] = weakref.WeakSet()
        self._shown: set[str] = set()  # errors whose tracebacks were printed
        self._shown_lock = threading.Lock()
        _pools.add(self)

    def submit(
        self, function: int, problem: Problem, answers: Sequence[Answer], *, images: bool, together: bool
    ) -> "list[Future[Result]]":
        """What a function says of each answer; its future raises GradingError where it comes to no verdict."""
        problem = problem if images else replace(problem, images=())
        jobs = [answers] if together else [[answer] for answer in answers]
        futures: list[Future[Result]] = [Future() for _ in answers]
        for start, job in enumerate(jobs):
            mine = futures if together else futures[start : start + 1]
            self._threads.submit(self._run, pickle.dumps((function, problem, list(job))), mine)
        return futures

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in list(self._processes):
            process.end()

    def _run(self, request: bytes, futures: "Sequence[Future[Result]]") -> None:
        futures = [future for future in futures if future.set_running_or_notify_cancel()]
        if not futures:
            return
        try:
            replies = self._ask(request)
        except Exception as error:
            replies = [error] * len(futures)
        for future, reply in zip(futures, replies, strict=True):
            if isinstance(reply, Exception):
                future.set_exception(reply)
            else:
                future.set_result(reply)

    def _ask(self, request: bytes) -> list[Result | Exception]:
        process = getattr(self._own, "process", None)
        if process is None or not process.alive:
            process = self._own.process = _Process(self._setup, self._show_once)
            self._processes.add(process)
        return process.ask(request, self._limits)

    def _show_once(self, error_text: str, trace: str) -> None:
        """Print the traceback of an error to the log, the first time that any of the processes meets it."""
        with self._shown_lock:
            if error_text in self._shown or len(self._shown) >= MOST_TRACEBACKS:
                return
            self._shown.add(error_text)
        print(trace, end="", file=sys.stderr, flush=True)


_pools: "weakref.WeakSet[ProcessPool]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for pool in list(_pools):
        pool.close()


class _Process:
    """One process, from this side. Raises RuntimeError if it doesn't start."""

    def __init__(self, setup: bytes, show_once: Callable[[str, str], None]) -> None:
        self._show_once = show_once
        self._pipe, theirs = Pipe()
        code = f"import sys; sys.path[:] = {sys.path!r}; from rlinf_vl.rewards.processes import serve; serve({theirs.fileno()})"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a function prints goes to the log
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the parent; and what it starts ends with it
            )
        self.alive = True
        said = b"it died"
        try:
            self._pipe.send_bytes(setup)
            said = self._pipe.recv_bytes() if self._pipe.poll(START_S) else b"nothing within %d s" % START_S
        except (EOFError, OSError):
            pass
        if said != b"ready":
            self.end()
            raise RuntimeError(f"the process of reward functions doesn't start: {said.decode(errors='replace')}")

    def ask(self, request: bytes, limits: Limits) -> list[Result | Exception]:
        """Raises GradingError: it took too long, or died."""
        begin = time.monotonic()
        try:
            self._pipe.send_bytes(request)
            if not self._pipe.poll(limits.timeout_s + 1.0):  # coroutines end by themselves
                self.end()
                raise GradingTimeout(f"no result within reward.timeout={limits.timeout_s:g} s")
            replies, tracebacks = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError, ValueError):
            self.end()
            raise GradingError(
                f"its process ended with {_status(self._process.returncode)} after {time.monotonic() - begin:.1f} s"
            ) from None
        for error_text, trace in tracebacks.items():
            self._show_once(error_text, trace)
        if any(isinstance(reply, str) and reply.startswith("MemoryError") for reply in replies):
            self.end()  # it may have kept something
        return [GradingError(reply) if isinstance(reply, str) else Result(*reply) for reply in replies]

    def end(self) -> None:
        self.alive = False
        self._pipe.close()
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()


def _status(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}" if -code in set(signal.Signals) else f"signal {-code}"
    return f"exit status {code}"


def serve(descriptor: int) -> None:
    """Answer calls until the other end is closed."""
    pipe: Connection = Connection(descriptor)
    (named, files, limits) = pickle.loads(pipe.recv_bytes())
    try:
        functions = [load_function(name, kwargs, files) for name, kwargs in named]
    except Exception as error:
        pipe.send_bytes(f"{type(error).__name__}: {error}".encode())
        return
    limit_memory(int(limits.memory_gb * 2**30))
    pipe.send_bytes(b"ready")
    sent: set[str] = set()
    while True:
        try:
            number, problem, answers = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        _limit_time(limits.timeout_s)
        try:
            found: list[Any] = functions[number].results(problem, answers, limits.timeout_s)
        except BaseException as error:  # SystemExit
            found = [error] * len(answers)
        replies = [_said(one, limits) if isinstance(one, BaseException) else one for one in found]
        tracebacks: dict[str, str] = {}
        for one, reply in zip(found, replies, strict=True):
            if isinstance(one, BaseException) and reply not in sent and len(sent) < MOST_TRACEBACKS:
                sent.add(reply)
                tracebacks[reply] = _trace_of(one)
        pipe.send_bytes(json.dumps([replies, tracebacks]).encode())


def _said(error: BaseException, limits: Limits) -> str:
    if isinstance(error, MemoryError):
        return f"MemoryError: more than reward.memory_gb={limits.memory_gb:g}"
    if isinstance(error, TimeoutError) and not str(error):
        return f"TimeoutError: no result within reward.timeout={limits.timeout_s:g} s"
    try:
        return f"{type(error).__name__}: {error}"[:500]
    except Exception:  # it can't say it
        return type(error).__name__


def _trace_of(error: BaseException) -> str:
    """Return the traceback of an error from the user's function on; "" of one that is ours, whose message says all."""
    package = str(Path(__file__).resolve().parents[1])
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(package):
        frame = frame.tb_next
    return "" if frame is None else "".join(traceback.format_exception(type(error), error, frame))


def _limit_time(timeout_s: float) -> None:
    """Processor time for the next call, for the case that nobody is left to end it."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    most = int(time.process_time() + (timeout_s + ORPHAN_S) * (os.cpu_count() or 1))
    resource.setrlimit(resource.RLIMIT_CPU, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
