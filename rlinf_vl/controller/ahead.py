"""Generation ahead of training, for every `runner.schedule`: how many groups are requested when,
and which of them a step trains on.

With B = data.rollout_batch_size, s = runner.max_staleness, and engines that have the weights of the
step before:

| schedule | requested when a step begins to wait | requested when it has its groups |
|---|---|---|
| sync | B, of which it waits for all | – |
| one_step_off | B, less finished groups and groups in flight that are due | B, less finished groups |
| async | so many that (s + 1) · B are in flight or finished | so many that s · B are |

A group requested while engines have the weights of step v can be trained by step v + 1 + s at the
latest: that is its due step.
Invariants:
- Training selects finished groups, those first that are due first.
- With `stale_groups: wait` a step waits until the groups it leaves behind can still be trained in
  time: for each later step d, at most (d - step) · B of them are due by then. Requesting no more
  than the table says keeps that possible.
- With `drop` it waits for B groups only, and drops groups that are overdue afterwards.
"""

import heapq
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence

import ray

from rlinf_vl.config.schema import Config
from rlinf_vl.controller.draw import SelectedGroups
from rlinf_vl.controller.on_the_way import OnTheWay, PendingGroup
from rlinf_vl.controller.parts import Pool
from rlinf_vl.controller.run_data import RunData
from rlinf_vl.controller.run_log import RunLog
from rlinf_vl.controller.step_plan import ties
from rlinf_vl.rollout.submission import Task
from rlinf_vl.types import GroupSummary


