"""Hands results of worker threads to an asyncio event loop, with few wake-ups of the loop."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, ref

T = TypeVar("T")


class PerLoop(Generic[T]):
    """One object per event loop, made at its first use.

    Semaphores, locks and futures of asyncio belong to one loop; tests and notebooks run several.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._objects: WeakKeyDictionary[asyncio.AbstractEventLoop, T] = WeakKeyDictionary()

    def __call__(self) -> T:
        """Return the running loop's object."""
        loop = asyncio.get_running_loop()
        if loop not in self._objects:
            self._objects[loop] = self._make()
        return self._objects[loop]


class Inbox:
    """A queue of functions that other threads want called in an event loop.

    The loop is woken once for all functions queued meanwhile: waking it is a system call, during
    which another thread takes the interpreter. The functions must not raise.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # Weak, because `inbox` keeps this object as long as the loop lives.
        self._loop = ref(loop)
        self._waiting: deque[Callable[[], Any]] = deque()
        self._woken = False  # whether the loop will call `_empty`

    def put(self, function: Callable[[], Any]) -> None:
        """Have a function called in the loop; does nothing once the loop is closed. Thread-safe."""
        self._waiting.append(function)
        if not self._woken and (loop := self._loop()) is not None:
            self._woken = True
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        # Before the queue is read: a function queued after the last look must wake the loop again.
        self._woken = False
        while self._waiting:
            self._waiting.popleft()()


inbox = PerLoop(lambda: Inbox(asyncio.get_running_loop()))
"""The running loop's inbox."""


def awaitable(future: "Future[T]") -> "asyncio.Future[T]":
    """Return an asyncio future of a thread's future: `asyncio.wrap_future` through the inbox."""
    loop_inbox = inbox()
    answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def copy() -> None:
        if answer.done():
            return
        if future.cancelled():
            answer.cancel()
        elif error := future.exception():
            answer.set_exception(error)
        else:
            answer.set_result(future.result())

    answer.add_done_callback(lambda answer: answer.cancelled() and future.cancel())
    future.add_done_callback(lambda _: loop_inbox.put(copy))
    return answer


async def done(future: Future, timeout_s: float) -> bool:
    """Wait up to `timeout_s` for a future; return whether it is done.

    Cancelling the wait does not cancel the future.
    """
    if future.done():
        return True
    loop_inbox, loop = inbox(), asyncio.get_running_loop()
    woken = loop.create_future()

    def wake() -> None:
        if not woken.done():
            woken.set_result(None)

    future.add_done_callback(lambda _: loop_inbox.put(wake))
    timer = loop.call_later(timeout_s, wake)
    try:
        await woken
    finally:
        timer.cancel()
    return future.done()
