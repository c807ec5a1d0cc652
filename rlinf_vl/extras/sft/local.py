"""A local run of `rlinf-vl sft`, from its rows to its last step."""

import logging
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from rlinf_vl.config.imitation import as_problems
from rlinf_vl.config.load import save_config
from rlinf_vl.config.schema import Config
from rlinf_vl.controller.dataset_plan import find_usable_rows
from rlinf_vl.controller.run_log import RunLog
from rlinf_vl.controller.shared_gpu import SharedGpu
from rlinf_vl.driver.local.learner import LocalLearner, LocalSync
from rlinf_vl.driver.local.pool import LocalPool
from rlinf_vl.driver.local.supervise import DirectWriter, run_to_end, settled_process
from rlinf_vl.extras.sft.imitate import Sampling, imitate
from rlinf_vl.extras.sft.local_rows import LocalRowReader
from rlinf_vl.observe.progress import RunProgress
from rlinf_vl.runtime.checkpoints import Folder, checkpoint_home
from rlinf_vl.runtime.stop_request import StopRequest

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

    Arguments and errors are those of `rlinf_vl.extras.sft.supervise.supervise`.
    """
    start_time = time.monotonic()
    with ExitStack() as stack:
        device = stack.enter_context(settled_process(config))
        save_config(config, run_dir / "config.yaml")  # with what was settled
        log = RunLog(config, run_dir, partial(DirectWriter, config, run_dir, model_path), progress)
        stack.callback(log.close)
        readers = LocalRowReader(config, model_path, stop.check)
        stack.callback(readers.stop)
        data = find_usable_rows(config, run_dir, readers, progress)
        pool = gpu = None
        problems = as_problems(config)
        if config.data.sample_val:
            progress.phase("starting the engine")
            pool = LocalPool(problems, model_path, device, stop.check)
            stack.callback(pool.stop)
            gpu = SharedGpu(pool, shared=True, offload=config.actor.enable_offload)
            gpu.to_ranks()
        progress.phase("loading the policy")
        learner = LocalLearner(config, model_path, device, data.total_steps)
        stack.callback(learner.stop)
        logger.info("what is trained:\n%s", learner.table)
        sampling = None
        if pool is not None and gpu is not None:
            sync = LocalSync(config, learner, pool.engine)
            sampling = Sampling(problems, pool, sync, gpu)
        home = checkpoint_home(config, run_dir)
        run = partial(
            imitate,
            config,
            readers,
            learner,
            data,
            home,
            stop,
            log=log,
            sampling=sampling,
            start=start,
        )
        return run_to_end(run, config, stop, log, data.total_steps, start_time)
