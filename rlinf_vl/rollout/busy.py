"""Measures how long an engine had work."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future


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
