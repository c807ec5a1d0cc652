"""One thread that sends rollout workers their work, notices which of them die or hang, replaces those and sends lost work again.

No Ray here: a worker is made by a callable, and `wait` and `outcome` tell what its handles came to.

Invariants:
- Only the supervisor's thread changes slots and submissions. Other threads post commands, and wait for futures and events.
- Each task of a submission ends with exactly one group, whatever dies. A worker's groups live in its memory, so when it dies
  all of its tasks are sent again, also those whose groups had arrived.
- A worker is watched while it owes an answer. One that dies idle is replaced when it is next asked for something, and not
  before: until then its GPU may be the trainer's.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from rlinf_vl.errors import RunError

log = logging.getLogger(__name__)

#: Seconds that a replacement has to load its model and start its engine.
START_TIMEOUT_S = 1800.0
#: Workers replaced since a submission ended well before the supervisor gives up: chance does not kill so many.
MAX_REPLACEMENTS = 8
#: Most seconds between two looks at commands and heartbeats while workers are at work.
TICK_S = 0.1
#: Most seconds between two calls of `check` by a thread that waits for groups.
CHECK_S = 0.5


class WorkersLost(RunError):
    """Rollout workers keep dying."""


class WorkerDied(Exception):
    """The worker, or its engine, is dead. `in_constructor`: its constructor raised, as that of any replacement would."""

    def __init__(self, reason: str, in_constructor: bool = False) -> None:
        super().__init__(reason)
        self.in_constructor = in_constructor


@dataclass(frozen=True, slots=True)
class Task:
    """Answer row `row` of `split` ("train" or "val") with one sample per seed; `group_id` names the result.

    `own_images`: no other row is known to show the images of this one.
    """

    group_id: str
    split: str
    row: int
    seeds: tuple[int, ...]
    own_images: bool = False


class Worker(Protocol):
    """A rollout worker's process. No method waits for it."""

    def call(self, method: str, *args: Any) -> Hashable:
        """A handle of the answer; `generate` answers with a stream of (summary, reference) pairs."""
        ...

    def watch(self) -> None:
        """Expect heartbeats from now on."""

    def failure(self) -> str | None:
        """Why it must be replaced (no heartbeat in time, a dead engine), or None."""
        ...

    def kill(self) -> None:
        """End its process even if that is stopped. Its engine's processes end with it."""


W = TypeVar("W", bound=Worker)


class Submission:
    """The groups of some tasks, as (summary, reference) pairs in the order in which they finish.

    A group comes a second time if its worker dies before the submission is done; the second one replaces the first.
    """

    def __init__(self, tasks: Sequence[Task], close: Callable[["Submission"], None], check: Callable[[], None]) -> None:
        self.tasks = list(tasks)
        self.queue: deque[Task] = deque()  # what any worker may be given next
        self.arrived: set[str] = set()
        self.events: SimpleQueue[tuple[Any, Any] | BaseException | None] = SimpleQueue()
        self._close = close
        self._check = check

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """Raises WorkersLost, and what a task or `check` raised. Leaving the loop early abandons the remaining tasks."""
        try:
            while True:
                self._check()
                with suppress(Empty):
                    event = self.events.get(timeout=CHECK_S)
                    if event is None:
                        return
                    if isinstance(event, BaseException):
                        raise event
                    yield event
        finally:
            self._close(self)

    def results(self) -> list[tuple[Any, Any]]:
        """Wait for all groups; the order is that of the tasks."""
        found = {summary.id: (summary, group) for summary, group in self}
        return [found[task.group_id] for task in self.tasks]


@dataclass(eq=False)
class _Batch:
    """Tasks that a worker answers in one stream."""

    submission: Submission
    tasks: list[Task]


@dataclass(eq=False)
class _Call:
    """A call that the slot's worker must answer, or else its replacement; with `method` None, any live replacement will do."""

    what: str
    method: str | None
    arguments: tuple
    future: Future = field(default_factory=Future)


class _Stage(Enum):
    DOWN = "to be replaced when something is asked of it"
    STARTING = "loads model and data"
    LOADING = "takes the current weights"
    LIVE = "does what it is asked"


