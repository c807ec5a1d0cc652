"""Hands results of worker threads to an asyncio event loop, with few wake-ups of the loop."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
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
        # Weak, so that a loop that has ended is freed with its object.
        self._objects: WeakKeyDictionary[asyncio.AbstractEventLoop, T] = WeakKeyDictionary()

    def __call__(self) -> T:
        """Return the running loop's object."""
        loop = asyncio.get_running_loop()
        if loop not in self._objects:
            self._objects[loop] = self._make()
        return self._objects[loop]


class LoopBridge:
    """A queue of functions that other threads want called in an event loop.

    The loop is woken once for all functions queued meanwhile: waking it is a system call, during
    which another thread takes the interpreter. The functions must not raise.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # Weak, because `loop_bridge` keeps this object as long as the loop lives.
        self._loop = ref(loop)
        self._queued: deque[Callable[[], Any]] = deque()
        self._woken = False  # whether the loop will call `_run_queued`

    def call_in_loop(self, function: Callable[[], Any]) -> None:
        """Have a function called in the loop; does nothing once the loop is closed. Thread-safe."""
        self._queued.append(function)
        if not self._woken and (loop := self._loop()) is not None:
            self._woken = True
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._run_queued)

    def _run_queued(self) -> None:
        # Before the queue is read: a function queued after the last look must wake the loop again.
        self._woken = False
        while self._queued:
            self._queued.popleft()()


loop_bridge = PerLoop(lambda: LoopBridge(asyncio.get_running_loop()))
"""The running loop's bridge."""


def asyncio_future(future: "Future[T]") -> "asyncio.Future[T]":
    """Return an asyncio future of a thread's future: `asyncio.wrap_future` through the bridge."""
    bridge = loop_bridge()
    result: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def copy() -> None:
        # Its waiter may have cancelled it before this call reached the loop.
        if result.done():
            return
        if future.cancelled():
            result.cancel()
        elif error := future.exception():
            result.set_exception(error)
        else:
            result.set_result(future.result())

    result.add_done_callback(lambda result: result.cancelled() and future.cancel())
    future.add_done_callback(lambda _: bridge.call_in_loop(copy))
    return result


async def cancel_all(futures: Iterable["asyncio.Future | None"]) -> None:
    """Cancel futures, and wait until all have ended. Their results and errors are dropped."""
    pending = [future for future in futures if future is not None]
    for future in pending:
        future.cancel()
    await asyncio.gather(*pending, return_exceptions=True)


async def wait_done(future: Future, timeout_s: float) -> bool:
    """Wait up to `timeout_s` for a future; return whether it is done.

    Cancelling the wait does not cancel the future.
    """
    if future.done():
        return True
    bridge, loop = loop_bridge(), asyncio.get_running_loop()
    woken = loop.create_future()

    def wake() -> None:
        # Both the future and the timer call this.
        if not woken.done():
            woken.set_result(None)

    future.add_done_callback(lambda _: bridge.call_in_loop(wake))
    timer = loop.call_later(timeout_s, wake)
    try:
        await woken
    finally:
        timer.cancel()
    return future.done()
