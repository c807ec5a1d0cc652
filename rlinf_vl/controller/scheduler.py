"""The scheduler of generation: when groups are requested, which of them a step trains on, and which
are too stale for any.

This is what all schedules have in common; each is a subclass in `rlinf_vl.controller.schedules`.
Per step: `select_groups`, train, then `sync` where one is due.

A group requested while engines have the weights of step v can be trained by step v + 1 + s at the
latest, with s = `max_staleness`: that is its due step. Invariants, B groups being a step's:

- A step trains on finished groups, those first that are due first.
- With `runner.stale_groups: wait` a step waits until the groups it leaves behind can still be
  trained in time: for each later step d, at most (d - step) · B of them are due by then. Requesting
  no more than the `capacity` keeps that possible.
- With `drop` it waits for B groups only, and drops groups that are overdue afterwards.
"""

import heapq
import logging
import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rlinf_vl.config.schema import Config
from rlinf_vl.config.schema.runner import RunnerConfig
from rlinf_vl.controller.dataset_plan import DatasetPlan
from rlinf_vl.controller.group_buffer import GroupBuffer, PendingGroup
from rlinf_vl.controller.protocols import Pool
from rlinf_vl.controller.run_log import RunLog
from rlinf_vl.controller.step_plan import ties
from rlinf_vl.rollout.submission import GroupArrived, Task
from rlinf_vl.types import GroupSummary


@dataclass(frozen=True, slots=True)
class SelectedGroups:
    """The groups of a step.

    Attributes:
        selected: task and result of each group to train on.
        dropped: task and result of each group that dynamic sampling drops.
        stale: tasks of the groups that were dropped because no later step can train on them.
        seconds: time since the step before had its groups; 0 with `runner.schedule: sync`, where
            nothing is generated in between.
    """

    selected: list[tuple[Task, GroupArrived]]
    dropped: list[tuple[Task, GroupArrived]]
    stale: list[Task]
    metrics: dict[str, float]
    seconds: float = 0.0

    @property
    def ledger(self) -> dict[str, list]:
        """The step's line of `ledger.jsonl`: ids and rows of its groups, by prefix of the key."""
        by_prefix = {
            "": [task for task, _ in self.selected],
            "dropped_": [task for task, _ in self.dropped],
            "stale_": self.stale,
        }
        groups: dict[str, list] = {}
        rows: dict[str, list] = {}
        for prefix, tasks in by_prefix.items():
            if tasks or not prefix:  # every line has the keys without a prefix
                groups[f"{prefix}groups"] = [task.group_id for task in tasks]
                rows[f"{prefix}rows"] = [task.row for task in tasks]
        return groups | rows


