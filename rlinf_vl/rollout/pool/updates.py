"""Keeps all workers on the newest weights: syncs to live workers, and catch-up of new ones.

No Ray. Everything here runs in the supervisor's event loop, so "live" cannot change in between:
- The receivers of a sync are the slots that are live when it begins. It waits for them alone.
- A worker that starts fetches the full weights that the ranks sent last, whatever the sync
  strategy. It becomes live when it holds the newest weights of which a sync has begun.
- A sync may begin long before its weights exist (it is queued behind the ranks' training). If the
  strategy allows (`WeightUpdate.joinable`), a worker that holds the preceding weights becomes live
  then and joins the sync late. Otherwise a new worker might miss every sync by a little.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol

from rlinf_vl.rollout.pool.slot import Slot, SlotState, W, WeightsKey, WorkerDied

if TYPE_CHECKING:
    from rlinf_vl.weights.sender import Snapshot

#: Seconds that a worker has to take weights once they exist.
LOAD_TIMEOUT_S = 600.0

#: Returns the weights that the ranks sent last, None while they have sent none. It may wait for
#: ranks that train.
SnapshotSource = Callable[[], "Snapshot | None"]


class Receiver(NamedTuple, Generic[W]):
    """A slot that takes part in a sync, with its worker of then."""

    slot: Slot[W]
    worker: W


@dataclass(eq=False)
class WeightUpdate(Generic[W]):
    """One weight sync.

    Attributes:
        receivers: the slots that take part, with their workers: those live when it began, and late
            ones.
        base: the weights that receivers hold before.
        key: the weights that it brings; None until they are offered.
        take: makes a worker take the weights.
        joinable: whether a worker that holds `base` may join late.
        answers: the worker's answer by slot; None if the worker died.
    """

    receivers: list[Receiver[W]]
    base: WeightsKey | None
    key: WeightsKey | None = None
    take: Callable[[W], Awaitable[Any]] | None = None
    joinable: bool = False
    answers: dict[Slot[W], asyncio.Task[Any]] = field(default_factory=dict)


class SlotKeeper(Protocol[W]):
    """The part of the `Supervisor` that weight updates use."""

    @property
    def slots(self) -> list[Slot[W]]: ...

    async def owed(self, slot: Slot[W], answer: Awaitable[Any]) -> Any:
        """Wait for an answer that the slot's worker owes."""

    def lose(self, slot: Slot[W], worker: W, occasion: str, reason: str) -> None:
        """Replace a live worker that died."""

    def fail(self, slot: Slot[W], error: Exception) -> None:
        """Fail everyone who waits for the slot, or for groups."""


