"""Which rows a step trains on: tasks for the rollout workers, and dynamic sampling, which replaces groups that teach nothing."""

import hashlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import ray

from rlinf_vl.config.schema import Config
from rlinf_vl.controller.parts import Pool
from rlinf_vl.controller.run_data import RunData
from rlinf_vl.controller.run_log import RunLog
from rlinf_vl.controller.step_plan import ties
from rlinf_vl.data.corruption import Corruption, corruption_at
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


@dataclass(frozen=True, slots=True)
class Drawn:
    """Groups of a step, each with its task: those to train on, and those that dynamic sampling drops."""

    kept: list[tuple[Task, tuple[GroupSummary, ray.ObjectRef]]]
    dropped: list[tuple[Task, tuple[GroupSummary, ray.ObjectRef]]]
    metrics: dict[str, float]

    @property
    def ledger(self) -> dict[str, list]:
        """What `ledger.jsonl` says of the step."""
        parts = {"": self.kept, "dropped_": self.dropped} if self.dropped else {"": self.kept}
        lines = {f"{part}groups": [task.group_id for task, _ in groups] for part, groups in parts.items()}
        return lines | {f"{part}rows": [task.row for task, _ in groups] for part, groups in parts.items()}


def draw(step: int, config: Config, pool: Pool, data: RunData, log: RunLog) -> Drawn:
    """Sample a group for each of the next rows; with `algorithm.dynamic_sampling` (Yu et al., "DAPO", 2025), for further rows, too,
    until enough groups don't tie. Each round asks for as many rows as should do, by the share that has not tied so far."""
    algorithm, size, dynamic = config.algorithm, config.data.rollout_batch_size, config.algorithm.dynamic_sampling
    drawn: list[tuple[Task, tuple[GroupSummary, ray.ObjectRef]]] = []
    good: list[int] = []
    epoch, wanted, rounds = None, size, 0
    corruption = corruption_at(algorithm.image_corruption, step / data.total_steps)
    while True:
        began, rows = data.sampler.next_rows(wanted)
        epoch = began if epoch is None else epoch
        tasks = make_tasks("train", rows, algorithm.group_size, config.runner.seed, step, corruption, first=len(drawn))
        drawn += zip(tasks, pool.submit(tasks).results(), strict=True)
        rounds += 1
        good = [k for k, (_, (summary, _)) in enumerate(drawn) if not ties(summary)]
        if not dynamic.enable or len(good) >= size or rounds == dynamic.max_rounds:
            break
        wanted = min(size, math.ceil((size - len(good)) * len(drawn) / max(1, len(good))))
    metrics: dict[str, float] = {"data/epoch": epoch}
    chosen = list(range(size))
    if dynamic.enable:
        filling = [k for k in range(len(drawn)) if k not in good]
        chosen = sorted((good + filling)[:size])
        metrics |= {"rollout/rounds": rounds, "rollout/generated_groups": len(drawn)}
        metrics["rollout/tied_groups_trained"] = max(0, size - len(good))
        if len(good) < size:
            reason = (
                f"{size - len(good)} of {size} groups tie after {rounds} rounds (algorithm.dynamic_sampling.max_rounds)"
            )
            log.event("groups_tie", reason, logging.INFO)
    dropped = [drawn[k] for k in range(len(drawn)) if k not in chosen]
    return Drawn([drawn[k] for k in chosen], dropped, metrics)
