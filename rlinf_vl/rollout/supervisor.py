"""Starts, watches and replaces rollout workers, and sees to it that whoever is live has the newest weights. No Ray.

One thread with an event loop does all of it: nothing else moves slots (`slot` has their states) or touches submissions
(`dispatch` shares out their tasks) and weights (`updates`). Invariants:
- A worker is watched while it is busy. One that dies idle is replaced when it is next asked for something, and not before:
  until then its GPU may be the trainer's.
- Deaths of a slot's workers count until a group that one of them sampled was of use. A slot with more than `MAX_DEATHS` is
  given up where others do its work; the run ends when there are more than `MAX_DEATHS` and more than slots. Lost nodes don't
  count, and neither does the time for which one is awaited.
"""

import asyncio
import logging
import math
import sys
import threading
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from rlinf_vl.errors import reason_of
from rlinf_vl.rollout.dispatch import Dispatcher
from rlinf_vl.rollout.slot import Place, Slot, SlotState, W, WorkerDied, WorkersLost
from rlinf_vl.rollout.submission import Event, Submission, Task
from rlinf_vl.rollout.updates import SnapshotSource, WeightUpdate, WeightUpdates

log = logging.getLogger(__name__)

#: Seconds that a replacement has to load its model and start its engine.
START_TIMEOUT_S = 1800.0
#: Deaths that chance may explain, of one slot's workers or of all workers of a small pool.
MAX_DEATHS = 8
#: Workers that are tried for a place that has joined, before it is given up.
JOIN_TRIES = 3
#: Seconds between two looks at whether busy workers are well, and at who may join.
WATCH_S = 1.0
#: Looks at a worker in a row that failed by no known fault, after which it counts as lost.
MAX_BLIND_LOOKS = 30

T = TypeVar("T")


async def in_daemon_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function that may block in a thread of its own. Unlike those of an executor, it never holds up another call, nor the
    end of the process."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def end(value: Any, error: Exception | None) -> None:
        if result.cancelled():
            return
        if error is None:
            result.set_result(value)
        else:
            result.set_exception(error)

    def run() -> None:
        value, error = None, None
        try:
            value = function(*arguments)
        except Exception as raised:
            error = raised
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(end, value, error)

    threading.Thread(target=run, name="rollout-supervisor-call", daemon=True).start()
    return await result


