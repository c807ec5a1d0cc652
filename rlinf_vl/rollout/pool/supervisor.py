"""Starts, watches and replaces rollout workers, and keeps live ones on the newest weights.

No Ray. One thread with an event loop does all of it: nothing else moves slots (`slot` has their
states; `elasticity` adds some) or touches submissions (`dispatch` dispatches their tasks) and
weights (`updates`).
Invariants:
- A worker is watched while it is busy. One that dies idle is replaced when it next gets work, and
  not before: until then the trainer may be using its GPU.
- Deaths of a slot's workers count until one of them has sampled a group that was used. A slot with
  more than `MAX_DEATHS` leaves if there are others to do its work. The run ends if the deaths of
  all slots exceed both `MAX_DEATHS` and the number of slots. Losing a node is no death, and time
  spent waiting for a node doesn't count as starting time.
"""

import asyncio
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from rlinf_vl.rollout.daemon_thread import in_daemon_thread
from rlinf_vl.rollout.episode.loop_bridge import cancel_all
from rlinf_vl.rollout.pool.dispatch import Dispatcher
from rlinf_vl.rollout.pool.elasticity import Elasticity
from rlinf_vl.rollout.pool.slot import Place, Slot, SlotState, W, WorkerDied, WorkersLost
from rlinf_vl.rollout.pool.updates import WeightUpdates
from rlinf_vl.rollout.pool.worker_watch import WorkerWatch
from rlinf_vl.rollout.submission import Event, Submission, Task

log = logging.getLogger(__name__)

#: Seconds that a replacement has to load its model and start its engine.
START_TIMEOUT_S = 1800.0
#: Limit on the deaths that chance may explain, of one slot's workers or of all of a small pool.
MAX_DEATHS = 8
#: Seconds between two checks of busy workers.
WATCH_S = 1.0
#: Seconds to wait for the thread's end; making a worker may block where the cluster is gone.
STOP_S = 10.0

T = TypeVar("T")


