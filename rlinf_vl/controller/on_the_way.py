"""Groups on their way: asked for, and not yet trained. `Ahead` says how many, and which of them a step takes."""

import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import ray

from rlinf_vl.config.schema import Config
from rlinf_vl.controller.draw import make_tasks
from rlinf_vl.controller.parts import Pool
from rlinf_vl.controller.run_data import RunData
from rlinf_vl.data.corruption import corruption_at
from rlinf_vl.rollout.submission import Event, GroupArrived, GroupsResent, Submission, Task
from rlinf_vl.types import GroupSummary


@dataclass(slots=True, eq=False)
class Asked:
    """A group that was asked for, and is not trained yet."""

    task: Task
    label: tuple[int, int]  # the step and the number in its id
    epoch: int
    version: int  # that engines had then
    result: tuple[GroupSummary, ray.ObjectRef] | None = None

    @property
    def oldest(self) -> int:
        """The version of the oldest weights that its tokens are from, or can be."""
        sampled = self.result[0].min_version if self.result else -1
        return sampled if sampled >= 0 else self.version


class OnTheWay:
    """The groups that were requested and are not trained yet.

    What is looked at for every group that arrives takes a time that does not grow with the number of groups: they are
    counted by the version of their oldest weights, and each new one is handed out once (`new_arrivals`).

    Attributes:
        version: that of the engines' weights.
        asked: by id, the groups asked for that nobody has taken; `flying`: those of them that are under way.
        finished_versions, flying_versions: how many finished groups, and groups under way, have `oldest` weights of a version.
        backlog: (step and number of its id, row, epoch) of groups that a checkpoint says were open and that there is no
            room for yet; they are requested before any new row.
        idle: seconds since somebody set it to 0 in which no group was under way.
    """

    def __init__(self, config: Config, pool: Pool, data: RunData) -> None:
        self.version = 0
        self.asked: dict[str, Asked] = {}
        self.flying: dict[str, Asked] = {}
        self.finished_versions: Counter[int] = Counter()
        self.flying_versions: Counter[int] = Counter()
        self.backlog: deque[tuple[int, int, int, int]] = deque()
        self.idle = 0.0
        self._sorts_out_ties = config.algorithm.dynamic_sampling.enable
        # By id, those that came since `new_arrivals` was called, if ties are to be sorted out. A group can come twice
        # meanwhile, if its worker dies.
        self._arrived: dict[str, Asked] = {}
        self._config = config
        self._pool = pool
        self._data = data
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._submissions: list[Submission] = []
        self._next_label = (0, 0)

    @property
    def finished(self) -> int:
        """How many of `asked` have come."""
        return len(self.asked) - len(self.flying)

    def ask_again(self, open: Sequence[Sequence[int]], room: int) -> None:
        """Request `room` of the groups that a checkpoint says were open: (step and number of its id, row, epoch) of each. The
        others wait in `backlog`: a run that is resumed with a smaller runner.max_staleness has no room for all at once."""
        for step, number, row, epoch in open:
            self.backlog.append((step, number, row, epoch))
            self._next_label = max(self._next_label, (step, number + 1))
        self._submit(self._from_backlog(room))

    def ask(self, step: int, n: int) -> None:
        """Request `n` groups: those of the backlog first, then groups of the next rows, in the name of this step."""
        if n <= 0:
            return
        asked = self._from_backlog(n)
        n_new = n - len(asked)
        if n_new:
            epoch, rows = self._data.sampler.next_rows(n_new)
            first = self._next_label[1] if self._next_label[0] == step else 0
            self._next_label = step, first + n_new
            asked += self._make(step, first, rows, epoch)
        self._submit(asked)

    def _from_backlog(self, n: int) -> list[Asked]:
        """Remove the first groups of the backlog, `n` at most, and return them as groups to request."""
        asked: list[Asked] = []
        while self.backlog and len(asked) < n:
            step, number, row, epoch = self.backlog.popleft()
            asked += self._make(step, number, [row], epoch)
        return asked

    def _make(self, step: int, first: int, rows: Sequence[int], epoch: int) -> list[Asked]:
        algorithm, seed = self._config.algorithm, self._config.runner.seed
        corruption = corruption_at(algorithm.image_corruption, step / self._data.total_steps)
        tasks = make_tasks("train", rows, algorithm.group_size, seed, step, corruption, first)
        return [Asked(task, (step, k), epoch, self.version) for k, task in enumerate(tasks, first)]

    def _submit(self, asked: Sequence[Asked]) -> None:
        if asked:
            self.asked |= {one.task.group_id: one for one in asked}
            self.flying |= {one.task.group_id: one for one in asked}
            self.flying_versions.update(one.oldest for one in asked)
            ended = [s.ended for s in self._submissions if s.ended is not None]
            if ended and len(ended) == len(self._submissions):
                self.idle += time.monotonic() - max(ended)
            self._submissions = [s for s in self._submissions if s.ended is None]
            self._submissions.append(self._pool.submit([one.task for one in asked], self._events))

    def receive(self) -> None:
        """Wait a moment for a group, and note it."""
        for event in self._submissions[-1].wait():
            if isinstance(event, GroupsResent):
                for group_id in event.group_ids & self.asked.keys():
                    asked = self.asked[group_id]
                    self._discount(asked)
                    asked.result = None
                    self.flying[group_id] = asked
                    self.flying_versions[asked.oldest] += 1
            elif isinstance(event, GroupArrived):
                if asked := self.asked.get(event[0].id):
                    self._discount(asked)
                    asked.result = event
                    self.flying.pop(event[0].id, None)
                    self.finished_versions[asked.oldest] += 1
                    if self._sorts_out_ties:
                        self._arrived[asked.task.group_id] = asked
                else:  # it was dropped, or is trained and came again
                    self._pool.release([event[0]])

    def receive_all(self) -> None:
        """Note what has come, without waiting."""
        while not self._events.empty():
            self.receive()

    def new_arrivals(self) -> list[Asked]:
        """Return the groups that have finished since the last call; none without dynamic sampling, which looks for ties."""
        arrived, self._arrived = self._arrived, {}
        return [asked for group_id, asked in arrived.items() if asked.result and group_id in self.asked]

    def take(self, groups: Iterable[Asked]) -> None:
        """Hand these groups over to the caller, who trains on them or releases them."""
        for asked in groups:
            self._discount(asked)
            del self.asked[asked.task.group_id]
            self.flying.pop(asked.task.group_id, None)

    def _discount(self, asked: Asked) -> None:
        """Take a group out of the counts by version, before its `result` changes."""
        versions = self.finished_versions if asked.result else self.flying_versions
        versions[asked.oldest] -= 1
        if not versions[asked.oldest]:
            del versions[asked.oldest]

    def drop(self, groups: Iterable[Asked]) -> None:
        """Take no more interest in these groups: release those that have come, and cancel the others."""
        groups = list(groups)
        self.take(groups)
        self._pool.release([asked.result[0] for asked in groups if asked.result])
        self._pool.cancel([asked.task.group_id for asked in groups if not asked.result])

    def close(self) -> None:
        """Abandon what is under way, and release what has come."""
        for submission in self._submissions:
            submission.close()
        self.drop(self.asked.values())