class WeightUpdates(Generic[W]):
    """The newest weights, and the sync that is running.

    Attributes:
        newest: the weights offered last; None: those with which workers start.
        update: the running sync.
    """

    def __init__(
        self, keeper: SlotKeeper[W], in_thread: Callable[..., Coroutine[Any, Any, Any]]
    ) -> None:
        self._keeper = keeper
        self._in_thread = in_thread
        self._origin = 0  # how often weights were forgotten
        self.newest: WeightsKey | None = None
        self.update: WeightUpdate[W] | None = None
        self._snapshot_source: SnapshotSource | None = None
        self._fetching: asyncio.Task[Snapshot | None] | None = None
        self._changed = asyncio.Event()

    # --- a sync -----------------------------------------------------------------------------------

    def open(self) -> WeightUpdate[W]:
        """Begin a sync with the slots that are live now. None becomes live before it ends."""
        receivers = [Receiver(slot, slot.worker) for slot in self._keeper.slots if slot.live]
        self.update = WeightUpdate(receivers, base=self.newest)
        return self.update

    def offer(
        self,
        update: WeightUpdate[W] | None,
        take: Callable[[W], Awaitable[Any]],
        version: int,
        snapshot_source: SnapshotSource,
        joinable: bool,
    ) -> WeightUpdate[W]:
        """Make the receivers of a sync take its weights, which the ranks offer or will offer.

        Args:
            update: the sync, if `open` has begun one, whose strategy must know its receivers before
                weights are offered; None: all live workers take part.
            take: makes a worker take the weights.
            snapshot_source: returns the same weights, or newer ones, for a worker that starts.
            joinable: whether a worker that becomes live meanwhile may take them, too.
        """
        update = update or self.open()
        self._snapshot_source, self._fetching = snapshot_source, None
        self.newest = WeightsKey(self._origin, version)
        update.key, update.take, update.joinable = self.newest, take, joinable
        for slot, worker in update.receivers:
            self._begin_take(update, slot, worker)
        self._announce()
        return update

    async def settle(self, update: WeightUpdate[W]) -> list[Any]:
        """Wait until all receivers have the weights, which exist by now; end the sync.

        Returns:
            The receivers' answers; None for a worker that died meanwhile.
        """
        try:
            while waiting := [task for task in update.answers.values() if not task.done()]:
                done, _ = await asyncio.wait(waiting, timeout=LOAD_TIMEOUT_S)
                if not done:
                    self._lose_receivers(update)
            return [None if task.cancelled() else task.result() for task in update.answers.values()]
        finally:
            if self.update is update:
                self.update = None
            self._announce()

    def forget(self) -> None:
        """Forget offered weights: new workers keep those they start with until the next sync."""
        self._snapshot_source = self._fetching = self.newest = self.update = None
        self._origin += 1
        self._announce()

    def _begin_take(self, update: WeightUpdate[W], slot: Slot[W], worker: W) -> None:
        """Make a live worker take the weights of a sync."""

        async def take() -> Any:
            assert update.take is not None, "a sync that was not offered"
            try:
                answer = await self._keeper.owed(slot, update.take(worker))
            except WorkerDied as death:
                self._keeper.lose(slot, worker, "during a weight sync", str(death))
                return None
            if slot.worker is worker:
                slot.weights = update.key
            return answer

        task = asyncio.ensure_future(take())
        # Read the exception, which asyncio would log otherwise if `settle` is never called.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        update.answers[slot] = task

    def _lose_receivers(self, update: WeightUpdate[W]) -> None:
        """Replace every worker that has not answered."""
        for slot, worker in update.receivers:
            if not update.answers[slot].done():
                self._keeper.lose(slot, worker, "during a weight sync", _too_slow())
                update.answers[slot].cancel()

    def _announce(self) -> None:
        """Wake the starting workers, which wait for other weights or for the end of a sync."""
        self._changed.set()
        self._changed = asyncio.Event()

    # --- a worker that starts ---------------------------------------------------------------------

    async def bring_live(self, slot: Slot[W]) -> None:
        """Bring a starting worker to the newest weights and make its slot live.

        No `await` lies between the check of the weights and the move to live, so no sync can begin
        in between.

        Raises:
            WorkerDied.
        """
        while True:
            changed, update, newest = self._changed, self.update, self.newest
            if update is not None and not update.joinable:
                # The receivers are fixed (a process group, for example): wait for the sync's end.
                await changed.wait()
            elif newest is None or slot.weights == newest:
                return slot.move(SlotState.LIVE)
            elif update is not None and slot.weights == update.base:
                slot.move(SlotState.LIVE)
                update.receivers.append(Receiver(slot, slot.worker))
                return self._begin_take(update, slot, slot.worker)
            else:
                slot.weights = await self._load(slot)
                # The ranks may send weights that are newer than those offered: wait for the offer.
                if slot.weights != newest and changed is self._changed:
                    await changed.wait()

    async def _load(self, slot: Slot[W]) -> WeightsKey | None:
        """Load the weights that the ranks sent last into a worker; return which these were."""
        changed, origin = self._changed, self._origin
        try:
            snapshot = await self._fetch_snapshot()
            if snapshot is None:
                return slot.weights
            loading = slot.worker.call("load_snapshot", snapshot)
            await self._keeper.owed(slot, _in_time(loading))
        except WorkerDied:
            raise
        except Exception as error:
            # The ranks are lost, not this worker: it waits for a sync from new ranks.
            if changed is self._changed:
                self._keeper.fail(slot, error)
                await changed.wait()
                slot.fault = None
            return slot.weights
        return WeightsKey(origin, snapshot.version)

    async def _fetch_snapshot(self) -> "Snapshot | None":
        """Fetch the weights that the ranks sent last, once for all workers that ask meanwhile."""
        if self._fetching is None:
            assert self._snapshot_source is not None, (
                "there are no other weights than those of the start"
            )
            self._fetching = asyncio.ensure_future(self._in_thread(self._snapshot_source))
            self._fetching.add_done_callback(self._end_fetching)
        return await asyncio.shield(self._fetching)

    def _end_fetching(self, task: "asyncio.Task[Snapshot | None]") -> None:
        if self._fetching is task:
            self._fetching = None
        if not task.cancelled():
            task.exception()  # raised where it is awaited; read here so that asyncio doesn't log it


async def _in_time(loading: Awaitable[Any]) -> Any:
    """Wait for a worker to load weights. Raises WorkerDied after `LOAD_TIMEOUT_S`."""
    try:
        return await asyncio.wait_for(loading, LOAD_TIMEOUT_S)
    except TimeoutError:
        raise WorkerDied(_too_slow()) from None


def _too_slow() -> str:
    return f"it did not take the weights within {LOAD_TIMEOUT_S:g} s"
