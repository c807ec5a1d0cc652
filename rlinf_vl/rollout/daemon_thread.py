"""Blocking calls of an event loop, in threads that delay nothing else."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def in_daemon_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function that may block, in a thread of its own.

    Unlike an executor's threads, it never delays another call, nor the end of the process.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def end(value: Any, error: Exception | None) -> None:
        if result.cancelled():
            return
        if error is None:
            result.set_result(value)
        else:
            result.set_exception(error)

    def run() -> None:
        value, error = None, None
        try:
            value = function(*arguments)
        except Exception as raised:
            error = raised
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(end, value, error)

    threading.Thread(target=run, name="rollout-supervisor-call", daemon=True).start()
    return await result
