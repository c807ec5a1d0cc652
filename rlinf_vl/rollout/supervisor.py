"""Sends rollout workers their work, notices which of them die or hang, replaces those, and sends lost work again. No Ray.

One thread with an event loop does all of it: nothing else changes slots and submissions. Invariants:
- Each task of a submission ends with exactly one group, whatever dies. A worker's groups live in its memory, so when it dies
  all of its tasks are sent again, also those whose groups had arrived.
- A worker is watched while it owes an answer or has groups of an open submission. One that dies idle is replaced when it is next
  asked for something, and not before: until then its GPU may be the trainer's.
- A worker whose place is lost leaves, and others do its work. One that joins takes part once it has the weights of all others.
  Neither changes `slots` while somebody has `membership`.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Generic

from rlinf_vl.errors import reason_of
from rlinf_vl.rollout.slot import Slot, W, WorkerDied, WorkersLost
from rlinf_vl.rollout.submission import Event, Resent, Submission, Task
from rlinf_vl.rollout.suspects import Suspects

#: Seconds that a replacement has to load its model and start its engine.
START_TIMEOUT_S = 1800.0
#: Workers replaced since a submission ended well before the supervisor gives up: chance does not kill so many.
MAX_REPLACEMENTS = 8
#: Seconds between two looks at whether busy workers are well, and at who may join.
WATCH_S = 1.0


class Supervisor(Generic[W]):
    """
    Args:
        make: a new worker for slot 0 … n - 1.
        max_running: most samples that an engine runs at once. A worker is sent twice that of its share of a submission, one more
            task for each that it finishes, and last what others have no room for. None: each worker answers its share as one
            batch, one submission after the other, as the embedded engine needs it: a logprob's last digits depend on the batch,
            which must not depend on time if a resumed run is to equal one that was never stopped.
        max_row_faults: workers that may die while they answer a row (`Suspects`).
        report: called, in the supervisor's thread, with what happened to a worker, and with a kind unless it was replaced.
        lost: whether the place of a slot's worker is gone, so that no other can take it.
        newcomers: numbers of further slots, whose workers are to join. Called every `WATCH_S` seconds.
    """

    def __init__(
        self,
        make: Callable[[int], W],
        n: int,
        *,
        max_running: int | None,
        report: Callable[..., None],
        max_row_faults: int = 3,
        lost: Callable[[int], bool] = lambda number: False,
        newcomers: Callable[[], Sequence[int]] = lambda: (),
    ) -> None:
        self.slots = [Slot(i, make(i)) for i in range(n)]
        #: (what gives the current weights as buckets, their version); None: those that workers start with
        self.weights: tuple[Callable[[], Sequence[Any]], int] | None = None
        self.membership = threading.Lock()
        self.replaced = self.turnover = 0  # turnover of who the workers are: replaced, joined, left
        self._make, self._lost, self._newcomers = make, lost, newcomers
        self._tasks: set[asyncio.Task[None]] = set()
        self._unshared: list[tuple[Submission, Task]] = []  # work that waits for a worker to join
        self._max_running, self._report = max_running, report
        self._suspects = Suspects(max_row_faults)
        self._deaths = 0  # since the last submission that ended well
        self._open: list[Submission] = []
        self._none_queued = False  # no slot has a task in its queue; False: some may
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="rollout-supervisor", daemon=True).start()

    # --- for other threads ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Wait until all workers have started. What a constructor raises is raised here: it is no chance."""

        async def start() -> None:
            for slot in self.slots:
                slot.start = asyncio.create_task(self._start(slot, first=True))
            self._spawn(self._watch())
            await asyncio.gather(*(slot.start for slot in self.slots if slot.start is not None))

        self._run(start()).result()

    def submit(
        self,
        tasks: Sequence[Task],
        order: Sequence[Task],
        check: Callable[[], None],
        events: SimpleQueue[Event] | None = None,
    ) -> Submission:
        """Have the tasks answered, shared out in `order`. Whoever waits for groups calls `check` at least once a second.
        `events`: of `Submission`."""
        submission = Submission(tasks, check, lambda it: self._loop.call_soon_threadsafe(self._close, it), events)
        self._loop.call_soon_threadsafe(self._begin, submission, order)
        return submission

    def call(self, number: int, what: str, method: str, *arguments: Any) -> Future:
        """Call the worker in a slot, or its replacement; None if it leaves. `what` ends "a rollout worker is replaced …"."""

        async def call(slot: Slot[W]) -> Any:
            while not slot.left:
                await asyncio.shield(self._revive(slot))
                worker = slot.worker
                try:
                    return await self._owed(slot, worker.call(method, *arguments))
                except WorkerDied as death:
                    self._replace(slot, worker, what, str(death))

        return self._run(call(next(slot for slot in self.slots if slot.number == number)))

    def settle(self, number: int, worker: W, answer: Awaitable[Any]) -> Future:
        """Wait until a worker has taken weights that it was offered, and return its answer; or until its replacement has the
        current ones."""

        async def settle(slot: Slot[W] | None) -> Any:
            if slot is None:
                return None
            try:
                return await self._owed(slot, answer)
            except WorkerDied as death:
                self._replace(slot, worker, "during a weight sync", str(death))
                if not slot.left:
                    await asyncio.shield(self._revive(slot))

        return self._run(settle(next((slot for slot in self.slots if slot.number == number), None)))

    def replace_all(self) -> None:
        """Replace every worker, whatever it is doing, and wait until the new ones are live."""

        async def replace(slot: Slot[W]) -> None:
            if slot.start is not None:
                slot.start.cancel()
            self._requeue(slot)
            self._renew(slot)
            slot.start = asyncio.create_task(self._start(slot))
            await slot.start

        for future in [self._run(replace(slot)) for slot in self.slots if not slot.left]:
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

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- workers --------------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Replace workers that hang while they have something to do, and have those join that there are new places for."""
        while True:
            await asyncio.sleep(WATCH_S)
            for slot in self.slots:
                if (slot.calls or slot.given) and not slot.left and (reason := slot.worker.failure()):
                    if slot.live:
                        self._replace(slot, slot.worker, "while idle", reason)
                    else:
                        slot.hang = reason
                        slot.worker.kill()
                elif slot.starting and self._lost(slot.number):  # it would wait for its node
                    slot.worker.kill()
            for number in self._newcomers():
                self._spawn(self._join(number))

    async def _owed(self, slot: Slot[W], answer: Awaitable[Any]) -> Any:
        """Wait for an answer that the slot's worker owes."""
        slot.watch()
        slot.calls += 1
        try:
            return await answer
        finally:
            slot.calls -= 1

    def _revive(self, slot: Slot[W]) -> asyncio.Task[None]:
        """The start of the slot's worker, which may be done; if it failed, the start of another one."""
        assert slot.start is not None, "start() comes first"
        if slot.start.done() and (error := slot.start.exception()):
            self._replace(slot, slot.worker, "while idle", str(error))
        return slot.start

    def _replace(self, slot: Slot[W], worker: W, what: str, reason: str) -> None:
        """Start another worker in the slot of one that is dead or hangs, unless that was done already."""
        if slot.left or slot.worker is not worker or slot.start is None or not slot.start.done():
            return
        if self._lost(slot.number):
            return self._leave(slot, reason)
        if groups := sum(map(len, slot.given.values())):
            what = f"and its {groups} groups are sent again"
        self._suspects.accuse(slot.answering.values())
        self._requeue(slot)
        slot.start = asyncio.create_task(self._start(slot, failed=(what, reason)))

    async def _start(self, slot: Slot[W], *, first: bool = False, failed: tuple[str, str] | None = None) -> None:
        """Wait until the slot's worker has its model and the current weights; replace it as often as it fails.

        Args:
            first: the run begins.
            failed: the worker there must be replaced: end of the report, and reason.
        """
        try:
            while True:
                if failed is not None:
                    self._deaths += 1
                    if self._deaths > MAX_REPLACEMENTS:
                        failures = f"{self._deaths} rollout workers failed since the last rollout that ended well"
                        raise WorkersLost(f"{failures}; the last one: {failed[1]}")
                    self._report("a rollout worker is replaced {}: {}".format(*failed))
                    self._renew(slot)
                try:
                    await asyncio.wait_for(slot.worker.call("ready"), None if first else START_TIMEOUT_S)
                    slot.worker.watch()
                    await self._give_weights(slot)
                    break
                except WorkerDied as death:
                    if first and death.in_constructor:
                        raise death.__cause__ or death from None
                    reason, slot.hang = slot.hang or str(death), None
                except TimeoutError:
                    reason = f"it did not start within {START_TIMEOUT_S:g} s"
                if self._lost(slot.number):
                    return self._leave(slot, reason)
                failed = "while it starts" if first else "before it has taken the place of another", reason
        except Exception as error:  # open submissions have tasks for this slot
            for submission in list(self._open):
                self._close(submission, error)
            raise
        self._loop.call_soon(self._fill)

    async def _give_weights(self, slot: Slot[W]) -> Any:
        """Have a new worker take the current weights; returns which they were."""
        if given := self.weights:
            held = await asyncio.to_thread(given[0])  # which may wait for ranks that train
            await self._owed(slot, slot.worker.call("load_weights", held, given[1]))
        return given

    def _renew(self, slot: Slot[W]) -> None:
        slot.worker.kill()
        slot.worker = self._make(slot.number)
        slot.restarts += 1
        self.replaced += 1
        self.turnover += 1

    def _requeue(self, slot: Slot[W]) -> None:
        """The tasks of the slot's worker are to be sent again, also those whose groups have arrived."""
        for submission, tasks in slot.given.items():
            if again := submission.arrived & tasks.keys():
                submission.events.put(Resent(frozenset(again)))
            submission.arrived -= again
            slot.queue.extendleft((submission, self._suspects.judged(task)) for task in reversed(tasks.values()))
        self._none_queued = False
        slot.forget()

    async def _join(self, number: int) -> None:
        """Have a worker take part, with the weights of all others; one that fails is given up after three tries."""
        reason = ""
        for _ in range(3):
            slot = Slot(number, self._make(number), start=asyncio.current_task())
            try:
                await asyncio.wait_for(slot.worker.call("ready"), START_TIMEOUT_S)
                await self._change_slots(self._enter(slot))
            except Exception as error:
                reason = reason_of(error)
                self.slots = [other for other in self.slots if other is not slot]
                await asyncio.to_thread(slot.worker.kill)
                if self._lost(number):
                    break
            else:
                self._report(f"rollout worker {number} joined: {len(self.slots)} now", "worker_joined")
                waiting, self._unshared = self._unshared, []
                self._loop.call_soon(self._deal, waiting)  # to a worker that is live: when this task is done
                return
        self._report(f"rollout worker {number} did not join: {reason}", "worker_left")

    async def _enter(self, slot: Slot[W]) -> None:
        given = await self._give_weights(slot)
        self.slots = [*self.slots, slot]
        while given is not self.weights:  # newer ones were offered before the worker was in `slots`
            given = await self._give_weights(slot)

    def _leave(self, slot: Slot[W], reason: str) -> None:
        """The place of the slot's worker is gone: others do its work."""
        slot.left = True
        self._requeue(slot)
        work, slot.queue = list(slot.queue), deque()
        others = f"{sum(not other.left for other in self.slots)} others do its work, or who joins next"
        self._report(f"rollout worker {slot.number} left: {reason}; {others}", "worker_left")
        self._deal(work)

        async def forget() -> None:
            await asyncio.to_thread(slot.worker.kill)
            self.slots = [other for other in self.slots if other is not slot]

        self._spawn(self._change_slots(forget()))

    async def _change_slots(self, change: Coroutine[Any, Any, None]) -> None:
        """Await the change once nobody has `membership`."""
        while not self.membership.acquire(blocking=False):
            await asyncio.sleep(0.05)
        try:
            await asyncio.wait_for(change, START_TIMEOUT_S)
            self.turnover += 1
        finally:
            self.membership.release()

    def _deal(self, work: Sequence[tuple[Submission, Task]]) -> None:
        """Share work out, in order; where nobody is there, it waits for a worker to join."""
        there = [slot for slot in self.slots if not slot.left]
        share = -(-len(work) // max(1, len(there)))
        for i, slot in enumerate(there):
            slot.queue += work[i * share : (i + 1) * share]
            self._revive(slot)
        if not there:
            self._unshared += work
        self._none_queued = False
        self._fill()

    # --- submissions ----------------------------------------------------------------------------------------------------

    def _begin(self, submission: Submission, order: Sequence[Task]) -> None:
        self._open.append(submission)
        self._deal([(submission, self._suspects.judged(task)) for task in order])
        self._close_if_done(submission)

    def _fill(self, *slots: Slot[W]) -> None:
        """Send live workers (`slots`: only these, which have got room) as much as they may have: of their share, then of what others
        have no room for. The cost of an answer must not grow with the tasks nor, while its worker has a share, with the workers."""
        live = [slot for slot in slots or self.slots if slot.live]
        for slot in live:
            self._send(slot, slot.queue)
        for slot in live if self._max_running is not None else ():
            if not slot.queue and not self._none_queued:
                longest = max((other.queue for other in self.slots), key=len)
                self._none_queued = not longest
                self._send(slot, longest)

    def _send(self, slot: Slot[W], queue: deque[tuple[Submission, Task]]) -> None:
        """Send a worker the first tasks of a queue, those of each submission as one batch."""
        if not queue or (self._max_running is None and slot.streams):
            return
        unanswered, most = list(slot.answering.values()), None if self._max_running is None else 2 * self._max_running
        while queue and (most is not None or not slot.streams):
            submission, batch = self._suspects.next_batch(queue, unanswered, most)
            if not batch:
                return
            slot.give(submission, batch)
            slot.streams[asyncio.ensure_future(self._stream(slot, submission, batch))] = submission
            unanswered += batch

    async def _stream(self, slot: Slot[W], submission: Submission, tasks: list[Task]) -> None:
        worker = slot.worker
        try:
            async for summary, group in worker.generate(tasks):
                assert summary.id not in submission.arrived, f"group {summary.id} came twice"
                submission.arrived.add(summary.id)
                self._suspects.clear(slot.given[submission][summary.id])
                submission.events.put((summary, group))
                slot.answering.pop((submission, summary.id), None)
                self._fill(slot)
        except WorkerDied as death:
            self._replace(slot, worker, "", str(death))
        except Exception as error:
            self._close(submission, error)
        slot.streams = {s: owner for s, owner in slot.streams.items() if s is not asyncio.current_task()}
        self._fill(*([slot] if slot.worker is worker and slot.live else self.slots))
        self._close_if_done(submission)

    def _close_if_done(self, submission: Submission) -> None:
        if submission in self._open and len(submission.arrived) == len(submission.tasks):
            self._deaths = 0
            self._close(submission)

    def _close(self, submission: Submission, error: BaseException | None = None) -> None:
        """No more groups of this submission come."""
        if submission not in self._open:
            return
        self._open.remove(submission)
        submission.ended = time.monotonic()
        submission.events.put(error)
        self._unshared = [entry for entry in self._unshared if entry[0] is not submission]
        for slot in self.slots:
            slot.drop(submission)
        self._fill()
