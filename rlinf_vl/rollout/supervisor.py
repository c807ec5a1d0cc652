"""Sends rollout workers their work, notices which of them die or hang, replaces those, and sends lost work again. No Ray.

One thread with an event loop does all of it: nothing else changes slots and submissions. Invariants:
- Each task of a submission ends with exactly one group, whatever dies. A worker's groups live in its memory, so when it dies
  all of its tasks are sent again, also those whose groups had arrived.
- A worker is watched while it owes an answer or has groups of an open submission. One that dies idle is replaced when it is next
  asked for something, and not before: until then its GPU may be the trainer's.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from rlinf_vl.errors import RunError
from rlinf_vl.rollout.submission import Event, Resent, Submission, Task
from rlinf_vl.rollout.suspects import Suspects

#: Seconds that a replacement has to load its model and start its engine.
START_TIMEOUT_S = 1800.0
#: Workers replaced since a submission ended well before the supervisor gives up: chance does not kill so many.
MAX_REPLACEMENTS = 8
#: Seconds between two looks at whether busy workers are well.
WATCH_S = 1.0


class WorkersLost(RunError):
    """Rollout workers keep dying."""


class WorkerDied(Exception):
    """The worker, or its engine, is dead. `in_constructor`: its constructor raised, as that of any replacement would."""

    def __init__(self, reason: str, in_constructor: bool = False) -> None:
        super().__init__(reason)
        self.in_constructor = in_constructor


class Worker(Protocol):
    """A rollout worker's process. Whoever waits for it gets WorkerDied once it is dead. `generate` gives (summary, reference) of
    each task's group."""

    async def call(self, method: str, *arguments: Any) -> Any: ...

    def generate(self, tasks: Sequence[Task]) -> AsyncIterator[tuple[Any, Any]]: ...

    def watch(self) -> None:
        """Expect heartbeats from now on."""

    def failure(self) -> str | None:
        """Why it must be replaced (no heartbeat in time, a dead engine), or None. Never waits."""
        ...

    def kill(self) -> None:
        """End its process even if that is stopped. Its engine's processes end with it."""


W = TypeVar("W", bound=Worker)


@dataclass(eq=False)
class _Slot(Generic[W]):
    """A position for a worker, the worker in it, and what that one has to do."""

    number: int
    worker: W
    start: asyncio.Task[None] | None = (
        None  # done when the worker has its model and the current weights, or can't be had
    )
    restarts: int = 0
    calls: int = 0  # being answered
    hang: str | None = None  # why a worker that was to take the current weights was killed
    queue: deque[tuple[Submission, Task]] = field(default_factory=deque)  # its share of what is not sent yet
    given: dict[Submission, dict[str, Task]] = field(default_factory=dict)  # tasks of open submissions, by group
    answering: dict[tuple[Submission, str], Task] = field(default_factory=dict)  # those of them that have not arrived
    streams: dict[asyncio.Task[None], Submission] = field(default_factory=dict)

    @property
    def live(self) -> bool:
        return self.start is not None and self.start.done() and self.start.exception() is None

    def watch(self) -> None:
        """The worker is asked for something: if it was idle, its heartbeat counts from now on."""
        if not self.calls and not self.given:
            self.worker.watch()


