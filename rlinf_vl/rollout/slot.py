"""A position for a rollout worker: the states that it goes through, and what its worker has to do.

One event loop, the supervisor's, moves slots; nothing else does. What moves each:

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
from typing import Any, Generic, Protocol, TypeVar

from rlinf_vl.errors import RunError
from rlinf_vl.rollout.submission import Submission, Task


class WorkersLost(RunError):
    """Rollout workers keep dying."""


class WorkerDied(Exception):
    """The worker, or its engine, is dead. `in_constructor`: its constructor raised, as any other's would."""

    def __init__(self, reason: str, in_constructor: bool = False) -> None:
        super().__init__(reason)
        self.in_constructor = in_constructor


class SlotState(Enum):
    """The states in this module's diagram."""

    STARTING = auto()
    LOADING_WEIGHTS = auto()
    LIVE = auto()
    LOST = auto()
    LEAVING = auto()


#: The arrows of the diagram.
NEXT_STATES = {
    SlotState.STARTING: {SlotState.LOADING_WEIGHTS, SlotState.LOST},
    SlotState.LOADING_WEIGHTS: {SlotState.LIVE, SlotState.LOST},
    SlotState.LIVE: {SlotState.LOST},
    SlotState.LOST: {SlotState.STARTING, SlotState.LEAVING},
    SlotState.LEAVING: set[SlotState](),
}


class Place(Enum):
    """The place of a slot: a node has it; its node is lost, and another one awaited; it is gone for good."""

    THERE = auto()
    AWAITED = auto()
    GONE = auto()


class Worker(Protocol):
    """A rollout worker's process. Whoever waits for it gets WorkerDied once it is dead."""

    async def call(self, method: str, *arguments: Any) -> Any: ...

    def generate(self, tasks: Sequence[Task]) -> AsyncIterator[tuple[Any, Any]]:
        """Answer the tasks: (summary, reference) of each group as it finishes."""
        ...

    def cancel(self, group_ids: Collection[str]) -> None:
        """Stop answering these groups. Does not wait."""

    def release(self, group_ids: Sequence[str] | None) -> None:
        """Free the memory of these groups (None: of all). Does not wait."""

    def watch(self) -> None:
        """Expect heartbeats from now on."""

    def failure(self) -> str | None:
        """Return why it must be replaced (no heartbeat in time, a dead engine), or None. Does not wait."""
        ...

    def kill(self) -> None:
        """End its process even if that is stopped. Its engine's processes end with it. May take seconds."""


W = TypeVar("W", bound=Worker)


@dataclass(eq=False)
class Slot(Generic[W]):
    """A position for a worker, the worker in it, and what that one has to do.

    Attributes:
        deaths: workers that died here since a group that one of them sampled was of use.
        place: whether a node has its place, as far as the supervisor has looked.
        weights: (origin, version) of the weights that the worker holds; None: those it started with.
        starter: the task that starts, or replaces, its worker.
        fault: why no worker can be started, by no fault of the worker.
        calls: calls that the worker is answering.
        hang: why the supervisor has killed a worker that was loading weights.
        blind_looks: heartbeats in a row that could not be read, for a reason that nobody expected.
        queue: its share of the tasks that are not sent yet.
        given: tasks of open submissions that it was sent and whose groups may be needed, by group id.
        answering: those of `given` that have not arrived.
        stored: groups in the worker's memory that nobody has released.
    """

    number: int
    worker: W
    state: SlotState = SlotState.STARTING
    restarts: int = 0
    deaths: int = 0
    place: Place = Place.THERE
    weights: tuple[int, int] | None = None
    starter: asyncio.Task[None] | None = None
    fault: Exception | None = None
    calls: int = 0
    hang: str | None = None
    blind_looks: int = 0
    queue: deque[tuple[Submission, Task]] = field(default_factory=deque)
    given: dict[Submission, dict[str, Task]] = field(default_factory=dict)
    answering: dict[tuple[Submission, str], Task] = field(default_factory=dict)
    stored: set[str] = field(default_factory=set)
    streams: dict[asyncio.Task[None], Submission] = field(default_factory=dict)
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def live(self) -> bool:
        return self.state is SlotState.LIVE

    @property
    def busy(self) -> bool:
        """Whether its worker owes an answer, or has groups that may be needed."""
        return self.calls > 0 or bool(self.given)

    def move(self, state: SlotState) -> None:
        """Go to another state, along an arrow of the diagram, and wake whoever waits for that."""
        assert state in NEXT_STATES[self.state], f"slot {self.number}: {self.state.name} to {state.name}"
        self.state = state
        self.fault = None
        self._wake()

    def fail(self, fault: Exception) -> None:
        """Tell whoever waits for this slot that no worker can be started."""
        self.fault = fault
        self._wake()

    def _wake(self) -> None:
        self.moved.set()
        self.moved = asyncio.Event()

    def watch(self) -> None:
        """Note that the worker is asked for something: if it was idle, its heartbeat counts from now on."""
        if not self.busy:
            self.worker.watch()

    def give(self, submission: Submission, tasks: Sequence[Task]) -> None:
        """Note what the worker is to answer."""
        self.watch()
        self.given.setdefault(submission, {}).update({task.group_id: task for task in tasks})
        self.answering |= {(submission, task.group_id): task for task in tasks}

    def take_back(self, submission: Submission, group_id: str) -> bool:
        """Forget a group that was sent to the worker; True if it was still to be answered."""
        tasks = self.given.get(submission, {})
        tasks.pop(group_id, None)
        if not tasks:
            self.given.pop(submission, None)
        return self.answering.pop((submission, group_id), None) is not None

    def drop(self, submission: Submission) -> list[str]:
        """Forget a submission; returns the groups that the worker is still answering."""
        unanswered = [
            group_id
            for group_id in self.given.pop(submission, ())
            if self.answering.pop((submission, group_id), None) is not None
        ]
        self.queue = deque(entry for entry in self.queue if entry[0] is not submission)
        for stream in [stream for stream, owner in self.streams.items() if owner is submission]:
            stream.cancel()
            del self.streams[stream]
        return unanswered

    def forget(self) -> None:
        """Forget everything that the worker, which is lost, was to answer or had stored."""
        self.given, self.answering, self.stored = {}, {}, set()
        for stream in self.streams:
            stream.cancel()
        self.streams = {}