class RolloutScheduler(ABC):
    """The requests for groups, and the choice of those that a step trains on.

    Attributes:
        buffer: groups requested and not yet selected for training; `close` it at the end.
        waits_before_sync: whether engines get new weights only when groups in flight have ended
            (`is_ready_to_sync`); a sync can't be queued behind a step's training then.
    """

    waits_before_sync: ClassVar[bool] = False

    def __init__(
        self,
        config: Config,
        pool: Pool,
        data: DatasetPlan,
        log: RunLog,
        sync: Callable[[int], dict[str, float]],
    ) -> None:
        """`sync` sends the learner's weights to all engines, as this version; returns its
        metrics."""
        runner = config.runner
        self.buffer = GroupBuffer(config, pool, data)
        self.batch_size = config.data.rollout_batch_size
        self.max_staleness = runner.max_staleness if runner.generates_ahead else 0
        self._generates_ahead = runner.generates_ahead
        self._waits_for_stale = runner.stale_groups == "wait"
        self._dynamic = config.algorithm.dynamic_sampling
        per_reward = config.algorithm.reward_normalization == "per_reward"
        self._tie_weights = config.reward.weights if per_reward else None
        self._total_steps = data.total_steps
        self._log = log
        self._sync = sync
        self._last_selection = time.monotonic()  # when the last step had its groups

    # --- what a schedule decides ------------------------------------------------------------------

    @classmethod
    def is_reproducible(cls, runner: RunnerConfig) -> bool:
        """Return whether the groups of a step, and the weights that sample them, do not depend on
        how long anything takes."""
        return False

    @abstractmethod
    def n_requests_before(self, step: int) -> int:
        """Return how many groups to request when this step begins to wait."""

    @abstractmethod
    def n_requests_after(self, step: int) -> int:
        """Return how many groups to request when this step has its groups."""

    def needs_more(self) -> bool:
        """Return whether a step waits for another of the groups in flight, whatever has
        finished."""
        return self.buffer.n_finished < self.batch_size

    def is_ready_to_sync(self, version: int) -> bool:
        """Return whether engines may get the weights of this version now."""
        return True

    # --- for the loop -----------------------------------------------------------------------------

    def resume(self, version: int, open_groups: Sequence[Sequence[int]]) -> None:
        """Request the open groups of a checkpoint again; engines have the weights of step
        `version`."""
        self.buffer.engine_version = version
        self.buffer.restore(open_groups, self.capacity(version + 1))

    def select_groups(self, step: int) -> SelectedGroups:
        """Wait for the groups that this step trains on, and request those of later steps."""
        buffer = self.buffer
        buffer.receive_all()
        # Measured before this step waits: how far generation is ahead of training.
        buffer_metrics = {
            "schedule/finished": buffer.n_finished,
            "schedule/under_way": len(buffer.in_flight),
        }
        buffer.request(step, self.n_requests_before(step))
        selected, tied_groups, rounds = self._wait_for_batch(step)
        metrics: dict[str, float] = {
            "data/epoch": min(group.epoch for group in [*selected, *tied_groups])
        }
        all_tied, all_selected = set(tied_groups), set(selected)
        dropped = [group for group in tied_groups if group not in all_selected]
        # Groups that tie left the buffer when `_select` found them.
        buffer.remove([group for group in selected if group not in all_tied])
        if not self._generates_ahead:
            # Every step trains on groups of its own only: a later one may not use the surplus.
            surplus = list(buffer.groups.values())
            buffer.remove(surplus)
            dropped += surplus
        if self._dynamic.enable:
            n_tied = sum(group in all_tied for group in selected)
            metrics |= {
                "rollout/rounds": rounds,
                "rollout/generated_groups": len(selected) + len(dropped),
                "rollout/tied_groups_trained": n_tied,
            }
            if n_tied:
                message = (
                    f"{n_tied} of {self.batch_size} groups tie after {rounds} rounds "
                    "(algorithm.dynamic_sampling.max_rounds)"
                )
                self._log.event("groups_tie", message, logging.INFO)
        stale = [group for group in buffer.groups.values() if self._due(group) <= step]
        if stale:
            buffer.drop(stale)
        buffer.request(step + 1, self.n_requests_after(step))
        selected_results = _results(selected)
        seconds, self._last_selection = (
            time.monotonic() - self._last_selection,
            time.monotonic(),
        )
        if self._generates_ahead:
            metrics |= buffer_metrics | {
                "schedule/dropped": len(stale),
                "schedule/engines_waited": buffer.idle_s,
            }
            buffer.idle_s = 0.0
            summaries = [result.summary for _, result in selected_results]
            metrics |= staleness_metrics(summaries, step, self.max_staleness)
        return SelectedGroups(
            selected=selected_results,
            dropped=_results(dropped),
            stale=[group.task for group in stale],
            metrics=metrics,
            seconds=seconds if self._generates_ahead else 0.0,
        )

    def sync(self, version: int) -> dict[str, float]:
        """Send the learner's weights to all engines, when the schedule lets them; returns the
        sync's metrics."""
        if self.waits_before_sync:
            with self._log.timed("wait"):
                while not self.is_ready_to_sync(version):
                    self.buffer.receive()
        metrics = self._sync(version)
        self.buffer.engine_version = version
        return metrics

    # --- due steps --------------------------------------------------------------------------------

    def capacity(self, step: int, selected: int = 0) -> int:
        """Return how many more groups can be trained in time, and before the run ends; `selected`
        is 1 if this step has its groups, else 0."""
        # With `weight_sync_interval` above 1 the engines' weights can be older than the step
        # before.
        versions_behind = step - 1 - self.buffer.engine_version
        in_time = self.max_staleness + 1 - versions_behind
        steps = min(in_time, self._total_steps - step + 1) - selected
        return steps * self.batch_size - len(self.buffer.groups)

    def n_in_flight_due(self, step: int) -> int:
        """Return how many groups in flight must be trained by this step."""
        return sum(
            n
            for version, n in self.buffer.in_flight_by_version.items()
            if self._due_of(version) <= step
        )

    def _due(self, group: PendingGroup) -> int:
        """Return the last step that can train on the group."""
        return self._due_of(group.oldest_version)

    def _due_of(self, version: int) -> int:
        """Return the last step that can train on a group whose oldest weights have this version."""
        return version + 1 + self.max_staleness

    # --- the choice of a step's groups ------------------------------------------------------------

    def _wait_for_batch(self, step: int) -> tuple[list[PendingGroup], list[PendingGroup], int]:
        """Wait until there is a batch to train on, and request more groups where too few are left.
        Returns the batch, the groups that tie, and how often groups were requested."""
        buffer, tied_groups, rounds = self.buffer, list[PendingGroup](), 1
        while True:
            last_round = rounds >= self._dynamic.max_rounds
            selected = self._select(step, tied_groups, last_round)
            if selected is not None:
                return selected, tied_groups, rounds
            if buffer.in_flight:
                buffer.receive()
                continue
            # Too few groups are left, because others tie or are too stale. If as many of the
            # next ones are useful as of those so far, this number fills the batch.
            n_useful = len(buffer.groups)
            n_sampled = n_useful + len(tied_groups)
            n_missing = self.batch_size - n_useful
            n_expected = math.ceil(n_missing * max(1, n_sampled) / max(1, n_useful))
            buffer.request(step, min(self.batch_size, n_expected))
            rounds += 1

    def _select(
        self, step: int, tied_groups: list[PendingGroup], last_round: bool
    ) -> list[PendingGroup] | None:
        """Return the groups to train on, or None if too few have finished.

        With dynamic sampling, groups that tie move to `tied_groups`; in the last round they fill up
        the batch. This is called for every group that arrives, so it only counts until enough have
        finished.
        """
        buffer, in_flight = self.buffer, self.buffer.in_flight
        if in_flight and self.needs_more():
            return None
        if self._dynamic.enable:
            arrivals = buffer.new_arrivals()
            tied_arrivals = [
                group
                for group in arrivals
                if group.result and ties(group.result.summary, self._tie_weights)
            ]
            buffer.remove(tied_arrivals)
            tied_groups += tied_arrivals
        n_missing = self.batch_size - buffer.n_finished
        fill_with_tied = (
            self._dynamic.enable and last_round and not in_flight and len(tied_groups) >= n_missing
        )
        if n_missing > 0 and not fill_with_tied:
            return None
        if in_flight and self._waits_for_stale and not self._remainder_is_in_time(step):
            return None
        finished = (group for group in buffer.groups.values() if group.result)
        # The label breaks ties, so that the choice doesn't depend on the order of arrival.
        selected = heapq.nsmallest(
            self.batch_size, finished, key=lambda group: (self._due(group), group.label)
        )
        n_filled = self.batch_size - len(selected)
        return selected + sorted(tied_groups, key=lambda group: group.label)[:n_filled]

    def _remainder_is_in_time(self, step: int) -> bool:
        """Return whether the groups that this step leaves, having trained on those that are due
        first, can be trained in time."""
        n_unselected = self.batch_size
        remainder: Counter[int] = Counter()  # groups by due step
        for version, n in sorted(self.buffer.finished_by_version.items()):
            n_selected = min(n, n_unselected)
            n_unselected -= n_selected
            remainder[self._due_of(version)] += n - n_selected
        for version, n in self.buffer.in_flight_by_version.items():
            remainder[self._due_of(version)] += n
        due_so_far = 0
        for due, n in sorted(remainder.items()):
            due_so_far += n
            if n and due_so_far > (due - step) * self.batch_size:
                return False
        return True


