"""An event loop that a blocking caller drives."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from rlinf_vl.rollout.episode.loop_bridge import cancel_all


@contextmanager
def outside_event_loop() -> Iterator[None]:
    """Allow another event loop to run in the block, on a thread that is inside one.

    A notebook's cell runs inside the kernel's loop, and a reward function inside the pool's; both
    loops wait until the call returns.
    """
    # asyncio has no public way to do so: it refuses a second loop on a thread, because the first
    # one would starve. Here the first one waits anyway.
    running = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(running)


class CallersLoop:
    """An event loop that runs only while somebody calls `run`, on the caller's thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run the loop until the coroutine has returned, and return its result."""
        with outside_event_loop():
            return self._loop.run_until_complete(coroutine)

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Begin a task, which goes on during the calls of `run`."""
        return self._loop.create_task(coroutine)

    def close(self) -> None:
        """Cancel all tasks, wait for their ends, and close the loop."""

        async def end() -> None:
            # A task that is dropped while it waits would never run its `finally`, which closes
            # environments.
            await cancel_all(asyncio.all_tasks() - {asyncio.current_task()})
            await asyncio.get_running_loop().shutdown_default_executor()

        self.run(end())
        self._loop.close()