class Ahead:
    """The schedule of generation. Per step: `draw`, train, `trained`, then `sync` where one is due.

    Attributes:
        buffer: groups requested and not yet selected for training.
    """

    def __init__(
        self,
        config: Config,
        pool: Pool,
        data: RunData,
        log: RunLog,
        sync: Callable[[int], dict[str, float]],
    ) -> None:
        """`sync` sends the learner's weights to all engines, as this version; returns its
        metrics."""
        self._config = config
        self._data = data
        self._log = log
        self._sync = sync
        self._schedule = config.runner.schedule
        self._staleness = config.runner.max_staleness if self._schedule != "sync" else 0
        self.buffer = OnTheWay(config, pool, data)
        self._last_draw = time.monotonic()  # when the last step had its groups

    # --- for the loop -----------------------------------------------------------------------------

    def begin(self, version: int, open: Sequence[Sequence[int]]) -> None:
        """Request the `open` groups of a checkpoint again; engines have the weights of step
        `version`."""
        self.buffer.engine_version = version
        self.buffer.request_again(open, self._capacity(version + 1, 0))

    def draw(self, step: int) -> SelectedGroups:
        """Wait for the groups that this step trains on, and request those of later steps."""
        batch_size, dynamic = (
            self._config.data.rollout_batch_size,
            self._config.algorithm.dynamic_sampling,
        )
        self.buffer.receive_all()
        # Measured before this step waits: how far generation is ahead of training.
        buffer_metrics = {
            "schedule/finished": self.buffer.n_finished,
            "schedule/under_way": len(self.buffer.in_flight),
        }
        self.buffer.request(step, self._n_requests_before(step))
        rounds, tied_groups = 1, list[PendingGroup]()
        while (
            selected := self._select(step, tied_groups, last_round=rounds >= dynamic.max_rounds)
        ) is None:
            if self.buffer.in_flight:
                self.buffer.receive()
            else:
                # Too few groups are left, because others tie or are too stale. If as many of the
                # next ones are useful as of those so far, this number fills the batch.
                n_useful = len(self.buffer.groups)
                n_sampled = n_useful + len(tied_groups)
                n_expected = math.ceil(
                    (batch_size - n_useful) * max(1, n_sampled) / max(1, n_useful)
                )
                self.buffer.request(step, min(batch_size, n_expected))
                rounds += 1
        metrics: dict[str, float] = {
            "data/epoch": min(group.epoch for group in [*selected, *tied_groups])
        }
        all_tied, all_selected = set(tied_groups), set(selected)
        tied_and_selected = [group for group in selected if group in all_tied]
        dropped = [group for group in tied_groups if group not in all_selected]
        # Groups that tie left the buffer when `_select` found them.
        self.buffer.remove([group for group in selected if group not in all_tied])
        if self._schedule == "sync":
            # Every step trains on groups of its own only: a later one may not use the surplus.
            surplus = list(self.buffer.groups.values())
            self.buffer.remove(surplus)
            dropped += surplus
        if dynamic.enable:
            metrics |= {
                "rollout/rounds": rounds,
                "rollout/generated_groups": len(selected) + len(dropped),
            }
            metrics["rollout/tied_groups_trained"] = len(tied_and_selected)
        if tied_and_selected:
            message = (
                f"{len(tied_and_selected)} of {batch_size} groups tie after {rounds} rounds "
                "(algorithm.dynamic_sampling.max_rounds)"
            )
            self._log.event("groups_tie", message, logging.INFO)
        stale = self._drop_stale(step)
        self.buffer.request(step + 1, self._n_requests_after(step))
        selected_results = _finished_by_label(selected)
        dropped_results = _finished_by_label(dropped)
        if self._schedule != "sync":
            idle_s = self.buffer.idle_s
            metrics |= buffer_metrics | {
                "schedule/dropped": len(stale),
                "schedule/engines_waited": idle_s,
            }
            summaries = [summary for _, (summary, _) in selected_results]
            metrics |= staleness(summaries, step, self._staleness)
            self.buffer.idle_s = 0.0
        seconds, self._last_draw = time.monotonic() - self._last_draw, time.monotonic()
        return SelectedGroups(
            selected=selected_results,
            dropped=dropped_results,
            stale=[group.task for group in stale],
            metrics=metrics,
            seconds=seconds if self._schedule != "sync" else 0.0,
        )

    def trained(self) -> list[list[int]]:
        """Return the groups that are left when a step is trained: (step and number of its id, row,
        epoch) of each. A checkpoint keeps them, to request them again."""
        pending = [
            [*group.label, group.task.row, group.epoch] for group in self.buffer.groups.values()
        ]
        return pending + [list(fields) for fields in self.buffer.backlog]

    def sync(self, version: int) -> dict[str, float]:
        """Send the learner's weights to all engines; returns the sync's metrics.

        With `one_step_off`, first wait for the groups in flight that the next step must train on,
        so that each of them is from one version.
        """
        if self._schedule == "one_step_off":
            with self._log.timed("wait"):
                while self._n_in_flight_due(version + 1):
                    self.buffer.receive()
        metrics = self._sync(version)
        self.buffer.engine_version = version
        return metrics

    def close(self) -> None:
        """Cancel the groups in flight, and release the finished ones."""
        self.buffer.close()

    # --- which groups, when -----------------------------------------------------------------------

    def _due(self, group: PendingGroup) -> int:
        """Return the last step that can train on the group."""
        return self._due_of(group.oldest_version)

    def _due_of(self, version: int) -> int:
        """Return the last step that can train on a group whose oldest weights have this version."""
        return version + 1 + self._staleness

    def _n_in_flight_due(self, step: int) -> int:
        """Return how many groups in flight must be trained by this step."""
        return sum(
            n
            for version, n in self.buffer.in_flight_by_version.items()
            if self._due_of(version) <= step
        )

    def _n_requests_before(self, step: int) -> int:
        """Return how many groups to request when this step begins to wait."""
        batch_size = self._config.data.rollout_batch_size
        if self._schedule == "sync":
            return batch_size - len(self.buffer.groups)
        capacity = self._capacity(step, 0)
        if self._schedule == "async":
            return capacity
        return min(capacity, batch_size - self.buffer.n_finished - self._n_in_flight_due(step))

    def _n_requests_after(self, step: int) -> int:
        """Return how many groups to request when this step has its groups."""
        if self._schedule == "sync":
            return 0
        capacity = self._capacity(step, 1)
        if self._schedule == "async":
            return capacity
        return min(capacity, self._config.data.rollout_batch_size - self.buffer.n_finished)

    def _capacity(self, step: int, selected: int) -> int:
        """Return how many more groups can be trained in time, and before the run ends; `selected`
        is 1 if this step has its groups, else 0."""
        # With `weight_sync_interval` above 1 the engines' weights can be older than the step
        # before.
        versions_behind = step - 1 - self.buffer.engine_version
        steps = (
            min(self._staleness + 1 - versions_behind, self._data.total_steps - step + 1) - selected
        )
        return steps * self._config.data.rollout_batch_size - len(self.buffer.groups)

    def _select(
        self, step: int, tied_groups: list[PendingGroup], last_round: bool
    ) -> list[PendingGroup] | None:
        """Return the groups to train on, or None if too few have finished.

        With dynamic sampling, groups that tie move to `tied_groups`; in the last round they fill up
        the batch. This is called for every group that arrives, so it only counts until enough have
        finished.
        """
        batch_size, dynamic = (
            self._config.data.rollout_batch_size,
            self._config.algorithm.dynamic_sampling.enable,
        )
        in_flight = self.buffer.in_flight
        if in_flight and (self._schedule == "sync" or self.buffer.n_finished < batch_size):
            return None
        if dynamic:
            arrivals = self.buffer.new_arrivals()
            tied_arrivals = [group for group in arrivals if group.result and ties(group.result[0])]
            self.buffer.remove(tied_arrivals)
            tied_groups += tied_arrivals
        n_missing = batch_size - self.buffer.n_finished
        fill_with_tied = dynamic and last_round and not in_flight and len(tied_groups) >= n_missing
        if n_missing > 0 and not fill_with_tied:
            return None
        if (
            in_flight
            and self._config.runner.stale_groups == "wait"
            and not self._remainder_is_in_time(step)
        ):
            return None
        finished = (group for group in self.buffer.groups.values() if group.result)
        # The label breaks ties, so that the choice doesn't depend on the order of arrival.
        selected = heapq.nsmallest(
            batch_size, finished, key=lambda group: (self._due(group), group.label)
        )
        return (
            selected
            + sorted(tied_groups, key=lambda group: group.label)[: batch_size - len(selected)]
        )

    def _remainder_is_in_time(self, step: int) -> bool:
        """Return whether the groups that this step leaves, having trained on those that are due
        first, can be trained in time."""
        batch_size = self._config.data.rollout_batch_size
        n_unselected = batch_size
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
            if n and due_so_far > (due - step) * batch_size:
                return False
        return True

    def _drop_stale(self, step: int) -> list[PendingGroup]:
        """Drop the groups that no later step can train on, and return them."""
        if self._schedule == "sync":
            return []
        stale = [group for group in self.buffer.groups.values() if self._due(group) <= step]
        self.buffer.drop(stale)
        return stale


def _finished_by_label(
    groups: Sequence[PendingGroup],
) -> list[tuple[Task, tuple[GroupSummary, ray.ObjectRef]]]:
    """Return task and result of each finished group, in the order of their ids."""
    return [
        (group.task, group.result)
        for group in sorted(groups, key=lambda group: group.label)
        if group.result
    ]


def staleness(summaries: Sequence[GroupSummary], step: int, max_staleness: int) -> dict[str, float]:
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
