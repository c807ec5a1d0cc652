"""The buffer of groups that were requested and are not trained yet.

A group's states, and the methods that move it from one to the next:

```
 checkpoint ──`restore`──► WAITING ──`request`──► IN_FLIGHT ──`receive`──► FINISHED ──`remove`──► trained,
                                                     ▲  ▲                   │   │                 or released
 next row of the data ───────`request`───────────────┘  └──── `receive` ────┘   │
                                                     │   (lost with its worker) │
                                                     └──────────`drop`──────────┴───────────────► cancelled,
                                                                                                  or released
```

- WAITING: named by a checkpoint, and not requested yet for want of capacity (`waiting`).
- IN_FLIGHT: submitted to the pool, which samples it (`in_flight`).
- FINISHED: sampled, with a summary here and its tokens in the object store (`groups` that are not
  `in_flight`).

The scheduler (`rlinf_vl.controller.scheduler`) decides how many groups are requested, and which of
them a step trains on.
"""

import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NamedTuple

from rlinf_vl.config.schema import Config
from rlinf_vl.controller.dataset_plan import DatasetPlan
from rlinf_vl.controller.protocols import Pool
from rlinf_vl.controller.tasks import make_tasks
from rlinf_vl.data.corruption import corruption_at
from rlinf_vl.rollout.submission import Event, GroupArrived, GroupsResent, Submission, Task


class OpenGroup(NamedTuple):
    """A group that is not trained yet, as a checkpoint names it: the step and the number in its id,
    its row, and the epoch of that."""

    step: int
    number: int
    row: int
    epoch: int


@dataclass(slots=True, eq=False)
class PendingGroup:
    """A group that is in flight or finished: its result is None until it has finished."""

    task: Task
    label: tuple[int, int]  # the step and the number in its id
    epoch: int
    version: int  # of the engines' weights when it was requested
    result: GroupArrived | None = None

    @property
    def oldest_version(self) -> int:
        """The version of the oldest weights that its tokens are from; until it has tokens, the
        oldest that they can be from."""
        sampled = self.result.summary.min_version if self.result else -1
        return sampled if sampled >= 0 else self.version


