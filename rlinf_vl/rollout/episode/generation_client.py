"""Requests answers from an engine and waits for them, piece by piece if thoughts have a budget.

`BusyTime` and `LapClock` measure how long the engine had work. No Ray.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from rlinf_vl.data.unusable import ImageError, RowError
from rlinf_vl.engines.base import Engine, EngineDied
from rlinf_vl.rollout.episode.faults import RolloutFault, error_text
from rlinf_vl.rollout.episode.loop_bridge import asyncio_future
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.rollout.episode.request_builder import ThoughtBudget
from rlinf_vl.rollout.episode.rollout_state import RolloutState
from rlinf_vl.types import ENGINE_FAULT, Completion, Request


class GenerationClient:
    """The client of a worker's engine: submits requests and adds the answers to trajectories.

    Attributes:
        alive_timeout_s: seconds within which the engine must answer a health check; otherwise it
            counts as dead.
        budget: limit on the tokens of a thought, None for no limit.
        busy: measures how long the engine had requests.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        alive_timeout_s: float,
        budget: ThoughtBudget | None = None,
    ) -> None:
        self.engine = engine
        self.renderer = renderer
        self.alive_timeout_s = alive_timeout_s
        self.budget = budget
        self.busy = BusyTime()

    def submit(self, requests: Sequence[Request]) -> list["asyncio.Future[Completion]"]:
        """Submit requests. With a thought budget, each asks for the answer's first piece only.

        Raises:
            EngineDied.
        """
        if self.budget is not None:
            requests = [self.budget.first_piece(request) for request in requests]
        return self._submit(requests)

    def _submit(self, requests: Sequence[Request]) -> list["asyncio.Future[Completion]"]:
        try:
            futures = self.engine.submit(requests)
        except RuntimeError as error:
            raise EngineDied(f"it takes no requests: {error}") from error
        self.busy.watch(futures)
        completions = [asyncio_future(future) for future in futures]
        for completion in completions:
            # Read the exception: asyncio would log it as never retrieved if the waiting episode
            # has ended meanwhile.
            completion.add_done_callback(lambda future: future.cancelled() or future.exception())
        return completions

    async def receive_reply(self, state: RolloutState) -> str:
        """Wait for an episode's answer, add it to its trajectory, and return its reply.

        The reply is the answer's text after the thoughts.

        Raises:
            EngineDied, RolloutFault.
            RowError, ImageError: an image of the request can't be used.
        """
        request, completion, sample_index = state.request, state.completion, state.sample_index
        assert request is not None and completion is not None
        processor, seed = self.renderer.processor, request.seeds[sample_index]
        piece_request: Request | None = request
        while piece_request is not None:
            sample = (await self._wait_for(completion)).samples[sample_index]
            state.add_sample(piece_request, sample, processor, piece=piece_request is not request)
            if sample.finish_reason == "error":
                raise RolloutFault(f"{ENGINE_FAULT}: it gave up on this sample")
            piece_request = None
            if self.budget and len(sample.ids):
                piece_request = self.budget.next_piece(request, state.answer, seed, state.session)
            if piece_request is not None:
                # Further pieces differ between samples, so each has a request of its own.
                (completion,), sample_index = self._submit([piece_request]), 0
        thoughts = self.renderer.thoughts(state.answer)
        state.turns[-1] = replace(state.turns[-1], thought=thoughts.tokens)
        if self.budget and not set(state.answer[-1:].tolist()) & set(request.sampling.stop_ids):
            # The last piece may have stopped at `<think>`, which is no stop id of the request.
            state.turns[-1] = replace(state.turns[-1], finish_reason="length")
        return thoughts.reply

    async def _wait_for(self, completion: "asyncio.Future[Completion]") -> Completion:
        """Wait for a completion, and tell a dead engine from a request that failed."""
        try:
            return await completion
        except Exception as error:
            # A dead engine fails every request with an error of its own kind: ask it.
            if not await asyncio.to_thread(self.engine.alive, self.alive_timeout_s):
                raise EngineDied(f"the engine died: {error}") from error
            if not isinstance(error, (RowError, ImageError)):
                raise RolloutFault(f"{ENGINE_FAULT}: {error_text(error)}") from error
            raise


class BusyTime:
    """The time during which at least one watched future was unfinished. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._seconds = 0.0
        self._since = 0.0

    def watch(self, futures: Sequence[Future]) -> None:
        self._change(len(futures))
        for future in futures:
            future.add_done_callback(lambda _: self._change(-1))

    def seconds(self) -> float:
        """Return the busy seconds up to now."""
        return self._change(0)

    def _change(self, by: int) -> float:
        """Add `by` to the number of unfinished futures; return the busy seconds up to now."""
        with self._lock:
            time_s = time.monotonic()
            if self._running:
                self._seconds += time_s - self._since
            self._since = time_s
            self._running += by
            return self._seconds


class LapClock:
    """A stopwatch of an engine's busy seconds and of elapsed seconds, read lap by lap.

    Time during which no batch is open belongs to no lap.
    """

    def __init__(self, busy: Callable[[], float]) -> None:
        self._busy = busy
        self._open_batches = 0
        self._lap_start = (0.0, 0.0)  # (busy seconds, clock)

    def begin(self) -> None:
        """Open a batch; the first one begins a lap."""
        if not self._open_batches:
            self.lap()
        self._open_batches += 1

    def end(self) -> None:
        """Close a batch."""
        self._open_batches -= 1

    def lap(self) -> tuple[float, float]:
        """End a lap and begin the next; return its busy seconds and its elapsed seconds."""
        lap_start, self._lap_start = self._lap_start, (self._busy(), time.monotonic())
        return self._lap_start[0] - lap_start[0], self._lap_start[1] - lap_start[1]
