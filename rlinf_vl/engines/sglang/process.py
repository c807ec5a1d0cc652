"""SGLang inside our process: started without changing how the process is set up, watched, and ended
completely.

SGLang behaves as if the process were its own: it replaces the root logger's handlers, the asyncio
policy and the start method of multiprocessing; when a child of it fails it kills the whole process
tree by SIGQUIT, and at exit every child of the process, its own or not. An engine inside a Ray
worker must do none of that.
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
from rlinf_vl.engines.sglang.ports import PortBlock
from rlinf_vl.engines.sglang.shared_memory import remove_abandoned

log = logging.getLogger(__name__)

#: Seconds within which killed processes must be gone.
KILL_TIMEOUT_S = 20.0
#: Seconds within which the loop must end when the engine is closed.
CLOSE_TIMEOUT_S = 20.0
#: Seconds between checks of the engine's processes.
WATCH_INTERVAL_S = 0.5


class Host:
    """SGLang's engine on a thread and an asyncio loop of its own, and a watch over its processes.

    Attributes:
        manager: SGLang's tokenizer manager. Its methods run on the loop: see `run` and `call`.
        processes: the schedulers and the detokenizer.
    """

    manager: Any
    processes: "Processes"

    def __init__(self, arguments: dict[str, Any]) -> None:
        """Start SGLang with these server arguments, and return when it can answer.

        Raises EngineDied if it did not start.
        """
        self.end: Exception | None = None
        """The reason why no more requests are answered: an `EngineDied`, or that the engine was
        closed."""
        self.loop = asyncio.new_event_loop()
        self._ended = self.loop.create_future()
        self._closing = asyncio.Event()
        self._answering: set[asyncio.Task[Any]] = set()
        ready: Future[None] = Future()
        self._ports = PortBlock()
        arguments = self._ports.arguments | arguments
        self._thread = threading.Thread(
            target=self._run, args=(arguments, ready), name="sglang-engine", daemon=True
        )
        self._thread.start()
        try:
            ready.result()
        except BaseException:
            self._ports.close()
            raise

    def run(
        self, operation: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any
    ) -> Future[Any]:
        """Start a coroutine function on the loop, from any thread.

        Cancelling the future cancels the coroutine. When the engine ends, the future fails with
        `end`, and further calls raise it.
        """
        if self.end:
            raise self.end
        return asyncio.run_coroutine_threadsafe(self._or_end(operation, *arguments), self.loop)

    def call(self, operation: str, **fields: Any) -> None:
        """Run an operation of the manager from another thread, with a message of these fields.

        The message's class is named after the operation: `pause_generation` takes a
        `PauseGenerationReqInput`.

        Raises:
            RuntimeError: SGLang reports a failure, which it does not raise by itself.
        """
        from sglang.srt.managers import io_struct

        message = getattr(io_struct, operation.title().replace("_", "") + "ReqInput")(**fields)
        answer = self.run(getattr(self.manager, operation), message).result()
        if isinstance(answer, tuple) and not answer[0]:  # (success, message)
            raise RuntimeError(f"SGLang refused {operation}: {answer[1]}")

    def alive(self, timeout_s: float) -> bool:
        """Return whether all processes run and the scheduler answers within the time."""
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
        """End the loop's tasks, the thread and the processes, and wait until they are gone.

        A second call does nothing.
        """
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(CLOSE_TIMEOUT_S)
        self.processes.kill()
        # A loop that something in SGLang blocks must not hold up its owner: the processes, which
        # have the memory, are gone.
        if self._thread.is_alive():
            log.error("the loop of the SGLang engine did not end within %g s", CLOSE_TIMEOUT_S)
        self._ports.close()
        remove_abandoned()

    async def flush(self) -> bool:
        """Empty the prefix cache, and return whether all groups of attention were idle and did so.

        SGLang's own `flush_cache` has the answer of the first group only.
        """
        from sglang.srt.managers.io_struct import FlushCacheReqInput

        self.manager.auto_create_handle_loop()
        answers = await self.manager.flush_cache_communicator(FlushCacheReqInput())
        return all(answer.success for answer in answers)

    async def _or_end(
        self, operation: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any
    ) -> Any:
        """Await the operation, or raise `end` when the engine ends before it is done."""
        if self.end:
            raise self.end
        caller = asyncio.current_task()
        assert caller is not None
        task = self.loop.create_task(operation(*arguments))
        self._answering.add(caller)
        try:
            await asyncio.wait((task, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                assert self.end is not None
                raise self.end
            return task.result()
        finally:
            task.cancel()
            self._answering.discard(caller)

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
        unfinished = asyncio.all_tasks(self.loop)
        for task in unfinished:
            task.cancel()
        if unfinished:
            self.loop.run_until_complete(asyncio.wait(unfinished, timeout=5))
        close_sockets(engine)
        close_sockets(engine.tokenizer_manager)
        self.loop.close()

    async def _watch(self) -> None:
        """Fail all waiting calls when a process dies or the engine is closed. Return after a
        close."""
        while not self._closing.is_set():
            cause = None if self.end else self.processes.dead()
            if cause:
                log.error("the SGLang engine died: %s", cause)
                self._fail(EngineDied(f"the SGLang engine died: {cause}"))
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
        """Return a sentence about a process that has ended, or None if all run."""
        for process in self._processes:
            if not process.is_alive():
                return f"process {process.pid} ended with exit code {process.exitcode}"
        return None

    def kill(self) -> None:
        """Kill the processes and their descendants, and wait until they are gone."""
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
        surviving_pids = [p.pid for p in self._processes if p.is_alive()] + [p.pid for p in alive]
        if surviving_pids:
            log.error("processes of the engine that would not end: %s", surviving_pids)


def start(arguments: dict[str, Any]) -> tuple[Any, Processes]:
    """Start SGLang's `Engine` with these server arguments; return it and its processes once it is
    loaded.

    Call it in the thread that will live as long as the engine: its processes die with the thread
    that started them.

    Raises:
        EngineDied: it did not start; none of its processes is left running.
    """
    # Ignore a failing child's SIGQUIT: the engine's own watch sees the child end. Through libc (1
    # is SIG_IGN), because Python sets signal handlers in the main thread only, and a Ray async
    # actor is not in it.
    ctypes.CDLL(None).signal(int(signal.SIGQUIT), ctypes.c_void_p(1))
    other_children = set(multiprocessing.active_children())
    managers: list[Any] = []
    try:
        with _process_settings_restored():
            from sglang.srt.entrypoints.engine import Engine

            class Guest(Engine):
                # also called at exit: it would kill every child of this process
                def shutdown(self) -> None:
                    pass

                @staticmethod
                def init_tokenizer_manager_func(*args: Any, **keywords: Any) -> Any:
                    manager, templates = Engine.init_tokenizer_manager_func(*args, **keywords)
                    managers.append(manager)
                    return manager, templates

            engine = Guest(**arguments)
    except BaseException as e:
        # Here, not by the garbage collector in whatever thread it runs: it may collect sockets and
        # their context at once, whose end then waits for the sockets, for ever.
        for manager in managers:
            close_sockets(manager)
        Processes(set(multiprocessing.active_children()) - other_children).kill()
        raise EngineDied(f"SGLang did not start: {type(e).__name__}: {e}") from e
    watchdog = engine.tokenizer_manager._subprocess_watchdog
    if watchdog is not None:
        watchdog.stop()  # it would end this process when a child dies
    return engine, Processes(set(multiprocessing.active_children()) - other_children)


def close_sockets(owner: Any) -> None:
    """Close the sockets among an object's attributes, with their contexts.

    Messages that are queued for processes that are gone are dropped: a socket left open would delay
    the end of the program.
    """
    import zmq

    for value in vars(owner).values():
        if isinstance(value, zmq.Socket):
            context = value.context
            value.close(linger=0)
            context.destroy(linger=0)


@contextlib.contextmanager
def _process_settings_restored() -> Iterator[None]:
    """Restore what SGLang changes for the whole process: root logging, asyncio's policy and the
    start method of multiprocessing. Of SGLang's log messages only errors are shown."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    policy, method = (
        asyncio.get_event_loop_policy(),
        multiprocessing.get_start_method(allow_none=True),
    )
    logging.getLogger("sglang").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        asyncio.set_event_loop_policy(policy)
        multiprocessing.set_start_method(method, force=True)
