"""Recording trajectories: a process of its own reads groups from the object store and writes them while the run goes on.

In order, for each step: `choose` groups, train (the ranks keep the logprobs of chosen groups), `record`, `end_step`. The
controller waits for a step's file at the end of the step after it, so that writing delays no step.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlinf_vl.config.schema import Config
from rlinf_vl.models.families import family_of
from rlinf_vl.observe.tracker import make_sample_trackers
from rlinf_vl.observe.trajectories import TrajectoryStore
from rlinf_vl.transport.groups import fetch_surviving
from rlinf_vl.types import GroupSummary

#: Group → index of a trajectory → float32 [sampled tokens]: what `ActorRank.recorded_logprobs` returns.
Logprobs = Mapping[int, Mapping[int, np.ndarray]]


class TrajectoryWriter:
    """The Ray actor: the run's trajectory files, and the samples that trackers show."""

    def __init__(self, config: Config, run_dir: Path, model_path: str) -> None:
        logger = config.runner.logger
        limit = int(config.runner.trajectories.max_gb * 2**30)
        image_token = family_of(config.rollout.model.model_type).image_token
        self._run_dir = run_dir
        self._store = TrajectoryStore(run_dir, model_path, image_token, limit)
        self._samples = make_sample_trackers(
            run_dir,
            logger.logger_backends,
            project_name=logger.project_name,
            experiment_name=config.runner.experiment_name,
        )

    def drop_after(self, step: int) -> None:
        self._store.drop_after(step)

    def record(
        self,
        step: int,
        split: str,
        groups: Mapping[int, ray.ObjectRef],
        advantages: Mapping[int, Sequence[float]] | None,
        logprobs: Sequence[ray.ObjectRef],
    ) -> bool:
        """Add these groups, with the ranks' logprobs, to the rows of `step`; False when the disk limit is reached."""
        of_ranks: list[Logprobs] = ray.get(list(logprobs))
        for key, group in fetch_surviving(groups).items():
            found = {i: values for rank in of_ranks for i, values in rank.get(key, {}).items()}
            self._store.add(step, split, group, advantages[key] if advantages else None, found)
        return not self._store.full

    def write(self, step: int) -> None:
        """Write the step's file; of a validation, samples go to the trackers."""
        rows = [row for row in self._store.write(step) if row["split"] == "val"]
        if rows:
            images = {path: (self._run_dir / path).read_bytes() for row in rows for path in row["images"]}
            self._samples.log_samples(
                step, [row | {"images": [images[path] for path in row["images"]]} for row in rows]
            )

    def close(self) -> None:
        self._samples.close()


class Recorder:
    """The controller's handle of the writer. A failure ends the recording, never the run."""

    _writer: Any  #: handle of the Ray actor; None where nothing is recorded, or no longer
    _calls: list[ray.ObjectRef]  #: of the current step
    _groups: list[GroupSummary]  #: that these calls read
    _before: tuple[list[ray.ObjectRef], list[GroupSummary]]  #: the same of the step before

    def __init__(self, config: Config, run_dir: Path, model_path: str, report: Callable[[str], None]) -> None:
        """`report` is called once if recording ends before the run does."""
        self._settings = config.runner.trajectories
        self._timeout = config.runner.heartbeat_timeout
        self._seed = config.runner.seed
        self._report = report
        self._writer = None
        self._calls = []
        self._groups = []
        self._before = ([], [])
        if self._settings.interval > 0:
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            actor = ray.remote(num_cpus=0)(TrajectoryWriter).options(scheduling_strategy=here)
            self._writer = actor.remote(config, run_dir, model_path)

    def drop_after(self, step: int) -> None:
        """Drop what was recorded after this step; -1: everything."""
        if self._writer is not None:
            self._calls.append(self._writer.drop_after.remote(step))

    def choose(self, split: str, step: int, n: int) -> list[int]:
        """Which of `n` groups of this step to record; of a validation, always the same."""
        if self._writer is None or (split == "train" and step % self._settings.interval):
            return []
        wanted = self._settings.train_groups if split == "train" else self._settings.val_groups
        if wanted < 0 or wanted >= n:
            return list(range(n))
        return sorted(random.Random(f"{self._seed} {split} {step * (split == 'train')}").sample(range(n), wanted))

    def record(
        self,
        step: int,
        split: str,
        summaries: Sequence[GroupSummary],
        groups: Sequence[ray.ObjectRef],
        chosen: Sequence[int],
        *,
        advantages: Sequence[Sequence[float]] = (),
        logprobs: Sequence[ray.ObjectRef] = (),
    ) -> list[GroupSummary]:
        """Record the chosen groups; returns the others: release them. `logprobs` are references to `Logprobs`."""
        self._groups += [summaries[g] for g in chosen]
        if self._writer is not None and chosen:
            named = {g: groups[g] for g in chosen}
            gained = {g: advantages[g] for g in chosen} if advantages else None
            self._calls.append(self._writer.record.remote(step, split, named, gained, list(logprobs)))
        return [summary for g, summary in enumerate(summaries) if g not in chosen]

    def end_step(self, step: int) -> list[GroupSummary]:
        """Start writing the step's file, and wait for that of the step before; returns the groups recorded there: release them."""
        if self._writer is not None:
            self._calls.append(self._writer.write.remote(step))
        calls, groups = self._before
        self._before = (self._calls, self._groups)
        self._calls = []
        self._groups = []
        self._wait(calls)
        return groups

    def close(self) -> None:
        """Wait until everything is written, and end."""
        if self._writer is not None:
            self._calls.append(self._writer.close.remote())
        self._wait(self._before[0] + self._calls)
        self._writer = None

    def _wait(self, calls: list[ray.ObjectRef]) -> None:
        if not calls:
            return
        try:
            if False in ray.get(calls, timeout=self._timeout):
                self._end(f"runner.trajectories.max_gb: {self._settings.max_gb} GB of trajectories are recorded")
        except Exception as error:  # the disk is full, the process died or hangs: a run is worth more than its record
            self._end(f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}")

    def _end(self, reason: str) -> None:
        if self._writer is not None:
            self._writer = None
            self._report(f"no more trajectories are recorded: {reason}")
