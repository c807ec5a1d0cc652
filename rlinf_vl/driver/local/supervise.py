"""A local run from its engine to its last step."""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlinf_vl.config.automatic import settle_without_ledger
from rlinf_vl.config.load import save_config
from rlinf_vl.config.schema import Config
from rlinf_vl.controller.dataset_plan import find_usable_rows
from rlinf_vl.controller.loop import train
from rlinf_vl.controller.run_log import RunLog
from rlinf_vl.controller.shared_gpu import SharedGpu
from rlinf_vl.controller.trajectory_writer import TrajectoryWriter, image_token
from rlinf_vl.driver.local.learner import LocalLearner, LocalSync
from rlinf_vl.driver.local.pool import LocalPool
from rlinf_vl.observe.progress import RunProgress
from rlinf_vl.rollout.episode.env_makers import pays_row_answers
from rlinf_vl.runtime.checkpoints import Folder, checkpoint_home
from rlinf_vl.runtime.run_folder import write_baselines
from rlinf_vl.runtime.stop_request import Interrupted, StopRequest

logger = logging.getLogger(__name__)


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


def supervise(
    config: Config,
    model_path: str,
    run_dir: Path,
    progress: RunProgress,
    stop: StopRequest,
    start: Folder | None = None,
) -> dict[str, float]:
    """Train to the last step in this process; returns the last step's metrics.

    Arguments and errors are those of `rlinf_vl.driver.supervise.supervise`.
    """
    start_time = time.monotonic()
    with ExitStack() as stack:
        device = stack.enter_context(settled_process(config))
        save_config(config, run_dir / "config.yaml")  # with what was settled
        log = RunLog(config, run_dir, partial(DirectWriter, config, run_dir, model_path), progress)
        stack.callback(log.close)
        progress.phase("starting the engine")
        pool = LocalPool(config, model_path, device, stop.check)
        stack.callback(pool.stop)
        data = find_usable_rows(config, run_dir, pool, progress)
        if pays_row_answers(config):
            write_baselines(run_dir, data.answers)
        # Ahead of training, groups may still be in flight in the engine, which keeps its memory.
        takes_turns = not config.runner.generates_ahead
        gpu = SharedGpu(pool, shared=takes_turns, offload=config.actor.enable_offload)
        progress.phase("loading the policy")
        gpu.to_ranks()
        learner = LocalLearner(config, model_path, device, data.total_steps)
        stack.callback(learner.stop)
        logger.info("what is trained:\n%s", learner.table)
        sync = LocalSync(config, learner, pool.engine)
        home = checkpoint_home(config, run_dir)
        run = partial(
            train, config, pool, learner, data, home, stop, gpu=gpu, sync=sync, log=log, start=start
        )
        return run_to_end(run, config, stop, log, data.total_steps, start_time)


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
    if device == "cpu" or config.cluster.cpu_threads:
        torch.set_num_threads(config.cluster.cpu_threads or 1)
    try:
        yield device
    finally:
        torch.set_num_threads(n_threads)


def run_to_end(
    run: Callable[[], dict[str, float]],
    config: Config,
    stop: StopRequest,
    log: RunLog,
    total_steps: int,
    start_time: float,
) -> dict[str, float]:
    """Call `run`, which trains once all parts are started, and write its last trajectories.

    Raises:
        Interrupted: as `run`; the trajectories are written before.
    """
    stop.grace_period, stop.graceful = config.runner.grace_period, True
    seconds = time.monotonic() - start_time
    logger.info("started in %.0f s; training to step %d", seconds, total_steps)
    try:
        metrics = run()
    except Interrupted:
        log.recorder.close()
        raise
    log.recorder.close()
    return metrics