def _results(groups: Sequence[PendingGroup]) -> list[tuple[Task, GroupArrived]]:
    """Return task and result of each finished group, in the order of their ids."""
    return [
        (group.task, group.result)
        for group in sorted(groups, key=lambda group: group.label)
        if group.result
    ]


def staleness_metrics(
    summaries: Sequence[GroupSummary], step: int, max_staleness: int
) -> dict[str, float]:
    """Return metrics of how many versions the weights of these groups (the oldest of each) and of
    their tokens are behind those of the step before, with the share of each number, 0 …
    `max_staleness`."""
    groups = Counter(step - 1 - s.min_version for s in summaries if s.min_version >= 0)
    tokens: Counter[int] = Counter()
    for summary in summaries:
        tokens.update({step - 1 - version: n for version, n in summary.version_tokens.items()})
    # No group has a version if every trajectory failed before its first token.
    if not groups:
        return {}
    mean = sum(behind_by * n for behind_by, n in groups.items()) / groups.total()
    metrics = {"schedule/staleness_mean": mean, "schedule/staleness_max": float(max(groups))}
    for kind, counts in (("groups", groups), ("tokens", tokens)):
        for behind_by in range(max_staleness + 1):
            metrics[f"schedule/{kind}_{behind_by}_behind"] = counts[behind_by] / max(
                1, counts.total()
            )
    return metrics
