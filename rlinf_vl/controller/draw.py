"""The rows that a step trains on: tasks for the rollout workers, and the groups that a step
selected."""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import ray

from rlinf_vl.data.corruption import Corruption
from rlinf_vl.rollout.submission import Task
from rlinf_vl.types import GroupSummary


def make_tasks(
    split: str,
    rows: Sequence[int],
    samples: int,
    seed: int,
    step: int,
    corruption: Corruption | None = None,
    first: int = 0,
) -> list[Task]:
    """Return one task per row, numbered from `first` on; the last samples of each see `corruption`.
    Random streams depend on the seed, the step (training only), that number, the row and the
    sample, nothing else."""
    # Without the step: all validations of a run sample from the same streams, and can be compared.
    stream_step = step if split == "train" else "val"

    def stream_seed(*parts: object) -> int:
        # A digest, as `hash` differs from one process to the next.
        return int.from_bytes(
            hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little"
        )

    tasks = []
    for k, row in enumerate(rows, first):
        task = Task(
            group_id=f"{split}-{step}-{k}",
            split=split,
            row=row,
            seeds=tuple(stream_seed(seed, split, stream_step, k, row, i) for i in range(samples)),
            group_seed=stream_seed(seed, split, stream_step, row, "group"),
            corruption=corruption,
        )
        tasks.append(task)
    return tasks


def store_only(tasks: Sequence[Task], stored: Collection[int]) -> list[Task]:
    """Return the tasks such that only those with the numbers in `stored` store their groups; the
    others return their summaries alone."""
    stored_numbers = set(stored)
    return [
        task if k in stored_numbers else replace(task, summary_only=True)
        for k, task in enumerate(tasks)
    ]


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

    selected: list[tuple[Task, tuple[GroupSummary, ray.ObjectRef]]]
    dropped: list[tuple[Task, tuple[GroupSummary, ray.ObjectRef]]]
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
