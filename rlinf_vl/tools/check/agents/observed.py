"""Observers of an agent that is checked: of its result, its refused calls, and the event loop."""

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

from rlinf_vl.extras.agents.contract import AgentTask
from rlinf_vl.extras.agents.drivers import AgentDriver
from rlinf_vl.extras.agents.endpoint import Endpoint
from rlinf_vl.rollout.episode.env_executor import ThreadExecutor

#: Seconds for which one agent may keep the event loop from all others.
BLOCK_S = 1.0
#: Seconds between two looks at the event loop, and looks that must all show the agent.
LOOK_S, MIN_LOOKS = 0.1, 5


class ObservedDriver:
    """Runs agents with another driver, and keeps what the last one returned or raised."""

    def __init__(self, driver: AgentDriver, while_running: Callable[[], Any]) -> None:
        """`while_running` returns a context manager that is entered while an agent runs."""
        self._driver, self._while_running = driver, while_running
        self.timeout_s = driver.timeout_s
        self.returned: Any = None
        self.error: Exception | None = None

    @property
    def hung(self) -> int:
        return self._driver.hung

    async def run(self, task: AgentTask, url: str, key: str) -> Any:
        try:
            with self._while_running():
                self.returned = await self._driver.run(task, url, key)
        except Exception as error:
            self.error = error
            raise
        return self.returned

    def close(self) -> None:
        self._driver.close()


class ObservedEndpoint(Endpoint):
    """An endpoint that keeps its refusals, (code, message) of each."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: list[tuple[str | None, str]] = []

    # Kept here, since an agent may catch the error and say nothing of it.
    def refuse(self, error: Any) -> Any:
        self.refused.append((error.code, str(error)))
        return super().refuse(error)


class LoopWatch:
    """Looks from a thread whether an agent with `async def` keeps the event loop from others.

    While it does, no callback of the loop runs, and every look at the loop's thread finds a line
    of the agent's file. A machine that is merely slow shows other lines, too.
    """

    def __init__(self, executor: ThreadExecutor, file: str) -> None:
        self._executor, self._file = executor, file
        self._end = threading.Event()
        self.blocked_lines: Counter[int] = Counter()

    def __enter__(self) -> None:
        # An event of its own: a former thread that has not seen its end yet would go on for ever.
        self._end = threading.Event()
        threading.Thread(
            target=self._watch, args=(self._end,), name="loop watch", daemon=True
        ).start()

    def __exit__(self, *_: object) -> None:
        self._end.set()

    def _watch(self, end: threading.Event) -> None:
        while not end.is_set():
            echo = self._executor.begin(_echo)
            # Of this moment: the executor leaves a loop that is blocked for ever.
            thread_id = self._executor.loop_thread_id
            start_time, looks = time.monotonic(), 0
            while not echo.done() and not end.wait(LOOK_S):
                line = self._line(sys._current_frames().get(thread_id or 0))
                if line is None:
                    start_time, looks = time.monotonic(), 0
                    continue
                looks += 1
                is_long = time.monotonic() - start_time > BLOCK_S and looks >= MIN_LOOKS
                if is_long and not echo.done():
                    self.blocked_lines[line] += 1
                    return
            end.wait(LOOK_S)

    def _line(self, frame: FrameType | None) -> int | None:
        """Return the line of the agent's file that a thread is in; None if it is elsewhere."""
        while frame is not None and frame.f_code.co_filename != self._file:
            frame = frame.f_back
        return frame.f_lineno if frame is not None else None


async def _echo() -> None:
    """Return as soon as the event loop runs callbacks."""
