"""Calls environments with a time limit, so that one that hangs blocks nobody. No Ray.

A function runs in a daemon thread; a coroutine function runs in an event loop with a thread of its
own. A call that exceeds its limit is abandoned, because a thread can't be ended: the thread lives
until its function returns or the process ends.

Not anyio: of 128 concurrent calls of 20 µs each took 114 µs of processor time by its `to_thread`
with a time limit, and 60 µs here, where the loop is woken once for many results (`loop_bridge`).

Invariants:
- An environment gets one call at a time.
- Every environment that was made is closed; one that hangs, when its call returns.
"""

import asyncio
import inspect
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol, runtime_checkable

from rlinf_vl.envs import Env
from rlinf_vl.observe.spans import span
from rlinf_vl.rollout.episode.faults import error_text
from rlinf_vl.rollout.episode.loop_bridge import PerLoop, wait_done

log = logging.getLogger(__name__)

#: Limit on calls that started less than `WAITING_S` ago. They may be running Python code, and more
#: threads doing that would take the interpreter lock from the engine's thread.
AT_ONCE = min(32, (os.cpu_count() or 1) + 4)
#: Seconds after which a call is assumed to wait for something, and no longer counts for `AT_ONCE`.
WAITING_S = 0.02
#: Seconds that an idle thread waits for another call before it ends.
IDLE_S = 10.0
#: Seconds that a cancelled coroutine has to end, and that the event loop has to respond.
CANCEL_S = 0.5


class CallTimeout(Exception):
    """A call has not returned in time."""


@runtime_checkable
class HasProcess(Protocol):
    """An environment in another process.

    Attributes:
        start_limit_s: limit on the start of the process.
    """

    start_limit_s: float

    async def wait_for_process(self) -> None: ...


class EnvExecutor(Protocol):
    """Runs the calls of many environments, as `ThreadExecutor` does.

    Attributes:
        timeout_s: limit on a call's duration, from when it starts to run.
    """

    timeout_s: float

    @property
    def hung(self) -> int: ...
    async def call(
        self,
        function: Callable[[], Any],
        on_begin: Callable[[Future], None],
        timeout_s: float | None = None,
    ) -> Any: ...
    def begin_close(self, function: Callable[[], Any]) -> Future: ...


