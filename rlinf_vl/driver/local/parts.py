"""The parts of a run in this process: one engine, one rank, and a writer that writes at once."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlinf_vl.config.automatic import settle_without_ledger
from rlinf_vl.config.schema import Config
from rlinf_vl.controller.shared_gpu import SharedGpu
from rlinf_vl.controller.trajectory_writer import TrajectoryWriter, image_token
from rlinf_vl.driver.local.learner import LocalLearner, LocalSync
from rlinf_vl.driver.local.pool import LocalPool
from rlinf_vl.driver.parts import Parts, Run, Scores
from rlinf_vl.runtime.checkpoints import Folder

logger = logging.getLogger(__name__)


class LocalParts(Parts):
    """`Parts` without Ray. The process is settled while the context lasts (`settled_process`)."""

    n_ranks = 1

    def __enter__(self) -> "LocalParts":
        self.device = self._stack.enter_context(settled_process(self.config))
        self._open_log(DirectWriter)
        return self

    @property
    def description(self) -> str:
        backend = self.config.rollout.rollout_backend
        return f"one {backend} engine and one rank, {self.device}, without Ray"

    def start_pool(self, config: Config | None = None) -> LocalPool:
        self.pool = LocalPool(config or self.config, self.model_path, self.device, self.stop.check)
        self._stack.callback(self.pool.stop)
        return self.pool

    def _share_gpu(self) -> SharedGpu:
        # Ahead of training, groups may still be in flight in the engine, which keeps its memory.
        takes_turns = not self.config.runner.generates_ahead
        return SharedGpu(self.pool, shared=takes_turns, offload=self.config.actor.enable_offload)

    def begin_learner(self) -> None:
        """Do nothing: it has no process of its own."""

    def make_learner(self, total_steps: int) -> LocalLearner:
        return LocalLearner(self.config, self.model_path, self.device, total_steps)

    def connect(self, total_steps: int) -> None:
        if self.pool is not None:
            self.gpu.to_ranks()
        self.learner = self.make_learner(total_steps)
        self._stack.callback(self.learner.stop)
        if self.pool is not None:
            self.sync = LocalSync(self.config, self.learner, self.pool.engine)

    def at_end(self, end: Callable[[], None]) -> None:
        """Call `end` when the context ends, after an error, too: this process goes on."""
        self._stack.callback(end)

    def _train(self, run: Run, total_steps: int, start: Folder | None) -> dict[str, float]:
        self.progress.phase("loading the policy")
        self.connect(total_steps)
        logger.info("what is trained:\n%s", self.learner.table)
        self._stop_gracefully()
        self._report_start(total_steps)
        return run()

    def score_at(self, minibatch: Sequence[Any], temperature: float) -> Scores:
        return self.learner.rank.score_at(minibatch, temperature)

    def fingerprints(self) -> list[int]:
        return [self.learner.rank.fingerprint()]

    def end(self) -> None:
        """Do nothing: engine and rank end with the context."""


class DirectWriter:
    """The recorder's handle of a `TrajectoryWriter` in this process, which writes at once."""

    def __init__(self, config: Config, run_dir: Path, model_path: str) -> None:
        self._writer = TrajectoryWriter(
            config, run_dir, model_path, image_token(config, model_path)
        )
        self._outcome: Callable[[], Any] = lambda: None

    def begin(self, method: str, *arguments: Any) -> None:
        try:
            value = getattr(self._writer, method)(*arguments)
        # A full disk, say: the recorder reports it when it asks for the result.
        except Exception as error:
            self._outcome = partial(_raise, error)
        else:
            self._outcome = lambda: value

    def result(self, timeout_s: float) -> Any:
        return self._outcome()

    def kill(self) -> None:
        """Do nothing: no call is under way between two of the recorder's."""


def _raise(error: Exception) -> None:
    raise error


@contextmanager
def settled_process(config: Config) -> Iterator[str]:
    """Settle what depends on this process, and yield its device; threads are reset at the end."""
    device = config.cluster.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    # The ledger, which settles `auto` of a run with Ray, asks Ray for the sizes of its GPUs.
    settle_without_ledger(config, device)
    # A Ray that this process has started before sets its own debugger, which needs Ray.
    if os.environ.get("PYTHONBREAKPOINT", "").startswith("ray."):
        del os.environ["PYTHONBREAKPOINT"]
    n_threads = torch.get_num_threads()
    # As in the processes of a run with Ray: the last digits of a sum depend on it.
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        yield device
    finally:
        torch.set_num_threads(n_threads)
