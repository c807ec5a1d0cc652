"""How long an engine had work."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future


class BusyTime:
    """Time in which at least one of the futures that it watches was not done. Thread-safe."""

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
        """So far."""
        return self._change(0)

    def _change(self, by: int) -> float:
        with self._lock:
            now = time.monotonic()
            if self._running:
                self._seconds += now - self._since
            self._since = now
            self._running += by
            return self._seconds


class LapClock:
    """Seconds in which an engine had work, and all that passed, since the lap before; it stands while nothing is under way."""

    def __init__(self, busy: Callable[[], float]) -> None:
        self._busy = busy
        self._under_way = 0
        self._last = (0.0, 0.0)

    def begin(self) -> None:
        if not self._under_way:
            self.lap()
        self._under_way += 1

    def end(self) -> None:
        self._under_way -= 1

    def lap(self) -> tuple[float, float]:
        before, self._last = self._last, (self._busy(), time.monotonic())
        return self._last[0] - before[0], self._last[1] - before[1]
