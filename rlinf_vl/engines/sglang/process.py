"""SGLang as a guest in our process: started without changing how the process is set up, watched, and ended completely.

SGLang takes a process for its own: it replaces the root logger's handlers, the asyncio policy and the start method of
multiprocessing; when a child of it fails it kills the whole process tree by SIGQUIT, and at exit every child of the
process, its own or not. An engine inside a Ray worker must do none of that.
"""

# SGLang has an environment of its own; types are checked in the other.
# pyright: reportMissingImports=false

import asyncio
import contextlib
import ctypes
import logging
import multiprocessing
import signal
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import psutil

from rlinf_vl.engines.base import EngineDied

log = logging.getLogger(__name__)

#: Seconds that killed processes are given to be gone.
KILL_TIMEOUT_S = 20.0
#: Seconds between looks at the engine's processes.
WATCH_INTERVAL_S = 0.5


class Host:
    """SGLang's engine on a thread and an asyncio loop of its own, with the watch over its processes.

    `manager` is SGLang's tokenizer manager, whose methods are called on the loop: see `run` and `call`.
    """

    manager: Any
    processes: "Processes"

    def __init__(self, arguments: dict[str, Any]) -> None:
        """Start it with these server arguments; returns when it can answer. EngineDied: it did not come up."""
        self.end: Exception | None = None
        """Why nothing more is answered: an `EngineDied`, or that it was closed."""
        self.loop = asyncio.new_event_loop()
        self._ended = self.loop.create_future()
        self._closing = asyncio.Event()
        self._answering: set[asyncio.Task[Any]] = set()
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(arguments, ready), name="sglang-engine", daemon=True)
        self._thread.start()
        ready.result()

    def run(self, operation: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any) -> Future[Any]:
        """Start a coroutine function on the loop, from any thread. Cancelling the future cancels it. When the engine ends, the
        future fails with `end`, and further calls raise it."""
        if self.end:
            raise self.end
        return asyncio.run_coroutine_threadsafe(self._or_end(operation, *arguments), self.loop)

    def call(self, operation: str, **fields: Any) -> None:
        """Have the manager do an operation that takes a message with these fields, from another thread: `pause_generation`
        takes a `PauseGenerationReqInput`.

        Raises:
            RuntimeError: SGLang reports that it failed; it raises nothing itself.
        """
        from sglang.srt.managers import io_struct

        message = getattr(io_struct, operation.title().replace("_", "") + "ReqInput")(**fields)
        answer = self.run(getattr(self.manager, operation), message).result()
        if isinstance(answer, tuple) and not answer[0]:  # (success, message)
            raise RuntimeError(f"SGLang refused {operation}: {answer[1]}")

    def alive(self, timeout_s: float) -> bool:
        """Whether all processes run and the scheduler answers within the time."""
        if self.end or self.processes.dead():
            return False
        answer = self.run(self.manager.get_internal_state)
        try:
            answer.result(timeout_s)
        except (Exception, CancelledError):
            answer.cancel()
            return False
        return True

    def close(self) -> None:
        """End what runs on the loop, the thread and the processes; returns when they are gone. Again: does nothing."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()
        self.processes.kill()

    async def _or_end(self, operation: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any) -> Any:
        if self.end:
            raise self.end
        me, task = asyncio.current_task(), self.loop.create_task(operation(*arguments))
        assert me is not None
        self._answering.add(me)
        try:
            await asyncio.wait((task, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                assert self.end is not None
                raise self.end
            return task.result()
        finally:
            task.cancel()
            self._answering.discard(me)

    def _run(self, arguments: dict[str, Any], ready: Future[None]) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            engine, self.processes = start(arguments)
        except BaseException as e:
            self.loop.close()
            ready.set_exception(e)
            return
        self.manager = engine.tokenizer_manager
        ready.set_result(None)
        self.loop.run_until_complete(self._watch())
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        if left:
            self.loop.run_until_complete(asyncio.wait(left, timeout=5))
        close_sockets(engine)
        self.loop.close()

    async def _watch(self) -> None:
        """Fail what waits for an answer when a process dies, or when the engine is closed, with which this returns."""
        while not self._closing.is_set():
            how = None if self.end else self.processes.dead()
            if how:
                log.error("the SGLang engine died: %s", how)
                self._fail(EngineDied(f"the SGLang engine died: {how}"))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), WATCH_INTERVAL_S)
        self._fail(RuntimeError("the engine was closed"))
        if self._answering:
            await asyncio.wait(self._answering, timeout=5)

    def _fail(self, reason: Exception) -> None:
        if self.end is None:
            self.end = reason
            self._ended.set_result(None)


class Processes:
    """The engine's processes: schedulers and detokenizer."""

    def __init__(self, processes: set[Any]) -> None:
        self._processes = processes

    @property
    def pids(self) -> list[int]:
        return sorted(p.pid for p in self._processes)

    def dead(self) -> str | None:
        """Which process ended and how; None if all run."""
        for process in self._processes:
            if not process.is_alive():
                return f"process {process.pid} ended with exit code {process.exitcode}"
        return None

    def kill(self) -> None:
        """End them and what they have started; returns when they are gone."""
        offspring = []
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                offspring += psutil.Process(process.pid).children(recursive=True)
        for process in (*self._processes, *offspring):
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                process.kill()  # SIGKILL reaches a stopped process too
        for process in self._processes:
            process.join(KILL_TIMEOUT_S)
        _, alive = psutil.wait_procs(offspring, KILL_TIMEOUT_S)
        left = [p.pid for p in self._processes if p.is_alive()] + [p.pid for p in alive]
        if left:
            log.error("processes of the engine that would not end: %s", left)