class Supervisor(Generic[W]):
    """
    Args:
        make: makes a new worker for a slot's number.
        n: the number of slots at the beginning, 0 … n - 1.
        max_running: limit on the samples that an engine runs at once. A worker is sent twice as
            many samples of its share of a submission, one more task for each that it finishes, and
            at last tasks of other workers' shares. None: each worker answers its share as one
            batch, one submission after the other. The embedded engine needs this: the last digits
            of a logprob depend on the batch, which must not depend on timing if a resumed run is to
            equal one that was never stopped.
        report: called in the supervisor's thread with a sentence about a worker, and with a kind
            unless the worker is replaced.
        places: returns the places of those given slots that have none on a node now. Called in a
            thread; may ask the cluster.
        newcomers: returns the numbers of further slots, whose workers shall join. Called in a
            thread every `elasticity.LOOK_S` seconds.
        loop: an event loop that runs elsewhere; None: a loop of its own, in a thread.
        in_thread: calls a function that may block.

    Attributes:
        replaced: the number of replacements so far.
        turnover: the number of times a worker was replaced, joined or left.
        groups: has the open submissions, and knows which worker has which group.
        updates: the newest weights, and the sync that is running.
    """

    def __init__(
        self,
        make: Callable[[int], W],
        n: int,
        *,
        max_running: int | None,
        report: Callable[..., None],
        places: Callable[[Collection[int]], Mapping[int, Place]] = lambda numbers: {},
        newcomers: Callable[[], Sequence[int]] = lambda: (),
        loop: asyncio.AbstractEventLoop | None = None,
        in_thread: Callable[..., Coroutine[Any, Any, Any]] = in_daemon_thread,
    ) -> None:
        self.replaced = self.turnover = 0
        self._make, self._report = make, report
        self._in_thread = in_thread
        self.groups = Dispatcher[W](
            [self.make_slot(number) for number in range(n)],
            max_running=max_running,
            lose=self.lose,
            revive=self._revive,
        )
        self._watch = WorkerWatch[W](self.lose, self._kill)
        self._elasticity = Elasticity[W](
            self,
            self._watch.note_fault,
            report=report,
            places=places,
            newcomers=newcomers,
            in_thread=in_thread,
        )
        self.updates = WeightUpdates[W](self, in_thread)
        self._spent_deaths = 0  # deaths in slots that have left
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = loop or asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        if loop is None:
            self._thread = threading.Thread(
                target=self._loop.run_forever, name="rollout-supervisor", daemon=True
            )
            self._thread.start()

    # --- for other threads ------------------------------------------------------------------------

    @property
    def slots(self) -> list[Slot[W]]:
        """The slots that share the work. One that joins is among them once it is live."""
        return self.groups.slots

    @property
    def joining(self) -> list[Slot[W]]:
        """The slots that join, and are not live yet."""
        return list(self._elasticity.joining)

    def start(self) -> None:
        """Wait until all workers have started. Raises a constructor's error, which is no chance."""
        self.run(self.begin_watch()).result()

    def soon(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a method of `groups` or `updates` in the loop, without waiting for it."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def in_loop(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a method of `groups` or `updates` in the loop, and return its result."""

        async def call() -> T:
            return function(*arguments)

        return self.run(call()).result()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the loop; return a future of its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def submit(
        self,
        tasks: Sequence[Task],
        order: Sequence[Task],
        check: Callable[[], None],
        events: SimpleQueue[Event] | None = None,
    ) -> Submission:
        """Dispatch tasks in `order`. `check` and `events`: as in `Submission`."""

        def close(submission: Submission) -> None:
            self.soon(self.groups.close, submission)

        submission = Submission(tasks, check, close, events)
        self.soon(self.groups.begin, submission, order)
        return submission

    def call(self, number: int, occasion: str, method: str, *arguments: Any) -> Future:
        """Call a method of a slot's worker, or of its replacement if the worker dies.

        Args:
            occasion: ends the sentence "a rollout worker is replaced …", here and below.

        Returns:
            A future of the method's result; None if the slot leaves.
        """

        async def call(slot: Slot[W] | None) -> Any:
            while slot is not None and await self._until_live(slot):
                worker = slot.worker
                try:
                    return await self.owed(slot, worker.call(method, *arguments))
                except WorkerDied as death:
                    self.lose(slot, worker, occasion, str(death))

        return self.run(call(next((slot for slot in self.slots if slot.number == number), None)))

    def probe(self, occasion: str) -> None:
        """Check every live worker, and replace those that are dead without waiting for that."""

        async def probe(slot: Slot[W], worker: W) -> None:
            try:
                await self.owed(slot, worker.call("ready"))
            except WorkerDied as death:
                self.lose(slot, worker, occasion, str(death))

        async def probe_all() -> None:
            await asyncio.gather(*(probe(slot, slot.worker) for slot in self.slots if slot.live))

        self.run(probe_all()).result()

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
            self.groups.requeue(slot)
            slot.starter = self.spawn(self._recover(slot))
            await self._until_live(slot)

        for future in [self.run(replace(slot)) for slot in self.slots]:
            future.result()

    def stop(self) -> None:
        """End the loop, and wait for its thread: no worker is made from then on.

        The workers live on. Does nothing if the thread has ended.
        """

        async def stop() -> None:
            await cancel_all(asyncio.all_tasks() - {asyncio.current_task()})
            self._loop.call_soon(self._loop.stop)

        if self._thread is None or self._thread.is_alive():
            self.run(stop())
        # Who stops it ends Ray next, and a worker made after that would start Ray again.
        if self._thread is not None:
            self._thread.join(STOP_S)

    # --- the states of slots ----------------------------------------------------------------------

    async def begin_watch(self) -> None:
        """Start all workers, watch them from now on, and wait until they are live."""
        for slot in self.slots:
            slot.starter = self.spawn(self._start_first(slot))
        self.spawn(self._watch_workers())
        self.spawn(self._elasticity.watch())
        await asyncio.gather(*(self._until_live(slot) for slot in self.slots))

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine as a task. An unexpected error is raised where groups are waited for."""
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)

        def end(task: asyncio.Task[T]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("the supervisor of the rollout workers failed", exc_info=error)
                self.groups.close_all(error)

        task.add_done_callback(end)
        return task

    async def _until_live(self, slot: Slot[W]) -> bool:
        """Wait until the slot is live; return False if it leaves.

        Raises:
            Exception: the reason why no worker can be started.
        """
        self._revive(slot)
        while not slot.live:
            if slot.state is SlotState.LEAVING:
                return False
            if slot.fault is not None:
                raise slot.fault
            await slot.moved.wait()
        return True

    async def owed(self, slot: Slot[W], answer: Awaitable[T]) -> T:
        """Wait for an answer of the slot's worker, which is watched meanwhile."""
        slot.watch()
        slot.calls += 1
        try:
            return await answer
        finally:
            slot.calls -= 1

    def _revive(self, slot: Slot[W]) -> None:
        """Try again to start a worker in a slot that was given up (`_give_up`)."""
        if slot.state is SlotState.LOST and slot.starter is not None and slot.starter.done():
            reason, slot.fault = str(slot.fault or "lost"), None
            slot.starter = self.spawn(self._recover(slot, "while idle", reason))

    def lose(self, slot: Slot[W], worker: W, occasion: str, reason: str) -> None:
        """Replace a live worker that is dead or hangs, unless it is being replaced already.

        Args:
            occasion: ends the sentence "a rollout worker is replaced …", unless tasks are lost.
        """
        if slot.worker is not worker or not slot.live:
            return
        slot.move(SlotState.LOST)
        n_groups = self.groups.requeue(slot)
        if n_groups:
            occasion = f"and its {n_groups} groups are sent again"
        slot.starter = self.spawn(self._recover(slot, occasion, reason))

    async def _start_first(self, slot: Slot[W]) -> None:
        """Start the worker that a slot has when the run begins."""
        try:
            reason = await self.start_worker(slot, first=True)
        except Exception as error:  # of the constructor: another worker's would fail alike
            self._give_up(slot, error)
        else:
            if reason is not None:
                await self._recover(slot, "while it starts", reason)

    async def _recover(self, slot: Slot[W], occasion: str = "", reason: str | None = None) -> None:
        """Replace a lost worker, and its replacements if they fail, until one is live.

        Ends, too, when the slot leaves or is given up.

        Args:
            reason: why it was lost; None: it is replaced on request, without a count or report.
        """
        try:
            while True:
                if reason is not None and (departure := await self._departure(slot, reason)):
                    return self._leave(slot, departure)
                if reason is not None:
                    self._report(f"a rollout worker is replaced {occasion}: {reason}")
                await self.renew(slot)
                reason, occasion = (
                    await self.start_worker(slot),
                    "before it has taken the place of another",
                )
                if reason is None:
                    return
        except Exception as error:
            self._give_up(slot, error)

    async def _departure(self, slot: Slot[W], reason: str) -> str | None:
        """Count a death; return why the slot leaves, or None if it stays.

        Raises:
            WorkersLost: too many workers died for this to be chance.
        """
        await self._elasticity.look_at_places([slot])
        if slot.place is Place.GONE:
            return reason
        if slot.place is Place.AWAITED:
            return None
        slot.deaths += 1
        deaths = self._spent_deaths + sum(active_slot.deaths for active_slot in self.slots)
        if deaths > max(MAX_DEATHS, len(self.slots)):
            raise WorkersLost(
                f"{deaths} rollout workers failed of late, and chance does not do that; the last "
                f"one: {reason}"
            )
        if slot.deaths > MAX_DEATHS:
            self._spent_deaths += slot.deaths
            return f"{slot.deaths} of its workers failed, one after the other, and the last one: {reason}"
        return None

    async def renew(self, slot: Slot[W]) -> None:
        """Put a new worker into the slot of a lost one."""
        slot.restarts += 1
        self.replaced += 1
        self.turnover += 1
        # The next worker gets its GPU, so its process must be gone first. Killing may block.
        await self._in_thread(slot.worker.kill)
        slot.worker = self._make(slot.number)
        slot.weights, slot.hang, slot.blind_looks = None, None, 0
        slot.move(SlotState.STARTING)

    async def start_worker(self, slot: Slot[W], first: bool = False) -> str | None:
        """Wait until the slot's worker has its model and the newest weights, and make it live.

        Returns:
            The reason why the worker failed, or None if it is live.
        """
        try:
            await self._until_ready(slot, math.inf if first else START_TIMEOUT_S)
            slot.move(SlotState.LOADING_WEIGHTS)
            await self.updates.bring_live(slot)
        except WorkerDied as death:
            slot.move(SlotState.LOST)
            if first and death.in_constructor:
                # The user needs the constructor's error alone, without this traceback.
                raise death.__cause__ or death from None
            return slot.hang or str(death)
        self.groups.fill(slot)
        return None

    async def _until_ready(self, slot: Slot[W], seconds: float) -> None:
        """Wait until the worker's constructor is done.

        Raises:
            WorkerDied: it failed, or took longer than `seconds`, not counting the time for which
                no node had the slot's place.
        """
        answer = asyncio.ensure_future(slot.worker.call("ready"))
        try:
            remaining_s, is_excused = seconds, False
            while not answer.done():
                start_time = self._loop.time()
                await asyncio.wait([answer], timeout=min(WATCH_S, remaining_s))
                if slot.place is Place.GONE:
                    raise WorkerDied("its node is lost")
                if slot.place is Place.THERE:
                    remaining_s -= self._loop.time() - start_time
                elif not is_excused:
                    # The last worker died with its node, which Ray did not know when the death was
                    # counted.
                    slot.deaths, is_excused = max(0, slot.deaths - 1), True
                if remaining_s <= 0 and not answer.done():
                    raise WorkerDied(f"it did not start within {seconds:g} s")
            await answer
        finally:
            answer.cancel()

    def fail(self, slot: Slot[W], error: Exception) -> None:
        """Raise an error where this slot, or groups, are waited for."""
        slot.fail(error)
        self.groups.close_all(error)

    def _give_up(self, slot: Slot[W], error: Exception) -> None:
        """Leave a slot without a worker, because none can be started, until it next gets work."""
        if slot.state is not SlotState.LOST:
            slot.move(SlotState.LOST)
        self.fail(slot, error)

    def _kill(self, slot: Slot[W]) -> None:
        """Kill the slot's worker, which may take seconds, without waiting for it."""
        self.spawn(self._in_thread(slot.worker.kill))

    def make_slot(self, number: int) -> Slot[W]:
        """Make a slot with a worker that starts."""
        return Slot(number, self._make(number))

    def admit(self, slot: Slot[W]) -> None:
        """Give a slot that has joined, and is live, a share of the work."""
        self.turnover += 1
        self.groups.add(slot)

    def _leave(self, slot: Slot[W], reason: str) -> None:
        """Remove a slot for good; others do its work."""
        slot.move(SlotState.LEAVING)
        self.turnover += 1
        n_others = len(self.slots) - 1
        self._report(
            f"rollout worker {slot.number} left: {reason}; {n_others} others do its work, or who "
            "joins next",
            "worker_left",
        )
        self.groups.remove(slot)
        self._kill(slot)

    # --- watching ---------------------------------------------------------------------------------

    async def _watch_workers(self) -> None:
        """Replace busy workers that are dead or hang, with a check every `WATCH_S` seconds."""
        while True:
            await asyncio.sleep(WATCH_S)
            for slot in [*self.slots, *self._elasticity.joining]:
                try:
                    self._watch.look_at(slot)
                except Exception as error:  # must not end the watch of the other workers
                    self._watch.note_fault(error)
