"""The parts of a run, on Ray or in this process: a log, engines, ranks, and the weight sync between
them.

Training, imitation, evaluations, smoke runs, replays and warm starts are functions of `Parts`:

    with parts_of(config, model_path, run_dir, progress, stop) as parts:  # driver/backends.py
        pool = parts.start_pool()
        metrics = parts.train_to_end(run, total_steps, start)
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

from rlinf_vl.config.schema import Config
from rlinf_vl.controller.protocols import StepProgress, WeightSyncer
from rlinf_vl.controller.recorder import Writer
from rlinf_vl.controller.run_log import RunLog
from rlinf_vl.controller.shared_gpu import SharedGpu
from rlinf_vl.runtime.checkpoints import Folder, checkpoint_home
from rlinf_vl.runtime.stop_request import Interrupted, StopRequest

logger = logging.getLogger(__name__)

#: Trains to the last step; returns the last step's metrics.
Run = Callable[[], dict[str, float]]
#: What `Rank.score_at` returns for each group.
Scores = list[tuple[int, int, float, float]]


class Parts(ABC):
    """The parts of one run, which end with the context.

    Attributes:
        device: "cuda" or "cpu".
        n_ranks: the number of actor ranks.
        log: the run's log.
        home: where checkpoints are written.
        pool: the engines' pool, from `start_pool` on; None before.
        learner: the ranks, from `connect` on.
        sync: sends the learner's weights to the engines, from `connect` on, where there is a pool.
    """

    device: str
    n_ranks: int
    log: RunLog
    pool: Any = None
    learner: Any
    sync: WeightSyncer

    def __init__(
        self,
        config: Config,
        model_path: str,
        run_dir: Path,
        progress: StepProgress,
        stop: StopRequest,
    ) -> None:
        self.config, self.model_path, self.run_dir = config, model_path, run_dir
        self.progress, self.stop = progress, stop
        self.home = checkpoint_home(config, run_dir)
        self._stack = ExitStack()
        self._ends: list[Callable[[], None]] = []
        self._start_time = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)

    def _open_log(self, writer: Callable[[Config, Path, str], Writer]) -> None:
        """Open the run's log, whose trajectories `writer` writes; it is closed last."""
        start_writer = partial(writer, self.config, self.run_dir, self.model_path)
        self.log = RunLog(self.config, self.run_dir, start_writer, self.progress)
        self._stack.callback(self.log.close)

    def at_end(self, end: Callable[[], None]) -> None:
        """Call `end` when the run has come to its end, and not after an error."""
        self._ends.append(end)

    def train_to_end(self, run: Run, total_steps: int, start: Folder | None) -> dict[str, float]:
        """Load the policy, call `run`, write the last trajectories, and end all parts in order.

        Args:
            run: called again where ranks were lost and have been started again; `learner` and
                `sync` are the new ones then.
            start: the checkpoint that the run is resumed from.

        Raises:
            Interrupted: as `run`, when all parts have ended.
            TooManyRestarts: ranks were lost again and again.
        """
        try:
            metrics = self._train(run, total_steps, start)
        except Interrupted:
            self.finish()
            raise
        self.finish()
        return metrics

    def finish(self) -> None:
        """Write the last trajectories, and end all parts in order."""
        recorded = self.log.recorder.close()
        for end in self._ends:
            end()
        if self.pool is not None:
            self.pool.release(recorded)
        self.end()

    def _report_start(self, total_steps: int) -> None:
        seconds = time.monotonic() - self._start_time
        logger.info("started in %.0f s; training to step %d", seconds, total_steps)

    def _stop_gracefully(self) -> None:
        """From now on a first signal stops the run with a checkpoint."""
        self.stop.grace_period, self.stop.graceful = self.config.runner.grace_period, True

    @cached_property
    def gpu(self) -> SharedGpu:
        """The switches of GPUs that engines and ranks share; the pool has started."""
        return self._share_gpu()

    @abstractmethod
    def _share_gpu(self) -> SharedGpu: ...

    @property
    @abstractmethod
    def description(self) -> str:
        """The engines and ranks that were started, for people."""

    @abstractmethod
    def start_pool(self, config: Config | None = None) -> Any:
        """Start the engines of this config (None: that of the run), and return their pool."""

    @abstractmethod
    def begin_learner(self) -> None:
        """Begin to start the processes of the ranks, while others start and rows are checked."""

    @abstractmethod
    def connect(self, total_steps: int) -> None:
        """Load the policy, on the GPUs that the engines leave to it, for a run of `total_steps`."""

    @abstractmethod
    def _train(self, run: Run, total_steps: int, start: Folder | None) -> dict[str, float]:
        """Load the policy and call `run`, as `train_to_end` says."""

    @abstractmethod
    def score_at(self, minibatch: Sequence[Any], temperature: float) -> Scores:
        """Call `Rank.score_at` on every rank."""

    @abstractmethod
    def fingerprints(self) -> list[int]:
        """Call `Rank.fingerprint` on every rank."""

    @abstractmethod
    def end(self) -> None:
        """End engines and ranks in order."""