@dataclass(eq=False)
class _Slot(Generic[W]):
    """A position for a worker, the worker in it, and what that one owes."""

    number: int
    worker: W
    stage: _Stage = _Stage.LIVE
    failure: str = ""  # why it is down
    restarts: int = 0
    start: Hashable | None = None  # handle of the call that a worker which is STARTING or LOADING must answer
    deadline: float = float("inf")  # of that call
    streams: dict[Hashable, _Batch] = field(default_factory=dict)
    calls: dict[Hashable, _Call] = field(default_factory=dict)
    waiting: list[_Call] = field(default_factory=list)  # made when the slot is live
    reserved: deque[_Batch] = field(default_factory=deque)  # without `max_running`: sent one after the other
    given: dict[Submission, dict[str, Task]] = field(default_factory=dict)  # tasks of open submissions, by group

    @property
    def handles(self) -> list[Hashable]:
        return [*([] if self.start is None else [self.start]), *self.calls, *self.streams]


class Supervisor(Generic[W]):
    """
    Args:
        make: a new worker for slot 0 … n - 1.
        wait: those handles of a list that are answered, or whose stream has something; one or more, or none after so many seconds.
        outcome: what a handle came to. Raises StopIteration at the end of a stream, WorkerDied, or what the call raised.
        max_running: most samples that a worker's engine runs at once. A worker is given twice that, and one more task for each
            that it finishes. None: each worker answers its share of a submission as one batch, one submission after the
            other. The embedded engine needs that: a logprob's last digits depend on who else is in the batch, which must
            not depend on time if a resumed run is to equal one that was never stopped.
        report: called, in the supervisor's thread, for every worker that is replaced.
    """

    def __init__(
        self,
        make: Callable[[int], W],
        n: int,
        *,
        wait: Callable[[list[Any], float], list[Any]],
        outcome: Callable[[Any], Any],
        max_running: int | None,
        report: Callable[[str], None],
    ) -> None:
        self.slots = [_Slot(i, make(i)) for i in range(n)]
        #: (what gives the current weights as buckets, their version); None: those that workers start with.
        self.weights: tuple[Callable[[], Sequence[Any]], int] | None = None
        self._make = make
        self._wait = wait
        self._outcome = outcome
        self._max_running = max_running
        self._report = report
        self._deaths = 0  # since the last submission that ended well
        self._first_start = True
        self._open: list[Submission] = []
        self._commands: SimpleQueue[tuple[Callable[[], Any], Future] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rollout-supervisor", daemon=True)
        self._thread.start()

    # --- for other threads ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Watch the first workers start. What a constructor raises is raised by `results`: it is no chance."""
        self._post(lambda: [self._await_start(slot) for slot in self.slots])

    def submit(self, tasks: Sequence[Task], order: Sequence[Task], check: Callable[[], None]) -> Submission:
        """Have the tasks answered, sent in `order`. Whoever waits for the groups calls `check` at least once a second."""
        submission = Submission(tasks, lambda it: self._post(lambda: self._close(it), wait=True), check)
        submission.queue.extend(order)
        self._post(lambda: self._begin(submission))
        return submission

    def call(self, number: int, what: str, method: str, *arguments: Any) -> Future:
        """Call the worker in a slot, or its replacement. `what` ends the sentence "a rollout worker is replaced …"."""
        call = _Call(what, method, arguments)
        self._post(lambda: self._ask(self.slots[number], call))
        return call.future

    def watch(self, number: int, what: str, handle: Hashable) -> Future:
        """Done when a call that the slot's worker was asked for is answered, or when a replacement has the current weights."""
        call = _Call(what, None, ())

        def begin() -> None:
            slot = self.slots[number]
            if slot.stage is _Stage.LIVE:
                slot.calls[handle] = call
            else:
                self._ask(slot, call)

        self._post(begin)
        return call.future

    def results(self, futures: Sequence[Future]) -> list[Any]:
        try:
            return [future.result() for future in futures]
        except KeyboardInterrupt as error:  # Ray is shut down next, and must not be waited for meanwhile
            self._post(lambda error=error: self._drop_all(error), wait=True)
            raise

    def replace_all(self) -> None:
        """Replace every worker, whatever it is doing."""
        self._post(lambda: [self._start(slot) for slot in self.slots])

    def stop(self) -> None:
        """End the thread; the workers live on."""
        self._commands.put(None)

    def _post(self, command: Callable[[], Any], wait: bool = False) -> None:
        done = Future()
        self._commands.put((command, done))
        if wait and self._thread.is_alive() and threading.current_thread() is not self._thread:
            done.result()

    # --- the thread -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            idle = not any(slot.handles for slot in self.slots)
            try:
                posted = self._commands.get(block=idle)
            except Empty:
                self._guarded(self._look)
                continue
            if posted is None:
                return
            self._guarded(posted[0])
            posted[1].set_result(None)

    def _guarded(self, step: Callable[[], Any]) -> None:
        """An error that belongs to no single call or submission ends them all. The next command begins anew."""
        try:
            step()
        except BaseException as error:
            self._drop_all(error)

    def _drop_all(self, error: BaseException) -> None:
        for submission in list(self._open):
            self._close(submission, error)
        for slot in self.slots:
            if slot.start is not None:
                self._take_down(slot, str(error))
            for call in [*slot.calls.values(), *slot.waiting]:
                call.future.set_exception(error)
            slot.calls.clear()
            slot.waiting.clear()

    def _look(self) -> None:
        """Wait a moment for an answer. Replace workers that fail."""
        owners = {handle: slot for slot in self.slots for handle in slot.handles}
        for handle in self._wait(list(owners), TICK_S):
            if handle in owners[handle].handles:  # else its worker was replaced just now
                self._answered(owners[handle], handle)
        for slot in self.slots:
            if time.monotonic() > slot.deadline:
                self._replace(slot, f"it did not start within {START_TIMEOUT_S:.0f} s")
            elif slot.handles and slot.stage in (_Stage.LOADING, _Stage.LIVE) and (reason := slot.worker.failure()):
                self._replace(slot, reason)

    def _answered(self, slot: _Slot, handle: Hashable) -> None:
        batch, call = slot.streams.get(handle), slot.calls.get(handle)
        try:
            value = self._outcome(handle)
        except StopIteration:
            submission = slot.streams.pop(handle).submission
            self._fill()
            self._close_if_done(submission)
        except WorkerDied as death:
            if death.in_constructor and self._first_start:
                raise death.__cause__ or death from None
            self._replace(slot, str(death))
        except Exception as error:
            if batch is not None:
                self._close(batch.submission, error)
            elif call is not None:
                slot.calls.pop(handle).future.set_exception(error)
            else:
                raise
        else:
            if batch is not None:
                self._arrived(batch.submission, *value)
            elif call is not None:
                slot.calls.pop(handle).future.set_result(value)
            else:
                self._started(slot)

    # --- slots ----------------------------------------------------------------------------------------------------------

    def _ask(self, slot: _Slot, call: _Call) -> None:
        if slot.stage is not _Stage.LIVE:
            slot.waiting.append(call)
            self._revive(slot)
        elif call.method is None:
            call.future.set_result(None)
        else:
            self._watch(slot)
            slot.calls[slot.worker.call(call.method, *call.arguments)] = call

    def _watch(self, slot: _Slot) -> None:
        if not slot.handles:
            slot.worker.watch()

    def _revive(self, slot: _Slot) -> None:
        if slot.stage is _Stage.DOWN:
            self._replace(slot, slot.failure)

    def _take_down(self, slot: _Slot, reason: str) -> None:
        slot.stage = _Stage.DOWN
        slot.failure = reason
        slot.start = None
        slot.deadline = float("inf")

    def _replace(self, slot: _Slot, reason: str) -> None:
        """Start a new worker in the place of one that is dead or can't be trusted; it is asked again for what that one owed.

        Raises:
            WorkersLost: more than `MAX_REPLACEMENTS` failed since the last submission that ended well.
        """
        calls = [*slot.calls.values(), *slot.waiting]
        if slot.start is not None:
            what = "while it starts" if self._first_start else "before it has taken the place of another"
        elif slot.given:
            what = f"and its {sum(map(len, slot.given.values()))} groups are sent again"
        else:
            what = calls[0].what if calls else "while idle"
        self._deaths += 1
        if self._deaths > MAX_REPLACEMENTS:
            self._take_down(slot, reason)
            raise WorkersLost(
                f"{self._deaths} rollout workers failed since the last rollout that ended well; the last one: {reason}"
            )
        self._report(f"a rollout worker is replaced {what}: {reason}")
        self._start(slot)

    def _start(self, slot: _Slot) -> None:
        for submission, tasks in slot.given.items():
            submission.arrived -= tasks.keys()
            if self._max_running is None:
                slot.reserved.appendleft(_Batch(submission, list(tasks.values())))
            else:
                submission.queue.extendleft(reversed(tasks.values()))
        slot.given.clear()
        slot.streams.clear()
        slot.waiting = [*slot.calls.values(), *slot.waiting]
        slot.calls.clear()
        self._take_down(slot, "its replacement could not be made")
        slot.worker.kill()
        slot.worker = self._make(slot.number)
        slot.restarts += 1
        self._await_start(slot)

    def _await_start(self, slot: _Slot) -> None:
        slot.stage = _Stage.STARTING
        slot.start = slot.worker.call("ready")
        slot.deadline = float("inf") if self._first_start else time.monotonic() + START_TIMEOUT_S

    def _started(self, slot: _Slot) -> None:
        """The worker has its model: give it the current weights, and then what waits for it."""
        stage = slot.stage
        self._take_down(slot, "it did not get the current weights")
        slot.worker.watch()
        if stage is _Stage.STARTING and self.weights is not None:
            buckets, version = self.weights
            slot.start = slot.worker.call("load_weights", buckets(), version)
            slot.stage = _Stage.LOADING
            return
        slot.stage = _Stage.LIVE
        self._first_start = self._first_start and any(other.start is not None for other in self.slots)
        waiting, slot.waiting = slot.waiting, []
        for call in waiting:
            self._ask(slot, call)
        self._fill()

    # --- submissions ----------------------------------------------------------------------------------------------------

    def _begin(self, submission: Submission) -> None:
        self._open.append(submission)
        queue, share = submission.queue, -(-len(submission.tasks) // len(self.slots))
        for slot in self.slots:
            if self._max_running is None and queue:
                tasks = [queue.popleft() for _ in range(min(share, len(queue)))]
                slot.reserved.append(_Batch(submission, tasks))
            self._revive(slot)
        self._fill()
        self._close_if_done(submission)

    def _fill(self) -> None:
        """Give live workers as much work as they may have."""
        for slot in self.slots:
            if slot.stage is not _Stage.LIVE:
                continue
            if slot.reserved and not slot.streams:
                self._send(slot, slot.reserved.popleft())
            for submission in self._open:
                if submission.queue and (tasks := self._next_tasks(slot, submission)):
                    self._send(slot, _Batch(submission, tasks))

    def _next_tasks(self, slot: _Slot, submission: Submission) -> list[Task]:
        """Tasks of a submission that bring a slot to its share of it, or to twice `max_running` samples."""
        assert self._max_running is not None
        running = [t for s, tasks in slot.given.items() for t in tasks.values() if t.group_id not in s.arrived]
        mine = sum(task.group_id in slot.given.get(submission, {}) for task in running)
        samples = sum(len(task.seeds) for task in running)
        tasks: list[Task] = []
        while submission.queue and mine + len(tasks) < -(-len(submission.tasks) // len(self.slots)):
            samples += len(submission.queue[0].seeds)
            if (running or tasks) and samples > 2 * self._max_running:
                break
            tasks.append(submission.queue.popleft())
        return tasks

    def _send(self, slot: _Slot, batch: _Batch) -> None:
        slot.given.setdefault(batch.submission, {}).update({task.group_id: task for task in batch.tasks})
        self._watch(slot)
        slot.streams[slot.worker.call("generate", batch.tasks)] = batch

    def _arrived(self, submission: Submission, summary: Any, group: Any) -> None:
        assert summary.id not in submission.arrived, f"group {summary.id} came twice"
        submission.arrived.add(summary.id)
        submission.events.put((summary, group))
        self._fill()

    def _close_if_done(self, submission: Submission) -> None:
        streaming = any(batch.submission is submission for slot in self.slots for batch in slot.streams.values())
        if submission in self._open and len(submission.arrived) == len(submission.tasks) and not streaming:
            self._deaths = 0
            self._close(submission)

    def _close(self, submission: Submission, error: BaseException | None = None) -> None:
        """No more groups of this submission come; streams that it still has are dropped."""
        if submission not in self._open:
            return
        self._open.remove(submission)
        submission.events.put(error)
        for slot in self.slots:
            slot.given.pop(submission, None)
            slot.reserved = deque(batch for batch in slot.reserved if batch.submission is not submission)
            slot.streams = {h: batch for h, batch in slot.streams.items() if batch.submission is not submission}
        self._fill()
