"""What a pool is asked for, and how its groups come back."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from rlinf_vl.data.corruption import Corruption

#: Most seconds between two calls of `check` by a thread that waits for groups.
CHECK_S = 0.5


@dataclass(frozen=True, slots=True)
class Task:
    """Answer row `row` of `split` ("train" or "val") with one sample per seed; `group_id` names the result.

    `group_seed`: what the environments of the group have in common is drawn from it.
    `own_images`: no other row is known to show the images of this one.
    `fault`: why it is not to be answered; "": it is.
    `summary_only`: the group itself is not wanted: it is not stored, and its reference is None.
    `corruption`: how images are corrupted for some of the samples, drawn from `group_seed`; None: for none.
    """

    group_id: str
    split: str
    row: int
    seeds: tuple[int, ...]
    own_images: bool = False
    group_seed: int = 0
    fault: str = ""
    corruption: Corruption | None = None
    summary_only: bool = False


class GroupArrived(NamedTuple):
    """A group has been sampled: its summary, and a reference to it in the object store (None where `summary_only`)."""

    summary: Any
    group: Any


@dataclass(frozen=True, slots=True)
class GroupsResent:
    """Groups that had arrived are lost with their worker, and come again."""

    group_ids: frozenset[str]


@dataclass(frozen=True, slots=True)
class SubmissionEnded:
    """No more groups of a submission come: all have, or (`error`) something ended it."""

    error: BaseException | None = None


Event = GroupArrived | GroupsResent | SubmissionEnded


class Submission:
    """The groups of some tasks, as (summary, reference) pairs in the order in which they finish.

    A group comes a second time if its worker dies before the group is acknowledged or the submission is done; the second
    one replaces the first.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        check: Callable[[], None],
        close: Callable[["Submission"], Any],
        events: SimpleQueue[Event] | None = None,
    ) -> None:
        """`events`: where events go, if several submissions are to be waited for at once."""
        self.tasks = list(tasks)
        self.group_ids = {task.group_id for task in tasks}
        self.arrived: set[str] = set()
        self.cancelled: set[str] = set()  # before they arrived
        self.ended: float | None = None  # by `time.monotonic`
        self.events: SimpleQueue[Event] = SimpleQueue() if events is None else events
        self._check = check
        self._close = close

    @property
    def done(self) -> bool:
        """Whether every group has arrived or was cancelled."""
        return len(self.arrived) + len(self.cancelled) == len(self.group_ids)

    def wait(self) -> list[Event]:
        """Return the next event, once there is one; none after a moment without.

        Raises: what `check` raised, and as iterating does what ended a submission.
        """
        self._check()
        try:
            event = self.events.get(timeout=CHECK_S)
        except Empty:
            return []
        if isinstance(event, SubmissionEnded) and event.error is not None:
            raise event.error
        return [event]

    def close(self) -> None:
        """Abandon what has not arrived."""
        self._close(self)

    def __iter__(self) -> Iterator[GroupArrived]:
        """Raises WorkersLost, and what a task or `check` raised. Leaving the loop early abandons the remaining tasks."""
        try:
            while True:
                for event in self.wait():
                    if isinstance(event, SubmissionEnded):
                        return
                    if isinstance(event, GroupArrived):
                        yield event
        finally:
            self.close()

    def results(self) -> list[GroupArrived]:
        """Wait for all groups; the order is that of the tasks."""
        groups = {arrived.summary.id: arrived for arrived in self}
        return [groups[task.group_id] for task in self.tasks]
