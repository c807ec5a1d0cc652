"""Tasks for the rollout workers: one for each row, with the seeds of its samples."""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import replace

from rlinf_vl.data.corruption import Corruption
from rlinf_vl.rollout.submission import Task


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
