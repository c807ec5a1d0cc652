"""The most memory that a process has for itself while something runs."""

import threading
from pathlib import Path


class PeakOfMemory:
    """The most anonymous memory of this process above that at the beginning, in bytes, looked at all the time: what is mapped from
    files does not count."""

    def __enter__(self) -> "PeakOfMemory":
        self.start, self.peak, self._ended = anonymous(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(0.001):
            self.peak = max(self.peak, anonymous() - self.start)

    def __exit__(self, *_) -> None:
        self._ended.set()
        self._thread.join()


def anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024
