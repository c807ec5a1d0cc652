"""What other threads have for an event loop."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, ref

T = TypeVar("T")


class PerLoop(Generic[T]):
    """One object per event loop, made when it is first asked for: what is waited for belongs to one."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: WeakKeyDictionary[asyncio.AbstractEventLoop, T] = WeakKeyDictionary()

    def __call__(self) -> T:
        loop = asyncio.get_running_loop()
        if loop not in self._made:
            self._made[loop] = self._make()
        return self._made[loop]


class Inbox:
    """Functions that other threads want called in an event loop, which is woken once for all that have come meanwhile: to wake
    it is a system call, during which another thread takes the interpreter. The functions raise nothing."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)  # which `inbox` has this for as long as it lives
        self._waiting: deque[Callable[[], Any]] = deque()
        self._woken = False

    def put(self, function: Callable[[], Any]) -> None:
        """From any thread. Nothing happens once the loop is closed."""
        self._waiting.append(function)
        if not self._woken and (loop := self._loop()) is not None:
            self._woken = True
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        self._woken = False  # first, as what comes from now on may be missed below
        while self._waiting:
            self._waiting.popleft()()


inbox = PerLoop(lambda: Inbox(asyncio.get_running_loop()))
"""That of the running loop."""


def awaitable(future: "Future[T]") -> "asyncio.Future[T]":
    """The same as `asyncio.wrap_future`, by way of the running loop's inbox."""
    here = inbox()
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
    future.add_done_callback(lambda _: here.put(copy))
    return answer


async def done(future: Future, timeout_s: float) -> bool:
    """Wait until it is done, or the time is over; whether it is done. Cancelling this leaves the future as it is."""
    if future.done():
        return True
    here, loop = inbox(), asyncio.get_running_loop()
    woken = loop.create_future()

    def wake() -> None:
        if not woken.done():
            woken.set_result(None)

    future.add_done_callback(lambda _: here.put(wake))
    timer = loop.call_later(timeout_s, wake)
    try:
        await woken
    finally:
        timer.cancel()
    return future.done()