class Supervisor(Generic[W]):
    """
    Args:
        make: a new worker for slot 0 … n - 1.
        max_running: most samples that a worker's engine runs at once. A worker is sent twice that of its share of a submission,
            and one more task for each that it finishes; when its share is used up, it gets what others have no room for.
            None: each worker answers its share as one batch, one submission after the other. The embedded engine needs that:
            a logprob's last digits depend on who else is in the batch, which must not depend on time if a resumed run is to
            equal one that was never stopped.
        max_row_faults: workers that may die while they answer a row (`Suspects`).
        report: called, in the supervisor's thread, for every worker that is replaced.
    """

    def __init__(
        self,
        make: Callable[[int], W],
        n: int,
        *,
        max_running: int | None,
        report: Callable[[str], None],
        max_row_faults: int = 3,
    ) -> None:
        self.slots = [_Slot(i, make(i)) for i in range(n)]
        #: (what gives the current weights as buckets, their version); None: those that workers start with.
        self.weights: tuple[Callable[[], Sequence[Any]], int] | None = None
        self._make = make
        self._max_running = max_running
        self._suspects = Suspects(max_row_faults)
        self._report = report
        self._deaths = 0  # since the last submission that ended well
        self._open: list[Submission] = []
        self._none_queued = False  # no slot has a task in its queue; False: some may
        self._watcher: asyncio.Task[None] | None = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="rollout-supervisor", daemon=True).start()

    # --- for other threads ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Wait until all workers have started. What a constructor raises is raised here: it is no chance."""

        async def start() -> None:
            for slot in self.slots:
                slot.start = asyncio.create_task(self._start(slot, first=True))
            self._watcher = asyncio.create_task(self._watch())
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
        """Call the worker in a slot, or its replacement. `what` ends the sentence "a rollout worker is replaced …"."""

        async def call(slot: _Slot[W]) -> Any:
            while True:
                await asyncio.shield(self._revive(slot))
                worker = slot.worker
                try:
                    return await self._owed(slot, worker.call(method, *arguments))
                except WorkerDied as death:
                    self._replace(slot, worker, what, str(death))

        return self._run(call(self.slots[number]))

    def settle(self, number: int, worker: W, answer: Awaitable[Any]) -> Future:
        """Wait until a worker has taken weights that it was offered, and return its answer; or until its replacement has the
        current ones."""

        async def settle(slot: _Slot[W]) -> Any:
            try:
                return await self._owed(slot, answer)
            except WorkerDied as death:
                self._replace(slot, worker, "during a weight sync", str(death))
                await asyncio.shield(self._revive(slot))

        return self._run(settle(self.slots[number]))

    def replace_all(self) -> None:
        """Replace every worker, whatever it is doing, and wait until the new ones are live."""

        async def replace(slot: _Slot[W]) -> None:
            if slot.start is not None:
                slot.start.cancel()
            self._requeue(slot)
            self._renew(slot)
            slot.start = asyncio.create_task(self._start(slot))
            await slot.start

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

    # --- workers --------------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Replace workers that hang while they have something to do."""
        while True:
            await asyncio.sleep(WATCH_S)
            for slot in self.slots:
                if (slot.calls or slot.given) and (reason := slot.worker.failure()):
                    if slot.live:
                        self._replace(slot, slot.worker, "while idle", reason)
                    else:
                        slot.hang = reason
                        slot.worker.kill()

    async def _owed(self, slot: _Slot[W], answer: Awaitable[Any]) -> Any:
        """Wait for an answer that the slot's worker owes."""
        slot.watch()
        slot.calls += 1
        try:
            return await answer
        finally:
            slot.calls -= 1

    def _revive(self, slot: _Slot[W]) -> asyncio.Task[None]:
        """The start of the slot's worker, which may be done; if it failed, the start of another one."""
        assert slot.start is not None, "start() comes first"
        if slot.start.done() and (error := slot.start.exception()):
            self._replace(slot, slot.worker, "while idle", str(error))
        return slot.start

    def _replace(self, slot: _Slot[W], worker: W, what: str, reason: str) -> None:
        """Start another worker in the slot of one that is dead or hangs, unless that was done already."""
        if slot.worker is not worker or slot.start is None or not slot.start.done():
            return
        if groups := sum(map(len, slot.given.values())):
            what = f"and its {groups} groups are sent again"
        self._suspects.accuse(slot.answering.values())
        self._requeue(slot)
        slot.start = asyncio.create_task(self._start(slot, failed=(what, reason)))

    async def _start(self, slot: _Slot[W], *, first: bool = False, failed: tuple[str, str] | None = None) -> None:
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
                    if self.weights is not None:
                        buckets, version = self.weights
                        held = await asyncio.to_thread(buckets)  # which may wait for ranks that train
                        await self._owed(slot, slot.worker.call("load_weights", held, version))
                    break
                except WorkerDied as death:
                    if first and death.in_constructor:
                        raise death.__cause__ or death from None
                    reason, slot.hang = slot.hang or str(death), None
                except TimeoutError:
                    reason = f"it did not start within {START_TIMEOUT_S:g} s"
                failed = "while it starts" if first else "before it has taken the place of another", reason
        except Exception as error:  # open submissions have tasks for this slot
            for submission in list(self._open):
                self._close(submission, error)
            raise
        self._loop.call_soon(self._fill)

    def _renew(self, slot: _Slot[W]) -> None:
        slot.worker.kill()
        slot.worker = self._make(slot.number)
        slot.restarts += 1

    def _requeue(self, slot: _Slot[W]) -> None:
        """The tasks of the slot's worker are to be sent again, also those whose groups have arrived."""
        for submission, tasks in slot.given.items():
            if again := submission.arrived & tasks.keys():
                submission.events.put(Resent(frozenset(again)))
            submission.arrived -= again
            slot.queue.extendleft((submission, self._suspects.judged(task)) for task in reversed(tasks.values()))
        self._none_queued = False
        slot.given, slot.answering = {}, {}
        for stream in slot.streams:
            stream.cancel()
        slot.streams = {}

    # --- submissions ----------------------------------------------------------------------------------------------------

    def _begin(self, submission: Submission, order: Sequence[Task]) -> None:
        self._open.append(submission)
        share = -(-len(order) // len(self.slots))
        for slot in self.slots:
            mine = order[slot.number * share : (slot.number + 1) * share]
            slot.queue += [(submission, self._suspects.judged(task)) for task in mine]
            self._revive(slot)
        self._none_queued = False
        self._fill()
        self._close_if_done(submission)

    def _fill(self, *slots: _Slot[W]) -> None:
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

    def _send(self, slot: _Slot[W], queue: deque[tuple[Submission, Task]]) -> None:
        """Send a worker the first tasks of a queue, those of each submission as one batch."""
        if not queue or (self._max_running is None and slot.streams):
            return
        unanswered = list(slot.answering.values())
        running = sum(len(task.seeds) for task in unanswered)
        while queue and (self._max_running is not None or not slot.streams):
            submission, batch = queue[0][0], list[Task]()
            if unanswered and any(map(self._suspects.alone, [*unanswered, queue[0][1]])):
                return
            while queue and queue[0][0] is submission:
                if batch and any(map(self._suspects.alone, [batch[0], queue[0][1]])):
                    break
                samples = len(queue[0][1].seeds)
                if self._max_running is not None and running and running + samples > 2 * self._max_running:
                    break
                running += samples
                batch.append(queue.popleft()[1])
            if not batch:
                return
            slot.watch()
            slot.given.setdefault(submission, {}).update({task.group_id: task for task in batch})
            slot.answering |= {(submission, task.group_id): task for task in batch}
            slot.streams[asyncio.ensure_future(self._stream(slot, submission, batch))] = submission
            unanswered += batch

    async def _stream(self, slot: _Slot[W], submission: Submission, tasks: list[Task]) -> None:
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
        self._fill()
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
        for slot in self.slots:
            for group_id in slot.given.pop(submission, ()):
                slot.answering.pop((submission, group_id), None)
            slot.queue = deque(entry for entry in slot.queue if entry[0] is not submission)
            for stream in [stream for stream, owner in slot.streams.items() if owner is submission]:
                stream.cancel()
                del slot.streams[stream]
        self._fill()
