"""Slots of rollout workers: their states, and the tasks of the workers in them.

Only the supervisor's event loop moves slots. The arrows say why:

              constructor done           has the newest weights
    STARTING ──────────────────► LOADING_WEIGHTS ──────────────────► LIVE
        ▲ │                             │                              │
        │ │ dies, or is too slow        │ dies, or hangs               │ dies, or hangs
        │ ▼                             ▼                              ▼
        └─ LOST ◄──────────────────────────────────────────────────────┘
       another │
       worker  │ its node is gone, or too many of its workers died
               ▼
            LEAVING ──► its worker's process has ended: the slot is gone

| state | gets work | receives weight syncs | is watched (heartbeats) |
|---|---|---|---|
| STARTING | no | no | no: its constructor may take half an hour, and answers nothing meanwhile |
| LOADING_WEIGHTS | no | no: it asks the ranks for the newest weights, whole | while it takes them |
| LIVE | yes | yes, and is waited for | while it owes an answer, or has groups that may be needed |
| LOST | no | no | no |
| LEAVING | no | no | no |
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from rlinf_vl.errors import RunError
from rlinf_vl.rollout.submission import QueuedTask, Submission, Task


class WorkersLost(RunError):
    """Rollout workers keep dying."""


class WorkerDied(Exception):
    """A worker, or its engine, is dead."""

    def __init__(self, reason: str, in_constructor: bool = False) -> None:
        """`in_constructor`: its constructor raised, so another worker's would, too."""
        super().__init__(reason)
        self.in_constructor = in_constructor


class SlotState(Enum):
    """The states in this module's diagram."""

    STARTING = auto()
    LOADING_WEIGHTS = auto()
    LIVE = auto()
    LOST = auto()
    LEAVING = auto()


#: The arrows of the diagram: the states that may follow each state.
NEXT_STATES = {
    SlotState.STARTING: {SlotState.LOADING_WEIGHTS, SlotState.LOST},
    SlotState.LOADING_WEIGHTS: {SlotState.LIVE, SlotState.LOST},
    SlotState.LIVE: {SlotState.LOST},
    SlotState.LOST: {SlotState.STARTING, SlotState.LEAVING},
    SlotState.LEAVING: set[SlotState](),
}


class WeightsKey(NamedTuple):
    """The identity of weights.

    Attributes:
        origin: the number of times that weights were forgotten before: when the actor goes back to
            a checkpoint, versions repeat from there, with other weights.
    """

    origin: int
    version: int


class Place(Enum):
    """Whether a slot has its place (GPUs) on a node."""

    THERE = auto()
    AWAITED = auto()  # its node is lost; it waits for another one
    GONE = auto()  # for good


class Worker(Protocol):
    """A rollout worker's process. Waiting for an answer of a dead one raises WorkerDied."""

    async def call(self, method: str, *arguments: Any) -> Any: ...

    def generate(self, tasks: Sequence[Task]) -> AsyncIterator[tuple[Any, Any]]:
        """Answer the tasks; yield (summary, reference) of each group as it finishes."""
        ...

    def cancel(self, group_ids: Collection[str]) -> None:
        """Stop answering these groups, without waiting for that."""

    def release(self, group_ids: Sequence[str] | None) -> None:
        """Free the memory of these groups (None: of all), without waiting for that."""

    def watch(self) -> None:
        """Expect heartbeats from now on."""

    def failure(self) -> str | None:
        """Return why it must be replaced (no heartbeat in time, a dead engine), or None.

        Does not wait for the worker.
        """
        ...

    def kill(self) -> None:
        """End its process, even a stopped one, and those of its engine. May take seconds."""


W = TypeVar("W", bound=Worker)


