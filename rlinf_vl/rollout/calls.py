"""Calls of environments, made so that nobody waits for one that hangs. No Ray.

A function runs in a daemon thread, a coroutine function in an event loop that has a thread of its own. What does not return in
time is left alone, for a thread can't be ended: it stays until its function returns, and no longer than the process.

Invariants: an environment gets one call at a time; each that was made is closed, one that hangs when its call returns.
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
from queue import Empty, SimpleQueue
from typing import Any

from rlinf_vl.data.unusable import shorten
from rlinf_vl.envs import Env
from rlinf_vl.observe.spans import span
from rlinf_vl.rollout.inbox import PerLoop, done

log = logging.getLogger(__name__)

#: Calls that begin while none of them has returned. More threads at work on Python code would keep the engine's thread waiting.
AT_ONCE = min(32, (os.cpu_count() or 1) + 4)
#: Seconds after which a call is taken to wait for something, and no longer counts among those.
WAITING_S = 0.02
#: Seconds that a thread waits for another call before it ends.
IDLE_S = 10.0
#: Seconds that a coroutine has to end once its time is over, and the event loop to show that it lives.
CANCEL_S = 0.5
#: Characters of an error that are kept.
LONGEST = 500


class CallTimeout(Exception):
    """A call has not returned in time."""


class Calls:
    """Threads, and an event loop, for the calls of many environments; awaited in one event loop.

    Attributes:
        timeout_s: seconds that a call may take, once it has begun.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._given_up = 0  # calls that somebody has stopped waiting for, and that have not returned
        self._closing: deque[tuple[float, Future]] = deque()  # when each close is overdue, in that order
        self._room = PerLoop(lambda: asyncio.Semaphore(AT_ONCE))
        self._jobs: SimpleQueue[tuple[Future, Callable, tuple]] = SimpleQueue()
        self._idle = 0  # threads that wait for a job which is not in the queue yet
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def make(self, function: Callable, *arguments: Any, begun: Callable[[Future], None]) -> Any:
        """What the function, or coroutine function, returns; `begun` is told of the call.

        Raises:
            CallTimeout: nothing within `timeout_s`.
            Exception: what the function raised; RuntimeError in place of what is no error (SystemExit, StopIteration).
        """
        if inspect.iscoroutinefunction(function):
            future = self.begin(function, *arguments)
            begun(future)
            loop, in_time = self._loop, await done(future, self.timeout_s + CANCEL_S)
            if not in_time and loop is not None:
                echo = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop)
                if not await done(echo, CANCEL_S) and self._loop is loop:
                    self._loop = None  # a coroutine function blocks it: the others get a new one
        else:
            async with self._room():
                future = self.begin(function, *arguments)
                begun(future)
                await done(future, min(WAITING_S, self.timeout_s))
            in_time = await done(future, self.timeout_s - WAITING_S)
        if not in_time:
            with self._lock:
                self._given_up += 1
            future.add_done_callback(self._returned)
            raise CallTimeout
        return future.result()

    @property
    def hung(self) -> int:
        """Calls that have not returned within `timeout_s`, closes included. Each keeps a thread."""
        now = time.monotonic()
        with self._lock:
            self._closing = deque(entry for entry in self._closing if not entry[1].done())
            return self._given_up + sum(overdue < now for overdue, _ in self._closing)

    def begin_close(self, function: Callable) -> Future:
        """Call an environment's `close`, without waiting. Nobody may ever wait for it, so it is counted here if it hangs."""
        future = self.begin(function)
        with self._lock:
            while self._closing and self._closing[0][1].done():
                self._closing.popleft()
            self._closing.append((time.monotonic() + self.timeout_s, future))
        return future

    def begin(self, function: Callable, *arguments: Any) -> Future:
        """Call it, without waiting; from any thread."""
        if inspect.iscoroutinefunction(function):
            with self._lock:
                if self._loop is None:
                    self._loop = asyncio.new_event_loop()
                    threading.Thread(target=self._loop.run_forever, name="environments", daemon=True).start()
                return asyncio.run_coroutine_threadsafe(self._in_time(function(*arguments)), self._loop)
        future: Future = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            has_thread = self._idle > 0
            self._idle -= has_thread
        self._jobs.put((future, function, arguments))
        if not has_thread:
            threading.Thread(target=self._work, name="environment", daemon=True).start()
        return future

    async def _in_time(self, coroutine: Coroutine) -> Any:
        limit = asyncio.timeout(self.timeout_s)
        try:
            async with limit:
                return await coroutine
        except BaseException as error:
            if limit.expired() and isinstance(error, TimeoutError):
                raise CallTimeout from error
            raise plain(error) from error

    def _work(self) -> None:
        while True:
            try:
                future, function, arguments = self._jobs.get(timeout=IDLE_S)
            except Empty:
                with self._lock:
                    if self._idle:
                        self._idle -= 1
                        return
                continue  # this thread was counted on just now
            try:
                result = function(*arguments)
            except BaseException as error:
                future.set_exception(plain(error))
            else:
                future.set_result(result)
            future = function = arguments = result = None  # what an idle thread holds would not be freed
            with self._lock:
                self._idle += 1

    def _returned(self, _: Future) -> None:
        with self._lock:
            self._given_up -= 1


