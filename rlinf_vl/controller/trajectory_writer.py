"""The process that reads groups from the object store and writes them while the run goes on. It
imports neither torch nor transformers, so that it starts at once, beside the processes that do."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from rlinf_vl.config.schema import Config
from rlinf_vl.observe.samples import MAX_IMAGES, spread
from rlinf_vl.observe.tracker import make_trackers
from rlinf_vl.observe.trajectories import TrajectoryStore
from rlinf_vl.runtime.ray_process import where
from rlinf_vl.transport.groups import fetch_surviving

#: Split; references to groups by number; the groups' advantages, turn by turn (None: validation);
#: references to the ranks' logprobs of the sampled tokens, each by group and trajectory.
Batch = tuple[
    str,
    dict[int, ray.ObjectRef],
    Sequence[Sequence[Sequence[float]]] | None,
    Sequence[ray.ObjectRef],
]


class TrajectoryWriter:
    """The Ray actor that writes the run's trajectory files, and the samples that trackers show."""

    def __init__(
        self, config: Config, run_dir: Path, model_path: str, image_token: str | int
    ) -> None:
        runner = config.runner
        self._run_dir = run_dir
        self._store = TrajectoryStore(
            run_dir, model_path, image_token, int(runner.trajectories.max_gb * 2**30)
        )
        self._samples = make_trackers(
            run_dir,
            runner.logger.logger_backends,
            project_name=runner.logger.project_name,
            experiment_name=runner.experiment_name,
            files=runner.code_files,
        )

    def process(self) -> tuple[str, int]:
        return where()

    def drop_after(self, step: int) -> None:
        self._store.drop_after(step)

    def write(self, step: int, batches: Sequence[Batch]) -> bool:
        """Write the step's file; send samples of a validation to the trackers. Returns False when
        the disk limit is reached."""
        for split, references, advantages, logprobs in batches:
            rank_logprobs: list[Mapping[int, Mapping[int, np.ndarray]]] = ray.get(list(logprobs))
            # A group that was lost with its worker was trained on all the same: only its record
            # lacks.
            for g, group in fetch_surviving(references).items():
                # Trajectories of one group may be trained on by several ranks.
                by_trajectory = {
                    i: values for rank in rank_logprobs for i, values in rank.get(g, {}).items()
                }
                self._store.add(
                    step, split, group, advantages[g] if advantages else None, by_trajectory
                )
        rows = spread([row for row in self._store.write(step) if row["split"] == "val"])
        if rows:
            self._samples.log_samples(
                step, [{**row, "images": self._first_images(row)} for row in rows]
            )
        return not self._store.full

    def _first_images(self, row: Mapping[str, Any]) -> list[bytes]:
        """Return the files of a trajectory's images, `MAX_IMAGES` at most."""
        return [(self._run_dir / path).read_bytes() for path in row["images"][:MAX_IMAGES]]

    def close(self) -> None:
        self._samples.close()