@dataclass(eq=False)
class Slot(Generic[W]):
    """A numbered position for a worker: its state, the worker, and the worker's tasks.

    Attributes:
        restarts: the number of times its worker was replaced.
        deaths: the number of workers that died here since the last group from here that was used.
        place: whether a node has its place, when the supervisor last looked.
        weights: the worker's weights; None: those with which it started.
        starter: the asyncio task that starts or replaces the worker.
        fault: why no worker can be started, if that is not a worker's fault.
        calls: the number of calls that the worker has not answered.
        hang: why the supervisor killed the worker while it was loading weights.
        blind_looks: the number of successive checks of the worker that failed unexpectedly.
        queue: its share of the tasks that no worker was sent yet.
        sent_tasks: tasks of open submissions that the worker was sent and whose groups may be
            needed, by group id.
        answering: those of `sent_tasks` whose groups have not arrived.
        stored: the ids of unreleased groups in the worker's memory.
        streams: the asyncio tasks that receive groups, with their submissions.
        moved: set at the next change of state or fault, and then replaced.
    """

    number: int
    worker: W
    state: SlotState = SlotState.STARTING
    restarts: int = 0
    deaths: int = 0
    place: Place = Place.THERE
    weights: WeightsKey | None = None
    starter: asyncio.Task[None] | None = None
    fault: Exception | None = None
    calls: int = 0
    hang: str | None = None
    blind_looks: int = 0
    queue: deque[QueuedTask] = field(default_factory=deque)
    sent_tasks: dict[Submission, dict[str, Task]] = field(default_factory=dict)
    answering: dict[tuple[Submission, str], Task] = field(default_factory=dict)
    stored: set[str] = field(default_factory=set)
    streams: dict[asyncio.Task[None], Submission] = field(default_factory=dict)
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def live(self) -> bool:
        return self.state is SlotState.LIVE

    @property
    def busy(self) -> bool:
        """True if the worker owes an answer, or has groups that may be needed."""
        return self.calls > 0 or bool(self.sent_tasks)

    def move(self, state: SlotState) -> None:
        """Change the state along an arrow of the diagram, and wake those who wait for that."""
        # A fault of the supervisor's own: better to fail here than to answer a task twice.
        assert state in NEXT_STATES[self.state], (
            f"slot {self.number}: {self.state.name} to {state.name}"
        )
        self.state = state
        self.fault = None
        self._wake()

    def fail(self, fault: Exception) -> None:
        """Record why no worker can be started, and wake those who wait for the slot."""
        self.fault = fault
        self._wake()

    def _wake(self) -> None:
        # An event of its own for each change: a waiter that is slow to run can't miss one.
        self.moved.set()
        self.moved = asyncio.Event()

    def watch(self) -> None:
        """Note that the worker gets work. If it was idle, expect heartbeats from now on."""
        # An idle worker is asked for none: that it sends none is no reason to replace it.
        if not self.busy:
            self.worker.watch()

    def note_sent(self, submission: Submission, tasks: Sequence[Task]) -> None:
        """Record tasks that the worker is sent."""
        self.watch()
        self.sent_tasks.setdefault(submission, {}).update({task.group_id: task for task in tasks})
        self.answering |= {(submission, task.group_id): task for task in tasks}

    def forget_group(self, submission: Submission, group_id: str) -> bool:
        """Forget a task that was sent to the worker; return whether it was unanswered."""
        # It may be unknown: a submission that ended has forgotten its tasks.
        tasks = self.sent_tasks.get(submission, {})
        tasks.pop(group_id, None)
        if not tasks:
            self.sent_tasks.pop(submission, None)
        return self.answering.pop((submission, group_id), None) is not None

    def forget_submission(self, submission: Submission) -> list[str]:
        """Forget a submission's tasks; return the group ids of the unanswered ones."""
        unanswered = [
            group_id
            for group_id in self.sent_tasks.pop(submission, ())
            if self.answering.pop((submission, group_id), None) is not None
        ]
        # What no worker was sent yet is unanswered, too, but nobody waits for it any more.
        self.queue = deque(entry for entry in self.queue if entry.submission is not submission)
        for stream in [stream for stream, owner in self.streams.items() if owner is submission]:
            stream.cancel()
            del self.streams[stream]
        return unanswered

    def forget_all(self) -> None:
        """Forget the tasks and groups of a worker that is lost."""
        self.sent_tasks, self.answering, self.stored = {}, {}, set()
        for stream in self.streams:
            stream.cancel()
        self.streams = {}
