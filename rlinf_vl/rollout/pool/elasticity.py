"""Slots that join with new nodes, and the loss of slots' places with theirs.

No Ray. Everything here runs in the supervisor's event loop.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, Generic, Protocol

from rlinf_vl.errors import reason_of
from rlinf_vl.rollout.pool.slot import Place, Slot, SlotState, W

#: Workers that are tried on a node that has joined, before it is given up.
JOIN_TRIES = 3
#: Seconds between two looks at nodes.
LOOK_S = 1.0


class SlotStarter(Protocol[W]):
    """The part of the `Supervisor` that starts workers."""

    @property
    def slots(self) -> list[Slot[W]]: ...

    def make_slot(self, number: int) -> Slot[W]:
        """Make a slot with a worker that starts."""
        ...

    async def start_worker(self, slot: Slot[W]) -> str | None:
        """Wait until the slot's worker is live; return why it failed, or None."""

    async def renew(self, slot: Slot[W]) -> None:
        """Put a new worker into the slot of a lost one."""

    def admit(self, slot: Slot[W]) -> None:
        """Give a slot that is live a share of the work."""

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine as a task."""


class Elasticity(Generic[W]):
    """Looks at nodes, and starts workers on new ones.

    Attributes:
        joining: the slots that join, and are not live yet.
    """

    def __init__(
        self,
        starter: SlotStarter[W],
        note_fault: Callable[[Exception], None],
        *,
        report: Callable[..., None],
        places: Callable[[Collection[int]], Mapping[int, Place]],
        newcomers: Callable[[], Sequence[int]],
        in_thread: Callable[..., Awaitable[Any]],
    ) -> None:
        """`note_fault` logs an unexpected error. `report` to `in_thread`: as in `Supervisor`."""
        self.joining: list[Slot[W]] = []
        self._starter, self._note_fault = starter, note_fault
        self._report = report
        self._places, self._newcomers, self._in_thread = places, newcomers, in_thread

    async def watch(self) -> None:
        """Look for lost nodes of starting workers, and for new nodes, every `LOOK_S` seconds."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                slots = [*self._starter.slots, *self.joining]
                await self.look_at_places([s for s in slots if s.state is SlotState.STARTING])
                for number in await self._in_thread(self._newcomers):
                    self._starter.spawn(self._join(number))
            except Exception as error:  # must not end the watch
                self._note_fault(error)

    async def look_at_places(self, slots: Sequence[Slot[W]]) -> None:
        """Update the places of slots; they stay as they were if that fails."""
        if not slots:
            return
        try:
            places = await self._in_thread(self._places, [slot.number for slot in slots])
        except Exception as error:
            return self._note_fault(error)
        for slot in slots:
            slot.place = places.get(slot.number, Place.THERE)

    async def _join(self, number: int) -> None:
        """Start a worker in a new slot, and add the slot once it is live; give up if that fails."""
        slot = self._starter.make_slot(number)
        self.joining.append(slot)
        try:
            reason = await self._starter.start_worker(slot)
            for _ in range(JOIN_TRIES - 1):
                if reason is None:
                    break
                await self.look_at_places([slot])
                if slot.place is Place.GONE:
                    break
                await self._starter.renew(slot)
                reason = await self._starter.start_worker(slot)
        except Exception as error:
            reason = reason_of(error)
        finally:
            self.joining.remove(slot)
        if reason is None:
            # Nothing else has run in the loop since it became live, so it misses no work or sync.
            self._starter.admit(slot)
            message = f"rollout worker {number} joined: {len(self._starter.slots)} now"
            self._report(message, "worker_joined")
        else:
            await self._in_thread(slot.worker.kill)
            self._report(f"rollout worker {number} did not join: {reason}", "worker_left")
