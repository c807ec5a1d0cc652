"""Generation ahead of training, for every `runner.schedule`: which groups are asked for when, and which of them a step trains on.

With B = data.rollout_batch_size, s = runner.max_staleness, and engines that have the weights of the step before:

| schedule | asked for when a step begins to wait | and when it has its groups |
|---|---|---|
| sync | B, of which it waits for all | – |
| one_step_off | what it lacks beside the groups that it must take | B, less those that are finished already |
| async | so many that (s + 1) · B are on their way or finished | so many that s · B are |

A group asked for while engines have the weights of step v can be trained by step v + 1 + s at the latest: that is its due step.
Invariants:
- Training takes finished groups, those first that are due first.
- With `stale_groups: wait` a step waits until what it leaves behind can still be trained in time: for each later step d, at most
  (d - step) · B of it is due by then. Asking for no more than the table says keeps that possible.
- With `drop` it waits for B groups only, and groups that are then overdue are dropped.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import ray

from rlinf_vl.config.schema import Config
from rlinf_vl.controller.draw import Drawn, make_tasks
from rlinf_vl.controller.parts import Pool
from rlinf_vl.controller.run_data import RunData
from rlinf_vl.controller.run_log import RunLog
from rlinf_vl.controller.step_plan import ties
from rlinf_vl.data.corruption import corruption_at
from rlinf_vl.rollout.submission import Event, Resent, Submission, Task
from rlinf_vl.types import GroupSummary


@dataclass(slots=True, eq=False)
class _Asked:
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


class Ahead:
    """Per step: `draw`, train, `trained`, then `sync` where one is due. `version` is that of the engines' weights."""

    def __init__(
        self, config: Config, pool: Pool, data: RunData, log: RunLog, sync: Callable[[int], dict[str, float]]
    ) -> None:
        """`sync`: sends the learner's weights to all engines, as this version; returns its metrics."""
        self.version = 0
        self._config = config
        self._pool = pool
        self._data = data
        self._log = log
        self._sync = sync
        self._schedule = config.runner.schedule
        self._staleness = config.runner.max_staleness if self._schedule != "sync" else 0
        self._asked: dict[str, _Asked] = {}
        self._flying: dict[str, _Asked] = {}  # those of them that are under way
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._submissions: list[Submission] = []
        self._next_label = (0, 0)
        self._drawn = time.monotonic()  # when the last step had its groups
        self._idle = 0.0  # seconds since the last step began in which no group was under way

    # --- for the loop ---------------------------------------------------------------------------------------------------

    def begin(self, version: int, open: Sequence[Sequence[int]]) -> None:
        """Engines have the weights of step `version`; ask again for the groups that a checkpoint says were open."""
        self.version = version
        asked = []
        for step, number, row, epoch in open:
            asked += self._make(step, number, [row], epoch)
            self._next_label = max(self._next_label, (step, number + 1))
        self._submit(asked)

    def draw(self, step: int) -> Drawn:
        """Wait for the groups that this step trains on, and ask for those of later ones."""
        size, dynamic = self._config.data.rollout_batch_size, self._config.algorithm.dynamic_sampling
        while not self._events.empty():
            self._receive()
        level = {"schedule/finished": len(self._asked) - len(self._flying), "schedule/under_way": len(self._flying)}
        self._ask(step, self._wanted_before(step))
        rounds, tied = 1, list[_Asked]()
        while (chosen := self._choose(step, tied, last_round=rounds >= dynamic.max_rounds)) is None:
            if self._flying:
                self._receive()
            else:  # too few groups, because others tie or are too stale: as many more as should do
                good = len(self._asked)
                drawn = good + len(tied)
                self._ask(step, min(size, math.ceil((size - good) * max(1, drawn) / max(1, good))))
                rounds += 1
        metrics: dict[str, float] = {"data/epoch": min(asked.epoch for asked in [*chosen, *tied])}
        late, taken = set(tied), set(chosen)
        filling = [asked for asked in chosen if asked in late]
        dropped = [asked for asked in tied if asked not in taken]
        for asked in chosen:
            self._asked.pop(asked.task.group_id, None)
        if self._schedule == "sync":
            dropped += self._asked.values()
            self._asked = {}
        if dynamic.enable:
            metrics |= {"rollout/rounds": rounds, "rollout/generated_groups": len(chosen) + len(dropped)}
            metrics["rollout/tied_groups_trained"] = len(filling)
        if filling:
            many = f"{len(filling)} of {size} groups tie after {rounds} rounds"
            self._log.event("groups_tie", f"{many} (algorithm.dynamic_sampling.max_rounds)", logging.INFO)
        stale = self._leave_stale(step)
        self._ask(step + 1, self._wanted_after(step))
        kept, dropped = (
            [(asked.task, asked.result) for asked in sorted(part, key=lambda asked: asked.label) if asked.result]
            for part in (chosen, dropped)
        )
        if self._schedule != "sync":
            metrics |= level | {"schedule/dropped": len(stale), "schedule/engines_waited": self._idle}
            metrics |= staleness([summary for _, (summary, _) in kept], step, self._staleness)
            self._idle = 0.0
        seconds, self._drawn = time.monotonic() - self._drawn, time.monotonic()
        stale_tasks = [asked.task for asked in stale]
        return Drawn(kept, dropped, stale_tasks, metrics, seconds if self._schedule != "sync" else 0.0)

    def trained(self) -> list[list[int]]:
        """Once a step is trained on what it drew: (step and number of its id, row, epoch) of each group that is left."""
        return [[*asked.label, asked.task.row, asked.epoch] for asked in self._asked.values()]

    def sync(self, version: int) -> dict[str, float]:
        """Send the learner's weights to all engines; with `one_step_off`, when no group is under way that the next step must take,
        so that such a group is from one version."""
        if self._schedule == "one_step_off":
            with self._log.timed("wait"):
                while any(self._due(asked) <= version + 1 for asked in self._flying.values()):
                    self._receive()
        metrics = self._sync(version)
        self.version = version
        return metrics

    def close(self) -> None:
        """Abandon what is under way, and release what has come."""
        for submission in self._submissions:
            submission.close()
        self._pool.release([asked.result[0] for asked in self._asked.values() if asked.result])
        self._asked, self._flying = {}, {}

    # --- which groups, when ---------------------------------------------------------------------------------------------

    def _due(self, asked: _Asked) -> int:
        """The last step that can train on the group."""
        return asked.oldest + 1 + self._staleness

    def _wanted_before(self, step: int) -> int:
        """How many groups to ask for when this step begins to wait."""
        size = self._config.data.rollout_batch_size
        if self._schedule == "sync":
            return size - len(self._asked)
        room = self._room(step, 0)
        if self._schedule == "async":
            return room
        sure = [asked for asked in self._asked.values() if asked.result or self._due(asked) <= step]
        return min(room, size - len(sure))

    def _wanted_after(self, step: int) -> int:
        """How many groups to ask for when this step has its own."""
        if self._schedule == "sync":
            return 0
        room = self._room(step, 1)
        if self._schedule == "async":
            return room
        return min(room, self._config.data.rollout_batch_size - (len(self._asked) - len(self._flying)))

    def _room(self, step: int, drawn: int) -> int:
        """How many more groups can be trained in time, and before the run ends; `drawn`: 1 if this step has its own, else 0."""
        behind = step - 1 - self.version
        steps = min(self._staleness + 1 - behind, self._data.total_steps - step + 1) - drawn
        return steps * self._config.data.rollout_batch_size - len(self._asked)

    def _choose(self, step: int, tied: list[_Asked], last_round: bool) -> list[_Asked] | None:
        """The groups to train on, if enough are there. With dynamic sampling, those that tie go to `tied`; in the last round they
        fill up what lacks."""
        size, dynamic = self._config.data.rollout_batch_size, self._config.algorithm.dynamic_sampling.enable
        flying = self._flying.values()
        if flying and (self._schedule == "sync" or len(self._asked) - len(flying) < size):
            return None  # it is asked for every group that comes: this must not look at all of them
        if dynamic:
            found = [asked for asked in self._asked.values() if asked.result and ties(asked.result[0])]
            for asked in found:
                tied.append(self._asked.pop(asked.task.group_id))
        order = sorted((a for a in self._asked.values() if a.result), key=lambda a: (self._due(a), a.label))
        if len(order) < size and dynamic and last_round and not flying:
            order += sorted(tied, key=lambda asked: asked.label)
        if len(order) < size:
            return None
        if flying and self._config.runner.stale_groups == "wait":
            due = [self._due(asked) for asked in (*order[size:], *flying)]
            if any(sum(d <= last for d in due) > (last - step) * size for last in set(due)):
                return None
        return order[:size]

    def _leave_stale(self, step: int) -> list[_Asked]:
        """Drop the groups that no later step can train on."""
        if self._schedule == "sync":
            return []
        stale = [asked for asked in self._asked.values() if self._due(asked) <= step]
        for asked in stale:
            del self._asked[asked.task.group_id]
            self._flying.pop(asked.task.group_id, None)
        self._pool.release([asked.result[0] for asked in stale if asked.result])
        return stale

    # --- groups on their way --------------------------------------------------------------------------------------------

    def _ask(self, step: int, n: int) -> None:
        """Ask for groups of the next `n` rows, in the name of this step."""
        if n > 0:
            epoch, rows = self._data.sampler.next_rows(n)
            first = self._next_label[1] if self._next_label[0] == step else 0
            self._next_label = step, first + n
            self._submit(self._make(step, first, rows, epoch))

    def _make(self, step: int, first: int, rows: Sequence[int], epoch: int) -> list[_Asked]:
        algorithm, seed = self._config.algorithm, self._config.runner.seed
        corruption = corruption_at(algorithm.image_corruption, step / self._data.total_steps)
        tasks = make_tasks("train", rows, algorithm.group_size, seed, step, corruption, first)
        return [_Asked(task, (step, k), epoch, self.version) for k, task in enumerate(tasks, first)]

    def _submit(self, asked: Sequence[_Asked]) -> None:
        if asked:
            self._asked |= {one.task.group_id: one for one in asked}
            self._flying |= {one.task.group_id: one for one in asked}
            ended = [s.ended for s in self._submissions if s.ended is not None]
            if ended and len(ended) == len(self._submissions):
                self._idle += time.monotonic() - max(ended)
            self._submissions = [s for s in self._submissions if s.ended is None]
            self._submissions.append(self._pool.submit([one.task for one in asked], self._events))

    def _receive(self) -> None:
        """Wait a moment for a group, and note it."""
        for event in self._submissions[-1].wait():
            if isinstance(event, Resent):
                for group_id in event.group_ids & self._asked.keys():
                    self._asked[group_id].result = None
                    self._flying[group_id] = self._asked[group_id]
            elif isinstance(event, tuple):
                if asked := self._asked.get(event[0].id):
                    asked.result = event
                    self._flying.pop(event[0].id, None)
                else:  # it was dropped, or is trained and came again
                    self._pool.release([event[0]])


def staleness(summaries: Sequence[GroupSummary], step: int, most: int) -> dict[str, float]:
    """How far the weights of these groups (the oldest of each) and of their tokens are behind those of the step before: metrics,
    with the shares by versions behind, 0 … `most`."""
    groups = Counter(step - 1 - s.min_version for s in summaries if s.min_version >= 0)
    tokens: Counter[int] = Counter()
    for summary in summaries:
        tokens.update({step - 1 - version: n for version, n in summary.version_tokens.items()})
    if not groups:
        return {}
    mean = sum(behind * n for behind, n in groups.items()) / groups.total()
    metrics = {"schedule/staleness_mean": mean, "schedule/staleness_max": float(max(groups))}
    for kind, counts in (("groups", groups), ("tokens", tokens)):
        for behind in range(most + 1):
            metrics[f"schedule/{kind}_{behind}_behind"] = counts[behind] / max(1, counts.total())
    return metrics
