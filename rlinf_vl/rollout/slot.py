"""A position for a rollout worker, and what the supervisor knows of the worker in it."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from rlinf_vl.errors import RunError
from rlinf_vl.rollout.submission import Submission, Task


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
class Slot(Generic[W]):
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
    left: bool = False  # with its node: nothing is asked of it any more

    @property
    def starting(self) -> bool:
        return self.start is not None and not self.start.done()

    @property
    def live(self) -> bool:
        return not self.left and self.start is not None and self.start.done() and self.start.exception() is None

    def watch(self) -> None:
        """The worker is asked for something: if it was idle, its heartbeat counts from now on."""
        if not self.calls and not self.given:
            self.worker.watch()

    def give(self, submission: Submission, tasks: Sequence[Task]) -> None:
        """Note what the worker is to answer."""
        self.watch()
        self.given.setdefault(submission, {}).update({task.group_id: task for task in tasks})
        self.answering |= {(submission, task.group_id): task for task in tasks}

    def drop(self, submission: Submission) -> None:
        """Nobody wants this submission's groups any more."""
        for group_id in self.given.pop(submission, ()):
            self.answering.pop((submission, group_id), None)
        self.queue = deque(entry for entry in self.queue if entry[0] is not submission)
        for stream in [stream for stream, owner in self.streams.items() if owner is submission]:
            stream.cancel()
            del self.streams[stream]

    def forget(self) -> None:
        """The worker has nothing to answer any more."""
        self.given, self.answering = {}, {}
        for stream in self.streams:
            stream.cancel()
        self.streams = {}
