"""A run of `rlinf-vl sft` on Ray, from its first process to its last. Ranks that are lost are
started again, from the newest checkpoint."""

import logging
import time
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path

from rlinf_vl.actor.group import ActorGroup
from rlinf_vl.config.imitation import as_problems
from rlinf_vl.config.schema import Config
from rlinf_vl.controller.dataset_plan import find_usable_rows
from rlinf_vl.controller.remote_writer import RemoteWriter
from rlinf_vl.controller.run_log import RunLog
from rlinf_vl.driver.supervise import EngineLink, Restarting, Run, strategy_of
from rlinf_vl.extras.sft.imitate import Sampling, imitate
from rlinf_vl.extras.sft.row_readers import RowReaders
from rlinf_vl.observe.progress import RunProgress
from rlinf_vl.rollout.pool.pool import RolloutPool
from rlinf_vl.runtime.checkpoints import Folder, checkpoint_home
from rlinf_vl.runtime.launch import Reservation
from rlinf_vl.runtime.ray_process import ActorsLost
from rlinf_vl.runtime.stop_request import Interrupted, StopRequest

logger = logging.getLogger(__name__)

#: Actor ranks for each reader, and the most readers: rendering a row takes about a millisecond.
RANKS_PER_READER, MAX_READERS = 4, 8


def supervise(
    config: Config,
    model_path: str,
    reservation: Reservation,
    run_dir: Path,
    progress: RunProgress,
    stop: StopRequest,
    start: Folder | None = None,
) -> dict[str, float]:
    """Train to the last step; returns the last step's metrics.

    Args:
        run_dir: holds this run's history only, up to the step of the checkpoint `start`.
        start: the checkpoint to resume from; None: begin with the model in `model_path`.

    Raises:
        Interrupted: the run was asked to stop, and has written a checkpoint.
        RunError: the run can't go on; see `imitate`.
    """
    start_time = time.monotonic()
    home = checkpoint_home(config, run_dir)
    strategy = strategy_of(config, reservation) if config.data.sample_val else None
    start_writer = partial(RemoteWriter, config, run_dir, model_path)
    with ExitStack() as stack:
        log = stack.enter_context(closing(RunLog(config, run_dir, start_writer, progress)))
        progress.phase("starting readers and actor ranks")
        n_readers = min(MAX_READERS, -(-len(reservation.actor) // RANKS_PER_READER))
        readers = RowReaders(config, model_path, n_readers, stop.check)
        learner = ActorGroup(config, model_path, reservation.device, reservation.actor)
        data = find_usable_rows(config, run_dir, readers, progress)
        problems = as_problems(config)
        pool = engines = None
        if strategy is not None:
            pool = RolloutPool(
                problems, model_path, reservation, report=log.event, check=stop.check
            )
            stack.callback(pool.close)
            pool.start()
            engines = EngineLink(problems, reservation, pool, strategy)

        def load(learner: ActorGroup) -> Run:
            progress.phase("sharding the policy")
            sampling = None
            if pool is not None and engines is not None:
                sync = engines.connect(learner, data.total_steps)
                sampling = Sampling(problems, pool, sync, engines.gpu)
            else:
                learner.start(data.total_steps)
            run = partial(imitate, config, readers, learner, data, home, stop)
            return partial(run, log=log, sampling=sampling, start=start)

        def forget_weights() -> None:
            if engines is not None:
                engines.forget_weights()

        restarting = Restarting(config, model_path, reservation, home, start, log, stop)
        learner, outcome = restarting.run(
            learner, load, forget_weights, data.total_steps, start_time
        )
        log.recorder.close()
        readers.stop()
        if pool is not None:
            pool.stop()
        # The ranks have nothing left to do: a rank lost now costs nothing.
        with suppress(ActorsLost):
            learner.stop()
    if isinstance(outcome, Interrupted):
        raise outcome
    return outcome