class Supervisor(Generic[W]):
    """
    Args:
        make: makes a new worker for a slot's number.
        n: slots at the beginning, 0 … n - 1.
        max_running: most samples that an engine runs at once. A worker is sent twice that of its share of a submission, one more
            task for each that it finishes, and last what others have no room for. None: each worker answers its share as one
            batch, one submission after the other, as the embedded engine needs it: a logprob's last digits depend on the batch,
            which must not depend on time if a resumed run is to equal one that was never stopped.
        max_row_faults: workers that may die while they answer a row (`Quarantine`).
        report: called, in the supervisor's thread, with what happened to a worker, and with a kind unless it was replaced.
        places: the places of these slots, those that no node has now; called in a thread, and may ask the cluster.
        newcomers: numbers of further slots, whose workers are to join. Called in a thread every `WATCH_S` seconds.
        loop: the event loop, which somebody runs; None: one of its own, in a thread.
        in_thread: calls a function that may block.
    """

    def __init__(
        self,
        make: Callable[[int], W],
        n: int,
        *,
        max_running: int | None,
        report: Callable[..., None],
        max_row_faults: int = 3,
        places: Callable[[Collection[int]], Mapping[int, Place]] = lambda numbers: {},
        newcomers: Callable[[], Sequence[int]] = lambda: (),
        loop: asyncio.AbstractEventLoop | None = None,
        in_thread: Callable[..., Coroutine[Any, Any, Any]] = in_daemon_thread,
    ) -> None:
        self.replaced = self.turnover = 0  # turnover of who the workers are: replaced, joined, left
        self._make, self._report = make, report
        self._places, self._newcomers, self._in_thread = places, newcomers, in_thread
        self._dispatcher = Dispatcher[W](
            [Slot(i, make(i)) for i in range(n)],
            max_running=max_running,
            max_row_faults=max_row_faults,
            lose=self.lose,
            revive=self._revive,
        )
        self._joining: list[Slot[W]] = []
        self.updates = WeightUpdates[W](self, in_thread)
        self._spent_deaths = 0  # of slots that were given up
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watch_fault = ""
        self._loop = loop or asyncio.new_event_loop()
        if loop is None:
            threading.Thread(target=self._loop.run_forever, name="rollout-supervisor", daemon=True).start()

    # --- for other threads ----------------------------------------------------------------------------------------------

    @property
    def slots(self) -> list[Slot[W]]:
        """The slots that share the work. A worker that joins is among them once it is live."""
        return self._dispatcher.slots

    @property
    def joining(self) -> list[Slot[W]]:
        return list(self._joining)

    def start(self) -> None:
        """Wait until all workers have started. What a constructor raises is raised here: it is no chance."""
        self._run(self.begin_watch()).result()

    def submit(
        self,
        tasks: Sequence[Task],
        order: Sequence[Task],
        check: Callable[[], None],
        events: SimpleQueue[Event] | None = None,
    ) -> Submission:
        """Have the tasks answered, shared out in `order`. Whoever waits for groups calls `check` at least once a second.
        `events`: as for `Submission`."""
        close = self._dispatcher.close
        submission = Submission(tasks, check, lambda it: self._loop.call_soon_threadsafe(close, it), events)
        self._loop.call_soon_threadsafe(self._dispatcher.begin, submission, order)
        return submission

    def acknowledge(self, group_ids: Collection[str]) -> None:
        """As `Dispatcher.acknowledge`."""
        self._loop.call_soon_threadsafe(self._dispatcher.acknowledge, group_ids)

    def cancel(self, group_ids: Collection[str]) -> None:
        """As `Dispatcher.cancel`."""
        self._loop.call_soon_threadsafe(self._dispatcher.cancel, group_ids)

    def release(self, group_ids: Collection[str] | None) -> None:
        """As `Dispatcher.release`."""
        self._loop.call_soon_threadsafe(self._dispatcher.release, group_ids)

    def call(self, number: int, what: str, method: str, *arguments: Any) -> Future:
        """Call the worker in a slot, or its replacement once that is live; None if the slot leaves. `what` ends "a rollout worker
        is replaced …"."""

        async def call(slot: Slot[W] | None) -> Any:
            while slot is not None and await self._until_live(slot):
                worker = slot.worker
                try:
                    return await self.owed(slot, worker.call(method, *arguments))
                except WorkerDied as death:
                    self.lose(slot, worker, what, str(death))

        return self._run(call(next((slot for slot in self.slots if slot.number == number), None)))

    def probe(self, what: str) -> None:
        """Ask every live worker whether it is well, and have those replaced that are not. Waits for no replacement."""

        async def probe(slot: Slot[W], worker: W) -> None:
            try:
                await self.owed(slot, worker.call("ready"))
            except WorkerDied as death:
                self.lose(slot, worker, what, str(death))

        async def probe_all() -> None:
            await asyncio.gather(*(probe(slot, slot.worker) for slot in self.slots if slot.live))

        self._run(probe_all()).result()

    def choose_receivers(self) -> WeightUpdate[W]:
        """Choose who takes part in a weight sync that must know it beforehand; no worker becomes live before that has ended."""
        return self._run_in_loop(self.updates.open)

    def begin_update(
        self,
        take: Callable[[W], Awaitable[Any]],
        version: int,
        snapshot_source: SnapshotSource,
        *,
        joinable: bool,
        update: WeightUpdate[W] | None = None,
    ) -> WeightUpdate[W]:
        """Have live workers (or those chosen before, `update`) take weights that are offered, or will be.

        Args:
            take: has a worker take them.
            snapshot_source: gives the same weights to a worker that starts.
            joinable: whether a worker that becomes live meanwhile may take them, too.
        """

        def begin() -> WeightUpdate[W]:
            begun = update or self.updates.open()
            self.updates.offer(begun, take, version, snapshot_source, joinable)
            return begun

        return self._run_in_loop(begin)

    def settle(self, update: WeightUpdate[W]) -> list[Any]:
        """Wait until all that take part have the weights, which are there; returns their answers (None: it died meanwhile)."""
        return self._run(self.updates.settle(update)).result()

    def forget_weights(self) -> None:
        """Have workers that start keep the weights they start with, until the next sync."""
        self._run_in_loop(self.updates.forget)

    def replace_all(self) -> None:
        """Replace every worker, whatever it is doing, and wait until the new ones are live."""

        async def replace(slot: Slot[W]) -> None:
            if slot.starter is not None:
                slot.starter.cancel()
                await asyncio.wait([slot.starter])
            if slot.state is SlotState.LEAVING:
                return
            if slot.state is not SlotState.LOST:
                slot.move(SlotState.LOST)
            self._dispatcher.requeue(slot)
            slot.starter = self._spawn(self._recover(slot))
            await self._until_live(slot)

        for future in [self._run(replace(slot)) for slot in self.slots]:
            future.result()

    def stop(self) -> None:
        """End the thread; the workers live on."""

        async def stop() -> None:
            unfinished = asyncio.all_tasks() - {asyncio.current_task()}
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)
            self._loop.call_soon(self._loop.stop)

        self._run(stop())

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Future:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _run_in_loop(self, function: Callable[[], T]) -> T:
        async def run() -> T:
            return function()

        return self._run(run()).result()

    # --- the states of slots --------------------------------------------------------------------------------------------

    async def begin_watch(self) -> None:
        """Start all workers, watch them from now on, and wait until they are live."""
        for slot in self.slots:
            slot.starter = self._spawn(self._start_first(slot))
        self._spawn(self._watch_workers())
        self._spawn(self._watch_places())
        await asyncio.gather(*(self._until_live(slot) for slot in self.slots))

    def _spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine as a task. An error that nobody expected there reaches whoever waits for groups."""
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)

        def end(task: asyncio.Task[T]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("the supervisor of the rollout workers failed", exc_info=error)
                self._dispatcher.close_all(error)

        task.add_done_callback(end)
        return task

    async def _until_live(self, slot: Slot[W]) -> bool:
        """Wait until the slot is live; False: it leaves. Raises why no worker can be started."""
        self._revive(slot)
        while not slot.live:
            if slot.state is SlotState.LEAVING:
                return False
            if slot.fault is not None:
                raise slot.fault
            await slot.moved.wait()
        return True

    async def owed(self, slot: Slot[W], answer: Awaitable[T]) -> T:
        """Wait for an answer that the slot's worker owes."""
        slot.watch()
        slot.calls += 1
        try:
            return await answer
        finally:
            slot.calls -= 1

    def _revive(self, slot: Slot[W]) -> None:
        """Try again to replace the slot's worker, if that has failed by no fault of a worker."""
        if slot.state is SlotState.LOST and slot.starter is not None and slot.starter.done():
            reason, slot.fault = str(slot.fault or "lost"), None
            slot.starter = self._spawn(self._recover(slot, "while idle", reason))

    def lose(self, slot: Slot[W], worker: W, what: str, reason: str) -> None:
        """Have another worker take the place of one that was live and is dead or hangs, unless that was done already."""
        if slot.worker is not worker or not slot.live:
            return
        slot.move(SlotState.LOST)
        if groups := self._dispatcher.requeue(slot):
            what = f"and its {groups} groups are sent again"
        slot.starter = self._spawn(self._recover(slot, what, reason))

    async def _start_first(self, slot: Slot[W]) -> None:
        """Start the worker that a slot has when the run begins."""
        try:
            reason = await self._start(slot, first=True)
        except Exception as error:  # its constructor's, as any other's would be
            self._give_up(slot, error)
        else:
            if reason is not None:
                await self._recover(slot, "while it starts", reason)

    async def _recover(self, slot: Slot[W], what: str = "", reason: str | None = None) -> None:
        """Replace a lost worker, as often as its replacements fail, until one is live or the slot leaves.

        Args:
            what: the end of "a rollout worker is replaced …".
            reason: why it was lost; None: somebody wants another one, and nothing is counted or reported.
        """
        try:
            while True:
                if reason is not None and (departure := await self._departure(slot, reason)):
                    return self._leave(slot, departure)
                if reason is not None:
                    self._report(f"a rollout worker is replaced {what}: {reason}")
                await self._renew(slot)
                reason, what = await self._start(slot), "before it has taken the place of another"
                if reason is None:
                    return
        except Exception as error:
            self._give_up(slot, error)

    async def _departure(self, slot: Slot[W], reason: str) -> str | None:
        """Count a death; returns why the slot leaves, if it does.

        Raises:
            WorkersLost: too many workers died for chance.
        """
        await self._look_at_places([slot])
        if slot.place is Place.GONE:
            return reason
        if slot.place is Place.AWAITED:
            return None
        slot.deaths += 1
        deaths = self._spent_deaths + sum(other.deaths for other in self.slots)
        if deaths > max(MAX_DEATHS, len(self.slots)):
            raise WorkersLost(
                f"{deaths} rollout workers failed of late, and chance does not do that; the last one: {reason}"
            )
        if slot.deaths > MAX_DEATHS:
            self._spent_deaths += slot.deaths
            return f"{slot.deaths} of its workers failed, one after the other, and the last one: {reason}"
        return None

    async def _renew(self, slot: Slot[W]) -> None:
        """Put a new worker into the slot of a lost one."""
        slot.restarts += 1
        self.replaced += 1
        self.turnover += 1
        await self._in_thread(slot.worker.kill)
        slot.worker = self._make(slot.number)
        slot.weights, slot.hang, slot.blind_looks = None, None, 0
        slot.move(SlotState.STARTING)

    async def _start(self, slot: Slot[W], first: bool = False) -> str | None:
        """Wait until the slot's worker has its model and the newest weights, and the slot is live; returns why it failed."""
        try:
            await self._until_ready(slot, math.inf if first else START_TIMEOUT_S)
            slot.move(SlotState.LOADING_WEIGHTS)
            await self.updates.bring_live(slot)
        except WorkerDied as death:
            slot.move(SlotState.LOST)
            if first and death.in_constructor:
                raise death.__cause__ or death from None
            return slot.hang or str(death)
        self._dispatcher.fill(slot)
        return None

    async def _until_ready(self, slot: Slot[W], seconds: float) -> None:
        """Wait until the worker's constructor is done; WorkerDied after so many seconds in which a node had its place."""
        answer = asyncio.ensure_future(slot.worker.call("ready"))
        try:
            remaining, excused = seconds, False
            while not answer.done():
                begun = self._loop.time()
                await asyncio.wait([answer], timeout=min(WATCH_S, remaining))
                if slot.place is Place.GONE:
                    raise WorkerDied("its node is lost")
                if slot.place is Place.THERE:
                    remaining -= self._loop.time() - begun
                elif not excused:  # the worker before it died with the node, before Ray knew that
                    slot.deaths, excused = max(0, slot.deaths - 1), True
                if remaining <= 0 and not answer.done():
                    raise WorkerDied(f"it did not start within {seconds:g} s")
            await answer
        finally:
            answer.cancel()

    def fail(self, slot: Slot[W], error: Exception) -> None:
        """Tell whoever waits for this slot, or for groups, that it can't be live."""
        slot.fail(error)
        self._dispatcher.close_all(error)

    def _give_up(self, slot: Slot[W], error: Exception) -> None:
        """Leave a slot without a worker until it is needed again: none can be started."""
        if slot.state is not SlotState.LOST:
            slot.move(SlotState.LOST)
        self.fail(slot, error)

    def _leave(self, slot: Slot[W], reason: str) -> None:
        """Have others do the work of a slot whose place is gone."""
        slot.move(SlotState.LEAVING)
        self.turnover += 1
        others = len(self.slots) - 1
        self._report(
            f"rollout worker {slot.number} left: {reason}; {others} others do its work, or who joins next",
            "worker_left",
        )
        self._dispatcher.remove(slot)
        self._spawn(self._in_thread(slot.worker.kill))

    async def _join(self, number: int) -> None:
        """Have a worker take part once it is live; one that fails is given up after a few tries."""
        slot = Slot(number, self._make(number))
        self._joining.append(slot)
        try:
            reason = await self._start(slot)
            for _ in range(JOIN_TRIES - 1):
                if reason is None:
                    break
                await self._look_at_places([slot])
                if slot.place is Place.GONE:
                    break
                await self._renew(slot)
                reason = await self._start(slot)
        except Exception as error:
            reason = reason_of(error)
        finally:
            self._joining.remove(slot)
        if reason is None:  # it shares in the work, and in syncs, from the very moment at which it is live
            self.turnover += 1
            self._dispatcher.add(slot)
            self._report(f"rollout worker {number} joined: {len(self.slots)} now", "worker_joined")
        else:
            await self._in_thread(slot.worker.kill)
            self._report(f"rollout worker {number} did not join: {reason}", "worker_left")

    # --- watching -------------------------------------------------------------------------------------------------------

    async def _watch_workers(self) -> None:
        """Every `WATCH_S` seconds, replace busy workers that are dead or hang."""
        while True:
            await asyncio.sleep(WATCH_S)
            for slot in [*self.slots, *self._joining]:
                try:
                    self._look_at_worker(slot)
                except Exception as error:  # whatever it is, the others must be watched
                    self._note_watch_fault(error)

    async def _watch_places(self) -> None:
        """Every `WATCH_S` seconds, see which workers that start have lost their nodes, and who may join."""
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                await self._look_at_places([s for s in [*self.slots, *self._joining] if s.state is SlotState.STARTING])
                for number in await self._in_thread(self._newcomers):
                    self._spawn(self._join(number))
            except Exception as error:
                self._note_watch_fault(error)

    def _look_at_worker(self, slot: Slot[W]) -> None:
        """Replace a busy worker that is dead or hangs. One that starts answers nothing yet, and is not asked."""
        if not slot.busy or slot.state not in (SlotState.LIVE, SlotState.LOADING_WEIGHTS):
            return
        try:
            reason, slot.blind_looks = slot.worker.failure(), 0
        except Exception as error:
            self._note_watch_fault(error)
            slot.blind_looks += 1
            reason = f"it can't be watched: {reason_of(error)}" if slot.blind_looks > MAX_BLIND_LOOKS else None
        if reason is None:
            return
        if slot.live:
            self.lose(slot, slot.worker, "while idle", reason)
        elif slot.hang is None:  # whoever waits for it to load weights hears that it is dead
            slot.hang = reason
            self._spawn(self._in_thread(slot.worker.kill))

    def _note_watch_fault(self, error: Exception) -> None:
        """Log an error that nobody expected, once for as long as it stays the same."""
        reason = reason_of(error)
        if reason != self._watch_fault and not sys.is_finalizing():
            self._watch_fault = reason
            log.warning("looking after rollout workers failed, and is tried again: %s", reason, exc_info=error)

    async def _look_at_places(self, slots: Sequence[Slot[W]]) -> None:
        """Learn which of these slots have lost their nodes. What can't be learned stays as it was."""
        if not slots:
            return
        try:
            places = await self._in_thread(self._places, [slot.number for slot in slots])
        except Exception as error:
            return self._note_watch_fault(error)
        for slot in slots:
            slot.place = places.get(slot.number, Place.THERE)
