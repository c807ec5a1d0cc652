"""The memory that a smoke run takes while a stage lasts."""

import threading
from contextlib import suppress

import psutil

from rlinf_vl.runtime.gpus import used_gpu_memory

GIB = 2**30
#: Seconds between two looks: NVML answers at once, a look at all processes of a CPU run takes some
#: milliseconds.
POLL_S = {"cuda": 0.1, "cpu": 0.5}


class MemoryWatch:
    """Watches memory in a thread: of the fullest GPU, or on CPUs of all processes together.

    Used memory is counted from what was used when the watch began.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._peak = 0
        self._start = used_gpu_memory() if device == "cuda" else ()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="memory watch", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Forget the peak so far."""
        self._peak = self.used()

    def peak_gib(self) -> float:
        """Return the largest memory since `begin`."""
        self._peak = max(self._peak, self.used())
        return self._peak / GIB

    def used(self) -> int:
        """Return the bytes that are used now."""
        if self._device == "cuda":
            former = self._start or (0,)
            pairs = zip(used_gpu_memory(), former, strict=True)
            return max(present - earlier for present, earlier in pairs)
        return _processes_bytes()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._ended.wait(POLL_S[self._device]):
            self._peak = max(self._peak, self.used())


def _processes_bytes() -> int:
    """Return the bytes that this process and those below it have for themselves."""
    process = psutil.Process()
    total = 0
    for member in (process, *process.children(recursive=True)):
        with suppress(psutil.Error):
            memory = member.memory_info()
            total += memory.rss - memory.shared  # pyright: ignore[reportAttributeAccessIssue]
    return total