class ThreadExecutor:
    """Threads and an event loop that run the calls of many environments.

    Attributes:
        timeout_s: limit on a call's duration, from when it starts to run.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._timed_out = 0  # abandoned calls that have not returned
        #: (deadline, close call), earliest first.
        self._closing: deque[tuple[float, Future]] = deque()
        self._call_limit = PerLoop(lambda: asyncio.Semaphore(AT_ONCE))
        self._jobs: SimpleQueue[tuple[Future, Callable[[], Any]]] = SimpleQueue()
        self._idle = 0  # idle threads for which no job is queued yet
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None  # runs coroutine functions
        self._loop_thread: threading.Thread | None = None

    async def call(
        self,
        function: Callable[[], Any],
        on_begin: Callable[[Future], None],
        timeout_s: float | None = None,
    ) -> Any:
        """Call a function or coroutine function and return its result.

        Args:
            on_begin: called with the call's future when the call begins.
            timeout_s: the limit of this call; None for the executor's.

        Raises:
            CallTimeout: the call did not return in time.
            Exception: what the function raised. SystemExit, StopIteration and the like are
                replaced by RuntimeError.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        if inspect.iscoroutinefunction(function):
            future = self.begin(function, timeout_s)
            on_begin(future)
            loop, in_time = self._loop, await wait_done(future, timeout_s + CANCEL_S)
            if not in_time and loop is not None:
                # `_in_time` should have cancelled the coroutine. If the loop itself does not
                # respond, a coroutine blocks it: later calls get a new loop.
                echo = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop)
                if not await wait_done(echo, CANCEL_S) and self._loop is loop:
                    self._loop = None
                    loop.call_soon_threadsafe(_end_when_idle, loop)
        else:
            # Only a call's first moments count for the limit: one that waits (for a server, say)
            # leaves the interpreter to others.
            async with self._call_limit():
                future = self.begin(function)
                on_begin(future)
                await wait_done(future, min(WAITING_S, timeout_s))
            in_time = await wait_done(future, timeout_s - WAITING_S)
        if not in_time:
            with self._lock:
                self._timed_out += 1
            future.add_done_callback(self._on_late_return)
            raise CallTimeout
        return future.result()

    @property
    def hung(self) -> int:
        """The number of calls, closes included, beyond `timeout_s`. Each keeps a thread."""
        time_s = time.monotonic()
        with self._lock:
            self._closing = deque(entry for entry in self._closing if not entry[1].done())
            return self._timed_out + sum(deadline < time_s for deadline, _ in self._closing)

    @property
    def loop_thread_id(self) -> int | None:
        """The identity of the newest event loop's thread; None before a coroutine function ran."""
        return self._loop_thread.ident if self._loop_thread is not None else None

    def begin_close(self, function: Callable[[], Any]) -> Future:
        """Call an environment's `close` without waiting.

        `hung` counts it here, because perhaps nobody waits for it with a time limit.
        """
        future = self.begin(function)
        with self._lock:
            while self._closing and self._closing[0][1].done():
                self._closing.popleft()
            self._closing.append((time.monotonic() + self.timeout_s, future))
        return future

    def begin(self, function: Callable[[], Any], timeout_s: float | None = None) -> Future:
        """Begin a call without waiting for it; `timeout_s` limits a coroutine. Thread-safe."""
        if inspect.iscoroutinefunction(function):
            with self._lock:
                if self._loop is None:
                    self._loop = asyncio.new_event_loop()
                    self._loop_thread = threading.Thread(
                        target=_run_loop, args=(self._loop,), name="environments", daemon=True
                    )
                    self._loop_thread.start()
                limited = self._in_time(function(), timeout_s or self.timeout_s)
                return asyncio.run_coroutine_threadsafe(limited, self._loop)
        future: Future = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            has_thread = self._idle > 0
            self._idle -= has_thread
        self._jobs.put((future, function))
        if not has_thread:
            # A daemon, so that a call that hangs does not keep the process alive.
            threading.Thread(target=self._work, name="environment", daemon=True).start()
        return future

    async def _in_time(self, coroutine: Coroutine, timeout_s: float) -> Any:
        """Await a coroutine for `timeout_s`. A TimeoutError of its own stays one."""
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                return await coroutine
        except BaseException as error:
            if limit.expired() and isinstance(error, TimeoutError):
                raise CallTimeout from error
            raise plain_error(error) from error

    def _work(self) -> None:
        """Run jobs, one after the other, until none has come for `IDLE_S`."""
        while True:
            try:
                future, function = self._jobs.get(timeout=IDLE_S)
            except Empty:
                with self._lock:
                    if self._idle:
                        self._idle -= 1
                        return
                # `begin` has just reserved this thread for a job, which is about to be queued.
                continue
            try:
                result = function()
            except BaseException as error:
                future.set_exception(plain_error(error))
            else:
                future.set_result(result)
            # An idle thread must not keep an environment or its result alive.
            future = function = result = None
            with self._lock:
                self._idle += 1

    def _on_late_return(self, _: Future) -> None:
        with self._lock:
            self._timed_out -= 1


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Run an event loop until it is stopped, and close it with its sockets."""
    try:
        loop.run_forever()
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


def _end_when_idle(loop: asyncio.AbstractEventLoop) -> None:
    """Stop a loop that was replaced once its last calls, which may still succeed, have ended."""
    if asyncio.all_tasks(loop):
        loop.call_later(CANCEL_S, _end_when_idle, loop)
    else:
        loop.stop()


class Semaphore:
    """A first-come semaphore of `n` permits, None for no limit; one call may acquire several."""

    def __init__(self, n: int | None) -> None:
        self._permits = PerLoop(lambda: asyncio.Semaphore(n or 2**31))
        # One caller acquires at a time: two that each hold some of their permits would deadlock.
        self._turnstile = PerLoop(asyncio.Lock)

    async def acquire(self, n: int) -> None:
        """Wait for `n` permits; holds none of them if cancelled."""
        async with self._turnstile():
            for n_acquired in range(n):
                try:
                    await self._permits().acquire()
                except asyncio.CancelledError:
                    for _ in range(n_acquired):
                        self.release()
                    raise

    def release(self) -> None:
        """Return one permit."""
        self._permits().release()


class EnvHandle:
    """The handle of one environment: makes, calls and closes it, one call at a time.

    Attributes:
        env: the environment; None before it is made and once it is closed.
        hung: whether a call exceeded its time limit.
    """

    def __init__(self, executor: EnvExecutor | None) -> None:
        """
        Args:
            executor: runs the environment's functions. None: they never block, and are called
                directly, which takes a hundredth of the time.
        """
        self.env: Env | None = None
        self.hung = False
        self._executor = executor
        self._last_call: Future | None = None
        self._closed: Future | None = None

    async def make(self, make_env: Callable[[], Env]) -> None:
        """Make the environment. Raises as `ThreadExecutor.call`, like the method below."""

        def make() -> None:
            # Set in the thread: an environment that is made too late is closed nevertheless.
            self.env = make_env()

        await self._call(make)
        # Of an environment in another process, which may have to start: a limit of its own.
        if isinstance(self.env, HasProcess):
            await self._call(self.env.wait_for_process, self.env.start_limit_s)

    async def call(self, method: str, argument: Any, process: Callable[[Any], Any]) -> Any:
        """Call a method of the environment, and return `process(its result)`.

        `process` runs in a thread, too: in the same call as a plain method, as every hand-over
        between threads costs time, and in a second call after a coroutine.
        """
        function = getattr(self.env, method)
        if inspect.iscoroutinefunction(function):
            result = await self._call(partial(function, argument))
            return await self._call(partial(process, result))

        def call_and_process() -> Any:
            with span("environment"):
                result = function(argument)
            return process(result)

        return await self._call(call_and_process)

    async def _call(self, function: Callable[[], Any], timeout_s: float | None = None) -> Any:
        """Call a function with a time limit, None for the executor's."""
        if self._executor is None:
            return function()
        try:
            return await self._executor.call(function, self._note_call, timeout_s)
        except CallTimeout:
            self.hung = True
            raise

    def close(self) -> Future:
        """Close the environment once its current call returns.

        The future is done when it is closed, even if `close` failed.
        """
        if self._closed is not None:
            return self._closed
        closed = self._closed = Future()

        def report(call: Future) -> None:
            if error := call.exception():
                # The trajectory counts nevertheless: it ended before its environment was closed.
                log.warning("an environment did not close: %s", error_text(error))
            closed.set_result(None)

        def close(_: Future | None) -> None:
            env, self.env = self.env, None
            if env is None:
                closed.set_result(None)
            elif self._executor is None:
                env.close()
                closed.set_result(None)
            else:
                self._executor.begin_close(env.close).add_done_callback(report)

        if self._last_call is None:
            close(None)
        else:
            self._last_call.add_done_callback(close)
        return closed

    def _note_call(self, call: Future) -> None:
        self._last_call = call


def plain_error(error: BaseException) -> Exception:
    """Return the error, or a RuntimeError in its place.

    A future can't carry StopIteration, and SystemExit or KeyboardInterrupt would end more than
    the call.
    """
    if isinstance(error, Exception) and not isinstance(error, (StopIteration, StopAsyncIteration)):
        return error
    return RuntimeError(error_text(error))
