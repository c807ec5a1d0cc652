"""What other threads have for an event loop."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

T = TypeVar("T")


class Inbox:
    """Functions that other threads want called in an event loop, which is woken once for all that have come meanwhile: to wake
    it is a system call, during which another thread takes the interpreter. The functions raise nothing."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)  # whose inbox `_INBOXES` has as long as there is the loop
        self._waiting: deque[Callable[[], Any]] = deque()
        self._woken = False

    @classmethod
    def here(cls) -> "Inbox":
        """That of the running loop."""
        loop = asyncio.get_running_loop()
        inbox = _INBOXES.get(loop)
        if inbox is None:
            inbox = _INBOXES[loop] = cls(loop)
        return inbox

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


_INBOXES: "WeakKeyDictionary[asyncio.AbstractEventLoop, Inbox]" = WeakKeyDictionary()


def awaitable(future: "Future[T]") -> "asyncio.Future[T]":
    """The same as `asyncio.wrap_future`, by way of the running loop's inbox."""
    inbox = Inbox.here()
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
    future.add_done_callback(lambda _: inbox.put(copy))
    return answer


async def done(future: Future, timeout_s: float) -> bool:
    """Wait until it is done, or the time is over; whether it is done. Cancelling this leaves the future as it is."""
    if future.done():
        return True
    inbox, loop = Inbox.here(), asyncio.get_running_loop()
    woken = loop.create_future()

    def wake() -> None:
        if not woken.done():
            woken.set_result(None)

    future.add_done_callback(lambda _: inbox.put(wake))
    timer = loop.call_later(timeout_s, wake)
    try:
        await woken
    finally:
        timer.cancel()
    return future.done()
