"""Submissions of tasks to a pool, and the events by which their groups come back."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from rlinf_vl.data.corruption import Corruption
from rlinf_vl.data.vision_controls import VisionControl

#: Limit on the seconds between two calls of `check` by a thread that waits for groups.
CHECK_S = 0.5


@dataclass(frozen=True, slots=True)
class Task:
    """A request for one group: a row to answer, with one sample per seed.

    Attributes:
        group_id: names the group.
        split: the row's data set, "train" or "val".
        own_images: whether no other row is known to have this one's images.
        group_seed: the seed for everything that the group's environments share.
        fault: why the row must not be answered; "" if it may.
        corruption: how images are corrupted for some of the samples, with `group_seed` as the
            seed; None for no corruption.
        control: how the row's images are replaced for every sample; None: they are not.
        summary_only: whether only the group's summary is wanted. The group is then not stored, and
            its reference is None.
    """

    group_id: str
    split: str
    row: int
    seeds: tuple[int, ...]
    own_images: bool = False
    group_seed: int = 0
    fault: str = ""
    corruption: Corruption | None = None
    control: VisionControl | None = None
    summary_only: bool = False


class QueuedTask(NamedTuple):
    """A task that waits for a worker, with its submission."""

    submission: "Submission"
    task: Task


class GroupArrived(NamedTuple):
    """The event that a group has been sampled."""

    summary: Any  # a GroupSummary
    group: Any  # its reference in the object store; None if `Task.summary_only`


@dataclass(frozen=True, slots=True)
class GroupsResent:
    """The event that groups that had arrived are lost with their worker, and will come again."""

    group_ids: frozenset[str]


@dataclass(frozen=True, slots=True)
class SubmissionEnded:
    """The last event of a submission: all groups have come, or `error` ended it."""

    error: BaseException | None = None


Event = GroupArrived | GroupsResent | SubmissionEnded


class Submission:
    """The groups of some tasks, as (summary, reference) pairs in the order in which they finish.

    A group comes a second time if its worker dies before the group is acknowledged and before the
    submission is done; the second one replaces the first.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        check: Callable[[], None],
        close: Callable[["Submission"], Any],
        events: SimpleQueue[Event] | None = None,
    ) -> None:
        """
        Args:
            check: called while waiting, at least every `CHECK_S` seconds; may raise.
            close: called with the submission to end it.
            events: the queue for its events, given to wait for several submissions at once.
        """
        self.tasks = list(tasks)
        self.group_ids = {task.group_id for task in tasks}
        self.arrived: set[str] = set()
        self.cancelled: set[str] = set()  # those cancelled before they arrived
        self.ended: float | None = None  # when, by `time.monotonic`
        self.events: SimpleQueue[Event] = SimpleQueue() if events is None else events
        self._check = check
        self._close = close

    @property
    def done(self) -> bool:
        """True if every group has arrived or was cancelled."""
        return len(self.arrived) + len(self.cancelled) == len(self.group_ids)

    def wait(self) -> list[Event]:
        """Wait up to `CHECK_S` for an event; return it in a list, or an empty list.

        Raises:
            Exception: of `check`, or the error that ended a submission.
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
        """Abandon the groups that have not arrived."""
        self._close(self)

    def __iter__(self) -> Iterator[GroupArrived]:
        """Yield groups as they arrive. Leaving the loop early abandons the remaining tasks.

        Raises:
            WorkersLost: rollout workers keep dying.
            Exception: of a task or of `check`.
        """
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
        """Wait for all groups, and return them in the order of the tasks."""
        groups = {event.summary.id: event for event in self}
        return [groups[task.group_id] for task in self.tasks]
