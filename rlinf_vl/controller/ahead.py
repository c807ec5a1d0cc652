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

import heapq
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence

from rlinf_vl.config.schema import Config
from rlinf_vl.controller.draw import Drawn
from rlinf_vl.controller.on_the_way import Asked, OnTheWay
from rlinf_vl.controller.parts import Pool
from rlinf_vl.controller.run_data import RunData
from rlinf_vl.controller.run_log import RunLog
from rlinf_vl.controller.step_plan import ties
from rlinf_vl.types import GroupSummary


class Ahead:
    """Per step: `draw`, train, `trained`, then `sync` where one is due. `way`: what is asked for and not yet drawn."""

    def __init__(
        self, config: Config, pool: Pool, data: RunData, log: RunLog, sync: Callable[[int], dict[str, float]]
    ) -> None:
        """`sync`: sends the learner's weights to all engines, as this version; returns its metrics."""
        self._config = config
        self._data = data
        self._log = log
        self._sync = sync
        self._schedule = config.runner.schedule
        self._staleness = config.runner.max_staleness if self._schedule != "sync" else 0
        self.way = OnTheWay(config, pool, data)
        self._drawn = time.monotonic()  # when the last step had its groups

    # --- for the loop ---------------------------------------------------------------------------------------------------

    def begin(self, version: int, open: Sequence[Sequence[int]]) -> None:
        """Engines have the weights of step `version`; ask again for the groups that a checkpoint says were open."""
        self.way.version = version
        self.way.ask_again(open, self._room(version + 1, 0))

    def draw(self, step: int) -> Drawn:
        """Wait for the groups that this step trains on, and ask for those of later ones."""
        size, dynamic = self._config.data.rollout_batch_size, self._config.algorithm.dynamic_sampling
        self.way.receive_all()
        level = {"schedule/finished": self.way.finished, "schedule/under_way": len(self.way.flying)}
        self.way.ask(step, self._wanted_before(step))
        rounds, tied = 1, list[Asked]()
        while (chosen := self._choose(step, tied, last_round=rounds >= dynamic.max_rounds)) is None:
            if self.way.flying:
                self.way.receive()
            else:  # too few groups, because others tie or are too stale: as many more as should do
                good = len(self.way.asked)
                drawn = good + len(tied)
                self.way.ask(step, min(size, math.ceil((size - good) * max(1, drawn) / max(1, good))))
                rounds += 1
        metrics: dict[str, float] = {"data/epoch": min(asked.epoch for asked in [*chosen, *tied])}
        late, taken = set(tied), set(chosen)
        filling = [asked for asked in chosen if asked in late]
        dropped = [asked for asked in tied if asked not in taken]
        self.way.take([asked for asked in chosen if asked not in late])
        if self._schedule == "sync":
            unused = list(self.way.asked.values())
            self.way.take(unused)
            dropped += unused
        if dynamic.enable:
            metrics |= {"rollout/rounds": rounds, "rollout/generated_groups": len(chosen) + len(dropped)}
            metrics["rollout/tied_groups_trained"] = len(filling)
        if filling:
            many = f"{len(filling)} of {size} groups tie after {rounds} rounds"
            self._log.event("groups_tie", f"{many} (algorithm.dynamic_sampling.max_rounds)", logging.INFO)
        stale = self._leave_stale(step)
        self.way.ask(step + 1, self._wanted_after(step))
        kept, dropped = (
            [(asked.task, asked.result) for asked in sorted(part, key=lambda asked: asked.label) if asked.result]
            for part in (chosen, dropped)
        )
        if self._schedule != "sync":
            metrics |= level | {"schedule/dropped": len(stale), "schedule/engines_waited": self.way.idle}
            metrics |= staleness([summary for _, (summary, _) in kept], step, self._staleness)
            self.way.idle = 0.0
        seconds, self._drawn = time.monotonic() - self._drawn, time.monotonic()
        stale_tasks = [asked.task for asked in stale]
        return Drawn(kept, dropped, stale_tasks, metrics, seconds if self._schedule != "sync" else 0.0)

    def trained(self) -> list[list[int]]:
        """Once a step is trained on what it drew: (step and number of its id, row, epoch) of each group that is left."""
        asked = [[*asked.label, asked.task.row, asked.epoch] for asked in self.way.asked.values()]
        return asked + [list(group) for group in self.way.backlog]

    def sync(self, version: int) -> dict[str, float]:
        """Send the learner's weights to all engines; with `one_step_off`, when no group is under way that the next step must take,
        so that such a group is from one version."""
        if self._schedule == "one_step_off":
            with self._log.timed("wait"):
                while self._flying_due(version + 1):
                    self.way.receive()
        metrics = self._sync(version)
        self.way.version = version
        return metrics

    def close(self) -> None:
        """Abandon what is under way, and release what has come."""
        self.way.close()

    # --- which groups, when ---------------------------------------------------------------------------------------------

    def _due(self, asked: Asked) -> int:
        """The last step that can train on the group."""
        return self._due_of(asked.oldest)

    def _due_of(self, version: int) -> int:
        """Return the last step that can train on a group whose oldest weights have this version."""
        return version + 1 + self._staleness

    def _flying_due(self, step: int) -> int:
        """Return how many groups under way must be trained by this step."""
        return sum(n for version, n in self.way.flying_versions.items() if self._due_of(version) <= step)

    def _wanted_before(self, step: int) -> int:
        """How many groups to ask for when this step begins to wait."""
        size = self._config.data.rollout_batch_size
        if self._schedule == "sync":
            return size - len(self.way.asked)
        room = self._room(step, 0)
        if self._schedule == "async":
            return room
        return min(room, size - self.way.finished - self._flying_due(step))

    def _wanted_after(self, step: int) -> int:
        """How many groups to ask for when this step has its own."""
        if self._schedule == "sync":
            return 0
        room = self._room(step, 1)
        if self._schedule == "async":
            return room
        return min(room, self._config.data.rollout_batch_size - self.way.finished)

    def _room(self, step: int, drawn: int) -> int:
        """How many more groups can be trained in time, and before the run ends; `drawn`: 1 if this step has its own, else 0."""
        behind = step - 1 - self.way.version
        steps = min(self._staleness + 1 - behind, self._data.total_steps - step + 1) - drawn
        return steps * self._config.data.rollout_batch_size - len(self.way.asked)

    def _choose(self, step: int, tied: list[Asked], last_round: bool) -> list[Asked] | None:
        """Return the groups to train on, or None if they are not there yet.

        With dynamic sampling, groups that tie go to `tied`; in the last round they fill up what lacks. This is called for
        every group that arrives, so it only counts until the groups are there.
        """
        size, dynamic = self._config.data.rollout_batch_size, self._config.algorithm.dynamic_sampling.enable
        flying = self.way.flying
        if flying and (self._schedule == "sync" or self.way.finished < size):
            return None
        if dynamic:
            tying = [asked for asked in self.way.new_arrivals() if asked.result and ties(asked.result[0])]
            self.way.take(tying)
            tied += tying
        lacking = size - self.way.finished
        if lacking > 0 and not (dynamic and last_round and not flying and len(tied) >= lacking):
            return None
        if flying and self._config.runner.stale_groups == "wait" and not self._rest_is_in_time(step):
            return None
        finished = (asked for asked in self.way.asked.values() if asked.result)
        chosen = heapq.nsmallest(size, finished, key=lambda asked: (self._due(asked), asked.label))
        return chosen + sorted(tied, key=lambda asked: asked.label)[: size - len(chosen)]

    def _rest_is_in_time(self, step: int) -> bool:
        """Return whether what this step leaves, having taken the groups that are due first, can be trained in time."""
        size = self._config.data.rollout_batch_size
        untaken = size
        rest: Counter[int] = Counter()
        for version, n in sorted(self.way.finished_versions.items()):
            taken = min(n, untaken)
            untaken -= taken
            rest[self._due_of(version)] += n - taken
        for version, n in self.way.flying_versions.items():
            rest[self._due_of(version)] += n
        due_so_far = 0
        for due, n in sorted(rest.items()):
            due_so_far += n
            if n and due_so_far > (due - step) * size:
                return False
        return True

    def _leave_stale(self, step: int) -> list[Asked]:
        """Drop the groups that no later step can train on."""
        if self._schedule == "sync":
            return []
        stale = [asked for asked in self.way.asked.values() if self._due(asked) <= step]
        self.way.drop(stale)
        return stale


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
