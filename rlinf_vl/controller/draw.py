"""Which rows a step trains on: tasks for the rollout workers, and the groups that a step has drawn."""

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
    """One task per row, numbered from `first` on; its last samples see `corruption`. Random streams depend on the seed, the step
    (training only), that number, the row and the sample, nothing else."""
    when = step if split == "train" else "val"

    def stream(*parts: object) -> int:
        return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")

    return [
        Task(
            group_id=f"{split}-{step}-{k}",
            split=split,
            row=row,
            seeds=tuple(stream(seed, split, when, k, row, i) for i in range(samples)),
            group_seed=stream(seed, split, when, row, "group"),
            corruption=corruption,
        )
        for k, row in enumerate(rows, first)
    ]


def store_only(tasks: Sequence[Task], stored: Collection[int]) -> list[Task]:
    """Return the tasks so that only the groups of those with these numbers are stored; of the others the summary comes."""
    numbers = set(stored)
    return [task if k in numbers else replace(task, summary_only=True) for k, task in enumerate(tasks)]


@dataclass(frozen=True, slots=True)
class Drawn:
    """Groups of a step, each with its task: those to train on, those that dynamic sampling drops, and those that are too stale.
    `seconds`: since the step before had its groups, where generation goes on meanwhile; else 0."""

    kept: list[tuple[Task, tuple[GroupSummary, ray.ObjectRef]]]
    dropped: list[tuple[Task, tuple[GroupSummary, ray.ObjectRef]]]
    stale: list[Task]
    metrics: dict[str, float]
    seconds: float = 0.0

    @property
    def ledger(self) -> dict[str, list]:
        """What `ledger.jsonl` says of the step."""
        parts = {"": [task for task, _ in self.kept], "dropped_": [task for task, _ in self.dropped]}
        parts = {name: tasks for name, tasks in (parts | {"stale_": self.stale}).items() if tasks or not name}
        lines = {f"{part}groups": [task.group_id for task in tasks] for part, tasks in parts.items()}
        return lines | {f"{part}rows": [task.row for task in tasks] for part, tasks in parts.items()}