def start(arguments: dict[str, Any]) -> tuple[Any, Processes]:
    """SGLang's `Engine` with these server arguments, and its processes. Takes as long as loading takes.

    Call it in the thread that will live as long as the engine: its processes die with the thread that started them.

    Raises:
        EngineDied: it did not come up; nothing of it is left running.
    """
    # Let a failing child's SIGQUIT pass: the engine's own watch sees the child end. Through libc (1 is SIG_IGN), because Python
    # sets signal handlers in the main thread only, and a Ray async actor is not in it.
    ctypes.CDLL(None).signal(int(signal.SIGQUIT), ctypes.c_void_p(1))
    before = set(multiprocessing.active_children())
    try:
        with _settings_kept():
            from sglang.srt.entrypoints.engine import Engine

            class Guest(Engine):
                def shutdown(self) -> None:  # also called at exit: it would kill every child of this process
                    pass

            engine = Guest(**arguments)
    except BaseException as e:
        Processes(set(multiprocessing.active_children()) - before).kill()
        raise EngineDied(f"SGLang did not start: {type(e).__name__}: {e}") from e
    watchdog = engine.tokenizer_manager._subprocess_watchdog
    if watchdog is not None:
        watchdog.stop()  # it would answer a child's death with the end of this process
    return engine, Processes(set(multiprocessing.active_children()) - before)


def close_sockets(engine: Any) -> None:
    """Drop what is still queued for processes that are gone; a socket left open would hold up the end of the program."""
    import zmq

    for owner in (engine, engine.tokenizer_manager):
        for value in vars(owner).values():
            if isinstance(value, zmq.Socket):
                value.close(linger=0)


@contextlib.contextmanager
def _settings_kept() -> Iterator[None]:
    """Put back what SGLang changes for the whole process: root logging, asyncio's policy, multiprocessing's start method.

    Of its own messages errors are shown.
    """
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    policy, method = asyncio.get_event_loop_policy(), multiprocessing.get_start_method(allow_none=True)
    logging.getLogger("sglang").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        asyncio.set_event_loop_policy(policy)
        multiprocessing.set_start_method(method, force=True)