class GroupBuffer:
    """The groups that were requested and are not trained yet.

    The work for every group that arrives takes a time that does not grow with the number of groups:
    groups are counted by the version of their oldest weights, and each new one is handed out once
    (`new_arrivals`).

    Attributes:
        engine_version: version of the engines' weights.
        waiting: groups of a checkpoint; they are requested before any new row.
        groups: by id, the groups in flight and those that have finished, in the order in which they
            were requested; `in_flight`: the former alone.
        finished_by_version, in_flight_by_version: how many finished groups, and groups in flight,
            have an `oldest_version`.
        idle_s: seconds the engines were idle, with no group in flight, since the last reset to 0.
    """

    def __init__(self, config: Config, pool: Pool, data: DatasetPlan) -> None:
        self.engine_version = 0
        self.waiting: deque[OpenGroup] = deque()
        self.groups: dict[str, PendingGroup] = {}
        self.in_flight: dict[str, PendingGroup] = {}
        self.finished_by_version: Counter[int] = Counter()
        self.in_flight_by_version: Counter[int] = Counter()
        self.idle_s = 0.0
        self._finds_ties = config.algorithm.dynamic_sampling.enable
        # By id, groups that arrived since the last call of `new_arrivals`, if groups that tie are
        # to be found. A dictionary, as a group can arrive twice in between, if its worker dies.
        self._new_arrivals: dict[str, PendingGroup] = {}
        self._config = config
        self._pool = pool
        self._data = data
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._submissions: list[Submission] = []
        self._next_label = (0, 0)

    @property
    def n_finished(self) -> int:
        """The number of `groups` that have finished."""
        return len(self.groups) - len(self.in_flight)

    def open_groups(self) -> list[OpenGroup]:
        """Return all groups in the form in which a checkpoint keeps them, to `restore` them."""
        pending = [
            OpenGroup(*group.label, group.task.row, group.epoch) for group in self.groups.values()
        ]
        return pending + list(self.waiting)

    # --- WAITING → IN_FLIGHT ----------------------------------------------------------------------

    def restore(self, open_groups: Iterable[Sequence[int]], capacity: int) -> None:
        """Request `capacity` of a checkpoint's groups. The others wait: a run that is resumed with
        a smaller runner.max_staleness has no capacity for all at once."""
        for group in map(OpenGroup._make, open_groups):
            self.waiting.append(group)
            # Ids must not repeat: those of new groups continue after the highest one here.
            self._next_label = max(self._next_label, (group.step, group.number + 1))
        self._submit(self._take_waiting(capacity))

    def request(self, step: int, n: int) -> None:
        """Request `n` groups: those that wait first, then groups of the next rows, which have this
        step in their ids. Nothing is requested if `n` is 0 or less."""
        if n <= 0:
            return
        new_groups = self._take_waiting(n)
        n_new_rows = n - len(new_groups)
        if n_new_rows:
            epoch, rows = self._data.sampler.next_rows(n_new_rows)
            first = self._next_label[1] if self._next_label[0] == step else 0
            self._next_label = step, first + n_new_rows
            new_groups += self._make_groups(step, first, rows, epoch)
        self._submit(new_groups)

    def _take_waiting(self, n: int) -> list[PendingGroup]:
        """Remove the first groups that wait, `n` at most, and return them as groups to request."""
        groups: list[PendingGroup] = []
        while self.waiting and len(groups) < n:
            step, number, row, epoch = self.waiting.popleft()
            groups += self._make_groups(step, number, [row], epoch)
        return groups

    def _make_groups(
        self, step: int, first: int, rows: Sequence[int], epoch: int
    ) -> list[PendingGroup]:
        algorithm, seed = self._config.algorithm, self._config.runner.seed
        corruption = corruption_at(algorithm.image_corruption, step / self._data.total_steps)
        tasks = make_tasks("train", rows, algorithm.group_size, seed, step, corruption, first)
        return [
            PendingGroup(task, (step, k), epoch, self.engine_version)
            for k, task in enumerate(tasks, first)
        ]

    def _submit(self, new_groups: Sequence[PendingGroup]) -> None:
        if new_groups:
            self.groups |= {group.task.group_id: group for group in new_groups}
            self.in_flight |= {group.task.group_id: group for group in new_groups}
            self.in_flight_by_version.update(group.oldest_version for group in new_groups)
            # The engines were idle from the end of the last submission on, if all have ended.
            ends = [s.ended for s in self._submissions if s.ended is not None]
            if ends and len(ends) == len(self._submissions):
                self.idle_s += time.monotonic() - max(ends)
            self._submissions = [s for s in self._submissions if s.ended is None]
            self._submissions.append(
                self._pool.submit([group.task for group in new_groups], self._events)
            )

    # --- IN_FLIGHT ⇄ FINISHED ---------------------------------------------------------------------

    def receive(self) -> None:
        """Receive a finished group, waiting up to `rlinf_vl.rollout.submission.CHECK_S` seconds."""
        # All submissions put their events into one queue: any of them can be waited for.
        for event in self._submissions[-1].wait():
            if isinstance(event, GroupArrived):
                self._finish(event)
            elif isinstance(event, GroupsResent):
                self._take_off_again(event)

    def receive_all(self) -> None:
        """Receive the groups that have finished, without waiting."""
        while not self._events.empty():
            self.receive()

    def _finish(self, event: GroupArrived) -> None:
        group = self.groups.get(event.summary.id)
        if group is None:
            # The group was dropped, or is trained and arrives a second time.
            self._pool.release([event.summary])
            return
        self._uncount(group)
        group.result = event
        self.in_flight.pop(group.task.group_id, None)
        self.finished_by_version[group.oldest_version] += 1
        if self._finds_ties:
            self._new_arrivals[group.task.group_id] = group

    def _take_off_again(self, event: GroupsResent) -> None:
        """Return groups that had finished to those in flight: their worker died, and the pool
        samples them again."""
        for group_id in event.group_ids & self.groups.keys():
            group = self.groups[group_id]
            self._uncount(group)
            group.result = None
            self.in_flight[group_id] = group
            self.in_flight_by_version[group.oldest_version] += 1

    def new_arrivals(self) -> list[PendingGroup]:
        """Return the groups that have finished since the last call; none without dynamic sampling,
        which alone looks for ties."""
        arrivals, self._new_arrivals = self._new_arrivals, {}
        return [
            group
            for group_id, group in arrivals.items()
            if group.result and group_id in self.groups
        ]

    # --- out of the buffer ------------------------------------------------------------------------

    def remove(self, groups: Iterable[PendingGroup]) -> None:
        """Hand these groups over to the caller, who trains on them or releases them."""
        for group in groups:
            self._uncount(group)
            del self.groups[group.task.group_id]
            self.in_flight.pop(group.task.group_id, None)

    def drop(self, groups: Iterable[PendingGroup]) -> None:
        """Drop these groups: release the finished ones, and cancel the others."""
        groups = list(groups)
        self.remove(groups)
        self._pool.release([group.result.summary for group in groups if group.result])
        self._pool.cancel([group.task.group_id for group in groups if not group.result])

    def close(self) -> None:
        """Drop all groups."""
        for submission in self._submissions:
            submission.close()
        self.drop(self.groups.values())

    def _uncount(self, group: PendingGroup) -> None:
        """Remove a group from the counts by version, before its `result` changes."""
        versions = self.finished_by_version if group.result else self.in_flight_by_version
        versions[group.oldest_version] -= 1
        # Without this the counters would keep an entry for every version of the run.
        if not versions[group.oldest_version]:
            del versions[group.oldest_version]
