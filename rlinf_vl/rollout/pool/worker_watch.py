"""Checks of busy rollout workers, and what goes wrong in them.

No Ray. Everything here runs in the supervisor's event loop.
"""

import logging
import sys
from collections.abc import Callable
from typing import Generic

from rlinf_vl.errors import reason_of
from rlinf_vl.rollout.pool.slot import Slot, SlotState, W

log = logging.getLogger(__name__)

#: Successive checks of a worker that may fail unexpectedly before it counts as lost.
MAX_BLIND_LOOKS = 30


class WorkerWatch(Generic[W]):
    """Finds workers that are dead or hang."""

    def __init__(
        self, lose: Callable[[Slot[W], W, str, str], None], kill: Callable[[Slot[W]], None]
    ) -> None:
        """
        Args:
            lose: called with a live worker that is dead or hangs, as `Supervisor.lose`.
            kill: called with a slot whose worker hangs while it takes weights.
        """
        self._lose, self._kill = lose, kill
        self._last_fault = ""

    def look_at(self, slot: Slot[W]) -> None:
        """Replace a busy worker that is dead or hangs.

        A starting worker is not checked: it answers nothing before its constructor is done.
        """
        if not slot.busy or slot.state not in (SlotState.LIVE, SlotState.LOADING_WEIGHTS):
            return
        try:
            reason, slot.blind_looks = slot.worker.failure(), 0
        except Exception as error:
            self.note_fault(error)
            slot.blind_looks += 1
            reason = (
                f"it can't be watched: {reason_of(error)}"
                if slot.blind_looks > MAX_BLIND_LOOKS
                else None
            )
        if reason is None:
            return
        if slot.live:
            self._lose(slot, slot.worker, "while idle", reason)
        elif slot.hang is None:
            # Killing it makes `bring_live`, which waits for its weights, raise WorkerDied.
            slot.hang = reason
            self._kill(slot)

    def note_fault(self, error: Exception) -> None:
        """Log an unexpected error of the watch, once while it stays the same."""
        reason = reason_of(error)
        if reason != self._last_fault and not sys.is_finalizing():
            self._last_fault = reason
            log.warning(
                "looking after rollout workers failed, and is tried again: %s",
                reason,
                exc_info=error,
            )