class Places:
    """`n` places (None: any number), of which several may be taken at once; whoever asked first is first."""

    def __init__(self, n: int | None) -> None:
        self._free = PerLoop(lambda: asyncio.Semaphore(n or 2**31))
        self._turnstile = PerLoop(asyncio.Lock)

    async def take(self, n: int) -> None:
        async with self._turnstile():
            for taken in range(n):
                try:
                    await self._free().acquire()
                except asyncio.CancelledError:
                    for _ in range(taken):
                        self.give()
                    raise

    def give(self) -> None:
        self._free().release()


class Stage:
    """One environment, behind `Calls`; None: one whose functions never wait for anything, and are called in place, which takes a
    hundredth of the time.

    Attributes:
        hung: a call was given up.
    """

    def __init__(self, calls: Calls | None) -> None:
        self.env: Env | None = None
        self.hung = False
        self._calls = calls
        self._last: Future | None = None
        self._closed: Future | None = None

    async def make(self, make_env: Callable[[], Env]) -> None:
        """Make the environment. Raises as `Calls.make`, here and below."""

        def make() -> None:
            self.env = make_env()

        await self.call(make)

    async def ask(self, method: str, argument: Any, then: Callable[[Any], Any]) -> Any:
        """What `then` makes, in a thread, of what the environment says."""
        function = getattr(self.env, method)
        if inspect.iscoroutinefunction(function):
            said = await self.call(function, argument)
            return await self.call(then, said)

        def heard() -> Any:
            with span("environment"):
                said = function(argument)
            return then(said)

        return await self.call(heard)

    async def call(self, function: Callable, *arguments: Any) -> Any:
        if self._calls is None:
            return function(*arguments)
        try:
            return await self._calls.make(function, *arguments, begun=self._begun)
        except CallTimeout:
            self.hung = True
            raise

    def close(self) -> Future:
        """Close the environment after the call that is under way. Done when it is closed, well or not."""
        if self._closed is not None:
            return self._closed
        closed = self._closed = Future()

        def report(call: Future) -> None:
            if error := call.exception():  # its trajectory is what it is
                log.warning("an environment did not close: %s", described(error))
            closed.set_result(None)

        def close(_: Future | None) -> None:
            env, self.env = self.env, None
            if env is None:
                closed.set_result(None)
            elif self._calls is None:
                env.close()
                closed.set_result(None)
            else:
                self._calls.begin_close(env.close).add_done_callback(report)

        if self._last is None:
            close(None)
        else:
            self._last.add_done_callback(close)
        return closed

    def _begun(self, call: Future) -> None:
        self._last = call


def plain(error: BaseException) -> Exception:
    """The error, or one in place of what a future can't carry and what would end more than one call."""
    if isinstance(error, Exception) and not isinstance(error, (StopIteration, StopAsyncIteration)):
        return error
    return RuntimeError(described(error))


def described(error: BaseException) -> str:
    """Its type and what it says, shortened."""
    try:
        return shorten(f"{type(error).__name__}: {error}", LONGEST)
    except Exception:  # it can't say it
        return type(error).__name__
