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


def start(arguments: dict[str, Any]) -> tuple[Any, "Processes"]:
    """SGLang's `Engine` with these server arguments, and its processes. Runs for as long as loading takes.

    Call it in the thread that will live as long as the engine: its processes die with the thread that started them.

    Raises:
        EngineDied: it did not come up; nothing of it is left running.
    """
    _ignore_sigquit()
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


class Processes:
    """The engine's processes: schedulers and detokenizer."""

    def __init__(self, processes: set[Any]) -> None:
        self._processes = processes

    @property
    def pids(self) -> list[int]:
        return sorted(p.pid for p in self._processes)

    def dead(self) -> str | None:
        """Says which process ended and how; None if all run."""
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


class Host:
    """SGLang's engine on a thread and an asyncio loop of its own, with the watch over its processes.

    Everything that awaits an answer of SGLang is a task here, so that it ends when the engine does.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        """Start it with these server arguments; returns when it can answer. EngineDied: it did not come up."""
        self.end: Exception | None = None
        """Why nothing more is taken: an `EngineDied`, or that it was closed."""
        self._tasks: set[asyncio.Task] = set()
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(arguments, ready), name="sglang-engine", daemon=True)
        self._thread.start()
        ready.result()

    def spawn(self, coroutine: Coroutine[Any, Any, Any], future: "Future[Any]") -> asyncio.Task | None:
        """Run a coroutine as a task whose outcome resolves `future`; cancelling the future cancels the task, and when the
        engine ends the future fails with `end`. On the loop's thread only. None: it has ended already."""
        if self.end:
            coroutine.close()
            _settle(future, error=self.end)
            return None

        def done(task: asyncio.Task) -> None:
            self._tasks.discard(task)
            if task.cancelled():  # perhaps before its first step
                _settle(future, error=self.end or CancelledError())
            elif task.exception():
                _settle(future, error=task.exception())
            else:
                _settle(future, task.result())

        task = self.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(done)
        future.add_done_callback(lambda f: f.cancelled() and self.loop.call_soon_threadsafe(task.cancel))
        return task

    def call(self, operation: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any) -> Any:
        """Run a coroutine function on the loop and wait for it, from another thread; raises `end` when the engine ends."""
        if self.end:
            raise self.end
        future: Future[Any] = Future()
        self.loop.call_soon_threadsafe(lambda: self.spawn(operation(*arguments), future))
        return future.result()

    def checked(self, operation: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any) -> None:
        """`call`, and RuntimeError where SGLang reports that it failed: it raises nothing itself."""
        success, message = self.call(operation, *arguments)[:2]
        if not success:
            raise RuntimeError(f"SGLang refused {operation.__name__}: {message}")

    def alive(self, timeout_s: float) -> bool:
        """Whether all processes run and the scheduler answers within the time."""
        if self.end or self.processes.dead():
            return False
        answer: Future[Any] = Future()
        self.loop.call_soon_threadsafe(lambda: self.spawn(self.manager.get_internal_state(), answer))
        try:
            answer.result(timeout_s)
        except (Exception, CancelledError):
            answer.cancel()
            return False
        return True

    def close(self) -> None:
        """End the tasks, the thread and the processes; returns when they are gone. Again: does nothing."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._finish)
            self._thread.join()
        self.processes.kill()

    def _run(self, arguments: dict[str, Any], ready: "Future[None]") -> None:
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        try:
            engine, self.processes = start(arguments)
        except BaseException as e:
            ready.set_exception(e)
            return
        self.manager = engine.tokenizer_manager
        watching = self.loop.create_task(self._watch())
        ready.set_result(None)
        self.loop.run_forever()
        watching.cancel()
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        self.loop.run_until_complete(asyncio.wait(left, timeout=5))
        close_sockets(engine)
        self.loop.close()

    async def _watch(self) -> None:
        while not self.end:
            await asyncio.sleep(WATCH_INTERVAL_S)
            how = self.processes.dead()
            if how and not self.end:
                log.error("the SGLang engine died: %s", how)
                self._fail(EngineDied(f"the SGLang engine died: {how}"))

    def _fail(self, reason: Exception) -> None:
        self.end = self.end or reason
        for task in self._tasks:
            task.cancel()

    def _finish(self) -> None:
        self._fail(RuntimeError("the engine was closed"))

        async def stop() -> None:
            if self._tasks:
                await asyncio.wait(set(self._tasks), timeout=5)
            self.loop.stop()

        self._stopping = self.loop.create_task(stop())


def _settle(future: "Future[Any]", result: Any = None, error: BaseException | None = None) -> None:
    """Resolve a future, unless it was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def _ignore_sigquit() -> None:
    """Let a failing child's SIGQUIT pass: the engine's own watch sees the child end.

    Through libc, because Python sets signal handlers in the main thread only, and a Ray async actor is not in it.
    """
    ctypes.CDLL(None).signal(int(signal.SIGQUIT), ctypes.c_void_p(1))  # 1 is SIG_IGN


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
