"""Users' reward functions and environments, called on the thread that waits for groups.

There, the prompt of a debugger works, and Ctrl-C reaches it. No call has a limit of time or memory:
whoever stands at a breakpoint has the time that it takes.
"""

import asyncio
import inspect
import math
import sys
from bdb import BdbQuit
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from rlinf_vl.driver.local.event_loop import outside_event_loop
from rlinf_vl.errors import never_reported
from rlinf_vl.rewards.grading_pool import GradingError
from rlinf_vl.rewards.processes import Limits, error_text, load_function, trace_of
from rlinf_vl.rewards.result import Answer, Result
from rlinf_vl.rollout.episode.env_executor import plain_error
from rlinf_vl.types import Problem


class DirectFunctions:
    """Users' reward functions in this process, in the place of a `ProcessPool`."""

    def __init__(
        self,
        functions: Sequence[tuple[str, Mapping[str, Any]]],
        files: Mapping[str, str],
        limits: Limits,
        first_report: Callable[[str], bool] = never_reported,
    ) -> None:
        self._functions = [load_function(name, kwargs, files) for name, kwargs in functions]
        self._limits = limits
        self._printed_errors: set[str] = set()

    def submit(
        self,
        function: int,
        problem: Problem,
        answers: Sequence[Answer],
        *,
        images: bool,
        together: bool,
    ) -> "list[Future[Result]]":
        """Score answers; return a future of each that is done. See `ProcessPool.submit`."""
        problem = problem if images else replace(problem, images=())
        # A coroutine function gets an event loop of its own.
        with outside_event_loop():
            results = self._functions[function].results(problem, answers, math.inf)
        futures: list[Future[Result]] = []
        for result in results:
            futures.append(Future())
            if isinstance(result, Exception):
                futures[-1].set_exception(self._reported(result))
            else:
                futures[-1].set_result(result)
        return futures

    def _reported(self, error: Exception) -> GradingError:
        """Print an error's traceback, if it is the first of its text; return the verdict."""
        # `q` at a breakpoint is to end the run, not to be a wrong answer.
        if isinstance(error, BdbQuit):
            raise KeyboardInterrupt
        text = error_text(error, self._limits)
        if text not in self._printed_errors:
            self._printed_errors.add(text)
            print(trace_of(error), end="", file=sys.stderr, flush=True)
        return GradingError(text)

    def close(self) -> None:
        """Do nothing: there is no process."""


class DirectExecutor:
    """Runs calls of environments on this thread, in the place of a `ThreadExecutor`."""

    timeout_s = math.inf

    @property
    def hung(self) -> int:
        """Return 0: a call that hangs holds up its caller."""
        return 0

    async def call(
        self,
        function: Callable[[], Any],
        on_begin: Callable[[Future], None],
        timeout_s: float | None = None,
    ) -> Any:
        """Call a function or coroutine function and return its result, without a limit.

        Raises as `ThreadExecutor.call`.
        """
        try:
            result = function()
            return await result if inspect.isawaitable(result) else result
        except (KeyboardInterrupt, asyncio.CancelledError):
            raise
        except BdbQuit:
            raise KeyboardInterrupt from None
        except BaseException as error:
            raise plain_error(error) from error

    def begin_close(self, function: Callable[[], Any]) -> Future:
        """Call an environment's `close`; the future is done when it is closed."""
        closed: Future = Future()

        def end(task: asyncio.Task[None]) -> None:
            if task.cancelled() or (error := task.exception()) is None:
                closed.set_result(None)
            else:
                closed.set_exception(error)

        asyncio.ensure_future(self.call(function, on_begin=lambda _: None)).add_done_callback(end)
        return closed
