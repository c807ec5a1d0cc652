"""SIGTERM and Ctrl-C: the first asks a run to stop with a checkpoint, the second ends it at
once."""

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

SIGNALS: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT)
#: Seconds reserved at the end of the grace period for ending the run's processes.
LEAVE_S = 5.0


class Interrupted(Exception):
    """The run was asked to stop, and can do so here; `number` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


class StopRequest:
    """The state of the signals: whether a run was asked to stop, and how soon.

    Until the run is `graceful`, and from the second signal on, they raise `KeyboardInterrupt`
    wherever the main thread is, so that every context manager around it ends what it began. (Ray's
    own calls let that through; of a `SystemExit` they lose the code.)
    """

    def __init__(self) -> None:
        self.graceful = False
        #: Seconds from the first signal to the run's end, checkpoint or not; None: as long as the
        #: checkpoint takes.
        self.grace_period: float | None = None
        self._end: threading.Timer | None = None
        self.number: int | None = None  # the last signal's
        self._installed = False

    def install(self) -> None:
        """Handle both signals. They come to the main thread only: in another one this does
        nothing."""
        self._installed = True
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self._receive)

    def install_again(self) -> None:
        """Handle both signals again, if they were handled: `ray.init` installs handlers of its
        own."""
        if self._installed:
            self.install()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle both signals in the block, and restore their handlers behind it."""
        former = {number: signal.getsignal(number) for number in SIGNALS}
        self.install()
        try:
            yield
        finally:
            self._installed = False
            if self._end is not None:
                self._end.cancel()
            if threading.current_thread() is threading.main_thread():
                for number, handler in former.items():
                    signal.signal(number, handler)

    def _receive(self, number: int, _frame: object) -> None:
        first, self.number = self.number is None, number
        if not (self.graceful and first):
            raise KeyboardInterrupt
        name = signal.Signals(number).name
        within = "as soon as it can"
        if self.grace_period is not None:
            within = f"within {self.grace_period:g} s (runner.grace_period)"
            # of a short grace period, half is for the checkpoint
            self._end = threading.Timer(
                max(self.grace_period - LEAVE_S, self.grace_period / 2), self._overdue
            )
            self._end.daemon = True
            self._end.start()
        log.warning(
            "%s: the run will stop with a checkpoint %s; once more to stop it at once", name, within
        )

    def _overdue(self) -> None:
        """Act as a second signal, from a thread."""
        log.error(
            "runner.grace_period: %g s do not suffice; the run ends without another checkpoint",
            self.grace_period,
        )
        assert self.number is not None
        signal.pthread_kill(threading.main_thread().ident or 0, self.number)

    def check(self) -> None:
        """Raise `Interrupted` if the run was asked to stop."""
        if self.number is not None:
            raise Interrupted(self.number)
