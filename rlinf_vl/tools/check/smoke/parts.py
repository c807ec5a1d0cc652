"""The parts of a run that a smoke run starts and drives: those of `train`, on Ray or in this
process."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from rlinf_vl.config.parts import load_part
from rlinf_vl.config.schema import Config
from rlinf_vl.controller.dataset_plan import DatasetPlan, find_usable_rows
from rlinf_vl.controller.protocols import WeightSyncer
from rlinf_vl.controller.recorder import Writer
from rlinf_vl.controller.run_log import RunLog
from rlinf_vl.controller.shared_gpu import SharedGpu
from rlinf_vl.observe.progress import RunProgress

Scores = list[tuple[int, int, float, float]]


class Parts(ABC):
    """The parts of one smoke run.

    Attributes:
        device: "cuda" or "cpu", from `start_engines` on.
        description: what was started, for people.
    """

    device: str
    description: str
    pool: Any
    learner: Any
    gpu: SharedGpu
    sync: WeightSyncer
    data: DatasetPlan
    log: RunLog

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        progress: RunProgress,
        stack: ExitStack,
        check: Callable[[], None],
    ) -> None:
        """
        Args:
            stack: ends what is started.
            check: raises an error where the run was asked to stop.
        """
        self._config, self._run_dir, self._progress = config, run_dir, progress
        self._stack, self._check = stack, check
        self._path = config.rollout.model.model_path

    def open_log(self, writer: Callable[[Config, Path, str], Writer]) -> RunLog:
        """Return the run's log, whose trajectories `writer` writes."""
        start_writer = partial(writer, self._config, self._run_dir, self._path)
        return self._stack.enter_context(
            closing(RunLog(self._config, self._run_dir, start_writer, self._progress))
        )

    @abstractmethod
    def start_engines(self) -> None:
        """Start the engines, and check the rows."""

    @abstractmethod
    def start_learner(self) -> None:
        """Load and shard the policy, on the GPUs that the engines leave to it."""

    @abstractmethod
    def score_at(self, minibatch: Sequence[Any], temperature: float) -> Scores:
        """Call `Rank.score_at` on every rank."""

    @abstractmethod
    def fingerprints(self) -> list[int]:
        """Call `Rank.fingerprint` on every rank."""

    @abstractmethod
    def stop(self) -> None:
        """End engines and ranks in order; without it they are killed."""


class RayParts(Parts):
    """`Parts` as `controller.supervise` starts them; `stack` ends them."""

    def start_engines(self) -> None:
        from rlinf_vl.actor.group import ActorGroup
        from rlinf_vl.controller.remote_writer import RemoteWriter
        from rlinf_vl.driver.supervise import EngineLink, strategy_of
        from rlinf_vl.rollout.pool.pool import RolloutPool
        from rlinf_vl.runtime.launch import ray_cluster, reserve

        config, run_dir, path = self._config, self._run_dir, self._path
        options = self._stack.enter_context(ray_cluster(config))
        reservation = self._stack.enter_context(reserve(config, True, options))
        self.device = reservation.device
        load_part("settle-memory")(config, path, reservation)
        self.log = self.open_log(RemoteWriter)
        strategy = strategy_of(config, reservation)
        self.pool = RolloutPool(config, path, reservation, report=self.log.event, check=self._check)
        self._stack.callback(self.pool.close)
        self.learner = ActorGroup(config, path, reservation.device, reservation.actor)
        self.data = find_usable_rows(config, run_dir, self.pool, self._progress)
        self._engines = EngineLink(config, reservation, self.pool, strategy)
        self.gpu = self._engines.gpu
        shared = "shared slots" if reservation.placement.shared else "slots of their own"
        self.description = (
            f"{config.rollout.rollout_backend} engines {len(reservation.rollout)}, actor ranks "
            f"{len(reservation.actor)}, {shared}, {self.device}, weights by "
            f"{strategy.name}"
        )

    def start_learner(self) -> None:
        self.sync = self._engines.connect(self.learner, self.data.total_steps)

    def score_at(self, minibatch: Sequence[Any], temperature: float) -> Scores:
        return sum(self.learner.call("score_at", minibatch, temperature), [])

    def fingerprints(self) -> list[int]:
        return self.learner.call("fingerprint")

    def stop(self) -> None:
        self.pool.stop()
        self.learner.stop()


class LocalParts(Parts):
    """`Parts` as `local.supervise` starts them: one engine and one rank in this process."""

    def start_engines(self) -> None:
        from rlinf_vl.driver.local.pool import LocalPool
        from rlinf_vl.driver.local.supervise import DirectWriter, settled_process

        config, run_dir, path = self._config, self._run_dir, self._path
        self.device = self._stack.enter_context(settled_process(config))
        self.log = self.open_log(DirectWriter)
        self.pool = LocalPool(config, path, self.device, self._check)
        self._stack.callback(self.pool.stop)
        self.data = find_usable_rows(config, run_dir, self.pool, self._progress)
        self.gpu = SharedGpu(self.pool, shared=True, offload=config.actor.enable_offload)
        self.description = (
            f"one {config.rollout.rollout_backend} engine and one rank, {self.device}, without Ray"
        )

    def start_learner(self) -> None:
        from rlinf_vl.driver.local.learner import LocalLearner, LocalSync

        self.gpu.to_ranks()
        self.learner = LocalLearner(self._config, self._path, self.device, self.data.total_steps)
        self._stack.callback(self.learner.stop)
        self.sync = LocalSync(self._config, self.learner, self.pool.engine)

    def score_at(self, minibatch: Sequence[Any], temperature: float) -> Scores:
        return self.learner.rank.score_at(minibatch, temperature)

    def fingerprints(self) -> list[int]:
        return [self.learner.rank.fingerprint()]

    def stop(self) -> None:
        """Do nothing: the stack ends both."""
