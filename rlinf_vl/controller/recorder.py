"""Recording trajectories: a process of its own takes groups straight from the object store and writes them while the run goes
on. The controller only says which.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlinf_vl.config.schema import Config
from rlinf_vl.observe.tracker import make_sample_trackers
from rlinf_vl.observe.trajectories import TrajectoryStore
from rlinf_vl.transport.groups import fetch_surviving
from rlinf_vl.types import GroupSummary

#: Group → place → float32 [sampled tokens]: what `ActorRank.recorded_logprobs` returns.
Logprobs = Mapping[int, Mapping[int, np.ndarray]]


class Recorder:
    """A `TrajectoryStore` in a process of its own."""

    def __init__(self, config: Config, run_dir: Path, model_path: str, image_token: str) -> None:
        limit, logger = int(config.runner.trajectories.max_gb * 2**30), config.runner.logger
        self._store = TrajectoryStore(run_dir, model_path, image_token, limit)
        self._run_dir = run_dir
        self._samples = make_sample_trackers(
            run_dir,
            logger.logger_backends,
            project_name=logger.project_name,
            experiment_name=config.runner.experiment_name,
        )

    def drop_after(self, step: int) -> None:
        """Drop what was recorded after this step; -1: everything."""
        self._store.drop_after(step)

    def record(
        self,
        step: int,
        split: str,
        groups: Mapping[int, ray.ObjectRef],
        advantages: Mapping[int, Sequence[float]] | None,
        logprobs: Sequence[ray.ObjectRef],
    ) -> bool:
        """Write these groups as rows of `step`, with what the ranks say of them; whether there is room for more."""
        of_ranks: list[Logprobs] = ray.get(list(logprobs))
        for key, group in fetch_surviving(groups).items():
            places = {place: values for rank in of_ranks for place, values in rank.get(key, {}).items()}
            self._store.add(step, split, group, advantages[key] if advantages else None, places)
        return not self._store.full

    def write(self, step: int) -> None:
        """Write the step's file; the trackers get samples of each validation."""
        rows = [row for row in self._store.write(step) if row["split"] == "val"]
        if rows:
            images = {path: (self._run_dir / path).read_bytes() for row in rows for path in row["images"]}
            self._samples.log_samples(
                step, [row | {"images": [images[path] for path in row["images"]]} for row in rows]
            )

    def close(self) -> None:
        """Write out what the trackers hold."""
        self._samples.close()


class TrajectoryLog:
    """The controller's side: chooses groups, hands references on, never waits for more than the step before."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        model_path: str,
        image_token: str,
        *,
        release: Callable[[Sequence[GroupSummary]], None],
        report: Callable[[str], None],
    ) -> None:
        """
        Args:
            release: lets groups go that are recorded.
            report: told, once, that recording has ended before the run has.
        """
        self._release, self._held = release, list[GroupSummary]()
        self._settings, self._timeout = config.runner.trajectories, config.runner.heartbeat_timeout
        self._seed, self._report = config.runner.seed, report
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._recorder: Any = None  # a handle of the actor
        if self._settings.interval > 0:
            actor = ray.remote(num_cpus=0)(Recorder)
            self._recorder = actor.options(scheduling_strategy=here).remote(config, run_dir, model_path, image_token)
        self._pending: list[ray.ObjectRef] = []
        #: What must be done, and what is released when it is, of the step before this one.
        self._before: tuple[list[ray.ObjectRef], list[GroupSummary]] = ([], [])

    def go_on_from(self, step: int) -> None:
        """Drop what was recorded after this step; -1: everything."""
        if self._recorder is not None:
            self._pending.append(self._recorder.drop_after.remote(step))

    def choose(self, split: str, step: int, n: int) -> list[int]:
        """Which of `n` groups of this step are recorded."""
        wanted = self._settings.train_groups if split == "train" else self._settings.val_groups
        if self._recorder is None or (split == "train" and step % self._settings.interval):
            return []
        if wanted < 0 or wanted >= n:
            return list(range(n))
        # the same validation problems every time
        return sorted(random.Random(f"{self._seed} {split} {step * (split == 'train')}").sample(range(n), wanted))

    def record(
        self,
        step: int,
        split: str,
        groups: Mapping[int, ray.ObjectRef],
        summaries: Sequence[GroupSummary],
        advantages: Mapping[int, Sequence[float]] | None = None,
        logprobs: Sequence[ray.ObjectRef] = (),
    ) -> None:
        """Have these groups recorded, and then released: who may let the others go must not let go of these."""
        self._held += summaries
        if self._recorder is not None and groups:
            self._pending.append(self._recorder.record.remote(step, split, groups, advantages, list(logprobs)))

    def end_step(self, step: int) -> None:
        """Have the step's file written, once that of the step before is."""
        if self._recorder is not None:
            self._pending.append(self._recorder.write.remote(step))
        before, self._before = self._before, (self._pending, self._held)
        self._pending, self._held = [], []
        self._wait(*before)

    def _wait(self, pending: Sequence[ray.ObjectRef], held: Sequence[GroupSummary]) -> None:
        try:
            if False in ray.get(list(pending), timeout=self._timeout):
                self._end(f"runner.trajectories.max_gb: {self._settings.max_gb} GB of trajectories are recorded")
        except Exception as error:  # the disk is full, the process died or hangs: a run is worth more than its record
            self._end(f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}")
        finally:
            if held:
                self._release(held)

    def _end(self, reason: str) -> None:
        if self._recorder is None:
            return
        self._recorder = None
        self._report(f"no more trajectories are recorded: {reason}")

    def close(self) -> None:
        """Wait until everything is written, and end."""
        if self._recorder is not None:
            self._pending.append(self._recorder.close.remote())
        self.wait()
        self._recorder = None

    def wait(self) -> None:
        """Wait until everything is written, and nothing held."""
        for _ in range(2):
            before, self._before = self._before, (self._pending, self._held)
            self._pending, self._held = [], []
            self._wait(*before)
