"""A run of `rlinf-vl sft` on Ray, from its first process to its last. Ranks that are lost are
started again, from the newest checkpoint."""

import logging
import time
from collections import Counter
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path

from rlinf_vl.actor.group import ActorGroup
from rlinf_vl.config.imitation import as_problems
from rlinf_vl.config.schema import Config
from rlinf_vl.controller.dataset_plan import find_usable_rows
from rlinf_vl.controller.imitate import Sampling, imitate
from rlinf_vl.controller.remote_writer import RemoteWriter
from rlinf_vl.controller.run_log import RunLog
from rlinf_vl.controller.shared_gpu import SharedGpu
from rlinf_vl.controller.supervise import count_restart, ranks_again
from rlinf_vl.controller.weight_sync import WeightSync
from rlinf_vl.observe.progress import RunProgress
from rlinf_vl.rollout.pool import RolloutPool
from rlinf_vl.rollout.row_readers import RowReaders
from rlinf_vl.runtime.checkpoints import (
    Folder,
    checkpoint_home,
    newest_checkpoint,
    set_damaged_aside,
)
from rlinf_vl.runtime.launch import Reservation
from rlinf_vl.runtime.ray_process import ActorsLost
from rlinf_vl.runtime.stop_request import Interrupted, StopRequest
from rlinf_vl.weights import FALLBACK
from rlinf_vl.weights.strategy import Site, choose_strategy, strategy_named

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
    start_writer = partial(RemoteWriter, config, run_dir, model_path)
    with ExitStack() as stack:
        log = stack.enter_context(closing(RunLog(config, run_dir, start_writer, progress)))
        progress.phase("starting readers and actor ranks")
        n_readers = min(MAX_READERS, -(-len(reservation.actor) // RANKS_PER_READER))
        readers = RowReaders(config, model_path, n_readers, stop.check)
        learner = ActorGroup(config, model_path, reservation.device, reservation.actor)
        data = find_usable_rows(config, run_dir, readers, progress)
        engines = Engines(config, model_path, reservation, log, stop, stack)
        loss_error: ActorsLost | None = None
        restarts = Counter[Folder | None]()  # by the checkpoint that the run was resumed from
        outcome: dict[str, float] | Interrupted | None = None
        while outcome is None:
            try:
                if loss_error is not None:
                    learner.kill()
                    stop.check()
                    # A damaged checkpoint would fail every restart.
                    set_damaged_aside(home, partial(log.event, "checkpoint_damaged"))
                    checkpoint = newest_checkpoint(home, start)
                    limit = config.runner.max_restarts
                    count_restart(loss_error, restarts[checkpoint], limit, checkpoint, log)
                    restarts.update([checkpoint])
                    engines.forget_weights()
                    learner = ranks_again(config, model_path, reservation, log, stop)
                progress.phase("sharding the policy")
                sampling = engines.sampling(learner, data.total_steps)
                stop.grace_period, stop.graceful = config.runner.grace_period, True
                if loss_error is None:
                    seconds = time.monotonic() - start_time
                    logger.info("started in %.0f s; training to step %d", seconds, data.total_steps)
                outcome = imitate(
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
            except ActorsLost as error:
                loss_error = error
            except Interrupted as request:
                outcome = request
        log.recorder.close()
        readers.stop()
        engines.stop()
        # The ranks have nothing left to do: a rank lost now costs nothing.
        with suppress(ActorsLost):
            learner.stop()
    if isinstance(outcome, Interrupted):
        raise outcome
    return outcome


class Engines:
    """The engines that sample answers to the validation rows; none without `data.sample_val`."""

    def __init__(
        self,
        config: Config,
        model_path: str,
        reservation: Reservation,
        log: RunLog,
        stop: StopRequest,
        stack: ExitStack,
    ) -> None:
        """Start the engines, and check nothing yet; `stack` ends them."""
        self._reservation = reservation
        self._config = as_problems(config)
        self._pool: RolloutPool | None = None
        self._sync: WeightSync | None = None
        if not config.data.sample_val:
            return
        self._pool = RolloutPool(
            self._config, model_path, reservation, report=log.event, check=stop.check
        )
        stack.callback(self._pool.close)
        self._pool.start()
        placement = reservation.placement
        self._site = Site(reservation.device, placement.shared, placement.beside_actors)
        self._gpu = SharedGpu(
            self._pool, shared=placement.shared, offload=config.actor.enable_offload
        )

    def forget_weights(self) -> None:
        """Forget the weights of lost ranks, and end engines that may wait for them."""
        if self._pool is None:
            return
        self._pool.forget_weights()
        if self._sync is not None and self._sync.busy:
            self._pool.replace_all("they may wait for weights that will not come")

    def sampling(self, learner: ActorGroup, total_steps: int) -> Sampling | None:
        """Start the learner on GPUs that the engines have left, and connect the two."""
        if self._pool is None:
            learner.start(total_steps)
            return None
        self._gpu.to_ranks()
        learner.start(total_steps)
        strategy = choose_strategy(self._config.rollout.weight_sync, self._site)
        # In a shrunk run an engine may have lost the ranks on its GPUs.
        if len(learner.ranks) < len(self._reservation.actor) and not strategy.survives_lost_ranks:
            strategy = strategy_named(FALLBACK)
        self._sync = WeightSync(strategy, learner, self._pool, device=self._reservation.device)
        return Sampling(self._config, self._pool, self._sync, self._gpu)

    def stop(self) -> None:
        if self._pool is not None:
            self._pool.stop()
