"""Who has which weights: syncs to the workers that are live, and the newest weights for a worker that starts. No Ray.

Everything here runs in the supervisor's event loop, so that "live" means one thing:
- The receivers of a sync are the slots that are live when it begins. It waits for them, and for nobody else.
- A worker that starts asks the ranks for the weights that they sent last, whole, however weights are synced. It is live from
  the moment at which it holds the newest weights of which a sync has begun.
- A sync may begin long before its weights are made (it is queued behind the ranks' training). A worker that holds the weights
  before them then is live, too, and takes part late, where the strategy lets it (`WeightUpdate.joinable`). Otherwise it might
  come too late for ever.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol

from rlinf_vl.rollout.slot import Slot, SlotState, W, WorkerDied

if TYPE_CHECKING:
    from rlinf_vl.transport.sender import Snapshot

#: Seconds that a worker has to take weights that are there.
LOAD_TIMEOUT_S = 600.0

#: Which weights: how often weights were forgotten before them, and their version.
WeightsKey = tuple[int, int]


#: Returns the weights that the ranks sent last; None while they have sent none. May wait for ranks that train.
SnapshotSource = Callable[[], "Snapshot | None"]


@dataclass(eq=False)
class WeightUpdate(Generic[W]):
    """One weight sync.

    Attributes:
        receivers: the slots that were live when it began, or that take part late, and the workers in them.
        base: the weights that receivers hold.
        key: the weights that it brings; None while they are not offered.
        take: has a worker take them.
        joinable: whether a worker that holds `base` may take part late.
        answers: by slot, what the worker returned; None where it died.
    """

    receivers: list[tuple[Slot[W], W]]
    base: WeightsKey | None
    key: WeightsKey | None = None
    take: Callable[[W], Awaitable[Any]] | None = None
    joinable: bool = False
    answers: dict[Slot[W], asyncio.Task[Any]] = field(default_factory=dict)


class SlotKeeper(Protocol[W]):
    """The `Supervisor`, as far as weights need it."""

    @property
    def slots(self) -> list[Slot[W]]: ...

    async def owed(self, slot: Slot[W], answer: Awaitable[Any]) -> Any:
        """Wait for an answer that the slot's worker owes."""

    def lose(self, slot: Slot[W], worker: W, what: str, reason: str) -> None:
        """Have a live worker replaced that died."""

    def fail(self, slot: Slot[W], error: Exception) -> None:
        """Tell whoever waits that the slot can't be live."""


class WeightUpdates(Generic[W]):
    """The weights that are newest, and the sync that has begun and not ended."""

    def __init__(self, keeper: SlotKeeper[W], in_thread: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self._keeper = keeper
        self._in_thread = in_thread
        self._origin = 0  # how often weights were forgotten
        self.newest: WeightsKey | None = None  # offered last; None: workers start with them
        self.update: WeightUpdate[W] | None = None
        self._snapshot_source: SnapshotSource | None = None
        self._fetching: asyncio.Task[Snapshot | None] | None = None
        self._changed = asyncio.Event()

    # --- a sync ---------------------------------------------------------------------------------------------------------

    def open(self) -> WeightUpdate[W]:
        """Begin a sync: its receivers are the slots that are live now."""
        receivers = [(slot, slot.worker) for slot in self._keeper.slots if slot.live]
        self.update = WeightUpdate(receivers, base=self.newest)
        return self.update

    def offer(
        self,
        update: WeightUpdate[W],
        take: Callable[[W], Awaitable[Any]],
        version: int,
        snapshot_source: SnapshotSource,
        joinable: bool,
    ) -> None:
        """Have the receivers of a sync take its weights, which the ranks offer, or will."""
        self._snapshot_source, self._fetching, self.newest = snapshot_source, None, (self._origin, version)
        update.key, update.take, update.joinable = self.newest, take, joinable
        for slot, worker in update.receivers:
            self._begin_take(update, slot, worker)
        self._announce()

    async def settle(self, update: WeightUpdate[W]) -> list[Any]:
        """Wait until everyone who takes part has the weights, which are there; returns their answers (None: it died meanwhile).

        The sync has ended then, and others may begin.
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
        """Forget what was offered: until the next sync, workers keep the weights that they start with."""
        self._snapshot_source = self._fetching = self.newest = self.update = None
        self._origin += 1
        self._announce()

    def _begin_take(self, update: WeightUpdate[W], slot: Slot[W], worker: W) -> None:
        """Have a live worker take the weights of a sync."""

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
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # `settle` raises it, if it is called
        update.answers[slot] = task

    def _lose_receivers(self, update: WeightUpdate[W]) -> None:
        """Have every worker replaced that has not answered."""
        for slot, worker in update.receivers:
            if not update.answers[slot].done():
                self._keeper.lose(slot, worker, "during a weight sync", _too_slow())
                update.answers[slot].cancel()

    def _announce(self) -> None:
        """Wake the workers that wait for other weights, or for the end of a sync."""
        self._changed.set()
        self._changed = asyncio.Event()

    # --- a worker that starts -------------------------------------------------------------------------------------------

    async def bring_live(self, slot: Slot[W]) -> None:
        """Have a worker that starts take the newest weights; when this returns, its slot is live. Raises WorkerDied."""
        while True:
            changed, update, newest = self._changed, self.update, self.newest
            if update is not None and not update.joinable:
                await changed.wait()  # until that sync has ended: its receivers are chosen
            elif newest is None or slot.weights == newest:
                return slot.move(SlotState.LIVE)
            elif update is not None and slot.weights == update.base:
                slot.move(SlotState.LIVE)
                update.receivers.append((slot, slot.worker))
                return self._begin_take(update, slot, slot.worker)
            else:
                slot.weights = await self._load(slot)
                if slot.weights != newest and changed is self._changed:  # the ranks are ahead of what was offered
                    await changed.wait()

    async def _load(self, slot: Slot[W]) -> WeightsKey | None:
        """Have a worker take the weights that the ranks sent last; returns which these were."""
        changed, origin = self._changed, self._origin
        try:
            snapshot = await self._fetch_snapshot()
            if snapshot is None:
                return slot.weights
            loading = slot.worker.call("load_weights", snapshot.buckets, snapshot.version)
            await self._keeper.owed(slot, _in_time(loading))
        except WorkerDied:
            raise
        except Exception as error:  # the ranks are lost, and not this worker
            if changed is self._changed:
                self._keeper.fail(slot, error)
                await changed.wait()
                slot.fault = None
            return slot.weights
        return origin, snapshot.version

    async def _fetch_snapshot(self) -> "Snapshot | None":
        """Fetch the weights that the ranks sent last: once for all workers that ask at the same time."""
        if self._fetching is None:
            assert self._snapshot_source is not None, "there are no other weights than those of the start"
            self._fetching = asyncio.ensure_future(self._in_thread(self._snapshot_source))
            self._fetching.add_done_callback(self._end_fetching)
        return await asyncio.shield(self._fetching)

    def _end_fetching(self, task: "asyncio.Task[Snapshot | None]") -> None:
        if self._fetching is task:
            self._fetching = None
        if not task.cancelled():
            task.exception()  # whoever waits has it


async def _in_time(loading: Awaitable[Any]) -> Any:
    """Wait for a worker that loads weights; WorkerDied where that takes too long."""
    try:
        return await asyncio.wait_for(loading, LOAD_TIMEOUT_S)
    except TimeoutError:
        raise WorkerDied(_too_slow()) from None


def _too_slow() -> str:
    return f"it did not take the weights within {LOAD_TIMEOUT_S:g} s"
