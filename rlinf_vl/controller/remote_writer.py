"""The process of a `TrajectoryWriter`: a Ray actor that reads groups from the object store."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlinf_vl.config.schema import Config
from rlinf_vl.controller import trajectory_writer
from rlinf_vl.controller.recorder import Batch
from rlinf_vl.controller.trajectory_writer import GroupBatch, image_token
from rlinf_vl.runtime.ray_process import kill, where
from rlinf_vl.transport.groups import fetch_surviving


class TrajectoryWriter(trajectory_writer.TrajectoryWriter):
    """The Ray actor, which fetches what it writes."""

    def process(self) -> tuple[str, int]:
        return where()

    def write(
        self,
        step: int,
        batches: Sequence[Batch],
        replay_reason: str = "",
        weights: Mapping[str, np.ndarray] | None = None,
    ) -> bool:
        fetched: list[GroupBatch] = []
        for split, references, advantages, logprobs in batches:
            # A group that was lost with its worker was trained on all the same: only its record
            # lacks.
            groups = fetch_surviving(references)
            fetched.append((split, groups, advantages, ray.get(list(logprobs))))
        return super().write(step, fetched, replay_reason, weights)


class RemoteWriter:
    """The handle of the actor, for the recorder."""

    def __init__(self, config: Config, run_dir: Path, model_path: str) -> None:
        # The controller's node, which has the run's folder.
        this_node = NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        actor: Any = ray.remote(num_cpus=0)(TrajectoryWriter)
        self._actor = actor.options(scheduling_strategy=this_node).remote(
            config, run_dir, model_path, image_token(config, model_path)
        )
        self._process = self._actor.process.remote()
        self._call: ray.ObjectRef | None = None

    def begin(self, method: str, *arguments: Any) -> None:
        self._call = getattr(self._actor, method).remote(*arguments)

    def result(self, timeout_s: float) -> Any:
        assert self._call is not None, "nothing was begun"
        return ray.get(self._call, timeout=timeout_s)

    def kill(self) -> None:
        kill(self._actor, self._process)
