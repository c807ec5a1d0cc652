"""SIGTERM and Ctrl-C: the first asks a run to stop with a checkpoint, the second ends it at once."""

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(Exception):
    """The run was asked to stop, and can do so here; `number` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


class StopRequest:
    """What the signals have asked for.

    Until the run is `graceful`, and from the second signal on, they raise `KeyboardInterrupt` wherever the main thread is, so that
    every context manager around it ends what it began. (Ray's own calls let that through; of a `SystemExit` they lose the code.)
    """

    def __init__(self) -> None:
        self.graceful = False
        self.number: int | None = None  # the last signal's

    def install(self) -> None:
        """Handle both signals; again after `ray.init`, which installs handlers of its own. Signals come to the main thread only:
        in another one this does nothing."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self._receive)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle both signals in the block; behind it they mean what they meant before."""
        former = {number: signal.getsignal(number) for number in SIGNALS}
        self.install()
        try:
            yield
        finally:
            if threading.current_thread() is threading.main_thread():
                for number, handler in former.items():
                    signal.signal(number, handler)

    def _receive(self, number: int, _frame: object) -> None:
        first, self.number = self.number is None, number
        if not (self.graceful and first):
            raise KeyboardInterrupt
        name = signal.Signals(number).name
        log.warning("%s: the run will stop with a checkpoint as soon as it can; once more to stop it at once", name)

    def check(self) -> None:
        """Raise `Interrupted` if the run was asked to stop."""
        if self.number is not None:
            raise Interrupted(self.number)
