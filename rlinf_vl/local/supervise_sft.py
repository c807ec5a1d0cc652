"""A local run of `rlinf-vl sft`, from its rows to its last step."""

import logging
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from rlinf_vl.config.imitation import as_problems
from rlinf_vl.config.schema import Config
from rlinf_vl.controller.dataset_plan import find_usable_rows
from rlinf_vl.controller.imitate import Sampling, imitate
from rlinf_vl.controller.run_log import RunLog
from rlinf_vl.controller.shared_gpu import SharedGpu
from rlinf_vl.local.learner import LocalLearner, LocalSync
from rlinf_vl.local.pool import LocalPool
from rlinf_vl.local.row_reader import LocalRowReader
from rlinf_vl.local.supervise import DirectWriter
from rlinf_vl.observe.progress import RunProgress
from rlinf_vl.runtime.checkpoints import Folder, checkpoint_home
from rlinf_vl.runtime.stop_request import Interrupted, StopRequest

logger = logging.getLogger(__name__)


def supervise(
    config: Config,
    model_path: str,
    run_dir: Path,
    progress: RunProgress,
    stop: StopRequest,
    start: Folder | None = None,
) -> dict[str, float]:
    """Train to the last step in this process; returns the last step's metrics.

    Arguments and errors are those of `rlinf_vl.controller.supervise_sft.supervise`.
    """
    start_time = time.monotonic()
    device = config.cluster.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if config.rollout.gpu_memory_utilization == "auto":
        config.rollout.gpu_memory_utilization = 0.6
    with ExitStack() as stack:
        # As in the processes of a run with Ray: the last digits of a sum depend on it.
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        if device == "cpu" or config.cluster.cpu_threads:
            torch.set_num_threads(config.cluster.cpu_threads or 1)
        log = RunLog(config, run_dir, partial(DirectWriter, config, run_dir, model_path), progress)
        stack.callback(log.close)
        readers = LocalRowReader(config, model_path, stop.check)
        stack.callback(readers.stop)
        data = find_usable_rows(config, run_dir, readers, progress)
        engine: tuple[LocalPool, SharedGpu] | None = None
        if config.data.sample_val:
            progress.phase("starting the engine")
            pool = LocalPool(as_problems(config), model_path, device, stop.check)
            stack.callback(pool.stop)
            gpu = SharedGpu(pool, shared=True, offload=config.actor.enable_offload)
            gpu.to_ranks()
            engine = pool, gpu
        progress.phase("loading the policy")
        learner = LocalLearner(config, model_path, device, data.total_steps)
        stack.callback(learner.stop)
        logger.info("what is trained:\n%s", learner.table)
        sampling = None
        if engine is not None:
            pool, gpu = engine
            sync = LocalSync(config, learner, pool.engine)
            sampling = Sampling(as_problems(config), pool, sync, gpu)
        stop.grace_period, stop.graceful = config.runner.grace_period, True
        seconds = time.monotonic() - start_time
        logger.info("started in %.0f s; training to step %d", seconds, data.total_steps)
        outcome: dict[str, float] | Interrupted
        try:
            outcome = imitate(
                config,
                readers,
                learner,
                data,
                checkpoint_home(config, run_dir),
                stop,
                log=log,
                sampling=sampling,
                start=start,
            )
        except Interrupted as request:
            # The recorder is closed first, so that the last trajectories are written.
            outcome = request
        log.recorder.close()
    if isinstance(outcome, Interrupted):
        raise outcome
    return outcome
