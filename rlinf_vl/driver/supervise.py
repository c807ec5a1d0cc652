"""A run from its first process to its last: start the parts, train, and start the learner again
when a rank was lost."""

import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rlinf_vl.actor.group import ActorGroup
from rlinf_vl.config.engines import wakes_empty
from rlinf_vl.config.schema import Config
from rlinf_vl.controller.dataset_plan import find_usable_rows
from rlinf_vl.controller.loop import train
from rlinf_vl.controller.remote_writer import RemoteWriter
from rlinf_vl.controller.run_log import RunLog
from rlinf_vl.controller.schedules import SCHEDULES
from rlinf_vl.controller.shared_gpu import SharedGpu
from rlinf_vl.controller.weight_sync import WeightSync
from rlinf_vl.errors import RunError
from rlinf_vl.observe.progress import RunProgress
from rlinf_vl.rollout.episode.env_makers import pays_row_answers
from rlinf_vl.rollout.pool.pool import RolloutPool
from rlinf_vl.runtime.checkpoints import (
    Folder,
    checkpoint_home,
    newest_checkpoint,
    set_damaged_aside,
)
from rlinf_vl.runtime.launch import Reservation
from rlinf_vl.runtime.lost_placements import NODE_LOSS_HINT, find_lost
from rlinf_vl.runtime.ray_process import ActorsLost
from rlinf_vl.runtime.run_folder import write_baselines
from rlinf_vl.runtime.stop_request import Interrupted, StopRequest
from rlinf_vl.weights import FALLBACK
from rlinf_vl.weights.strategy import Site, Strategy, choose_strategy, strategy_named

logger = logging.getLogger(__name__)

#: Seconds between two looks at whether a lost node is back.
POLL_S = 2.0
#: Trains to the last step; returns the last step's metrics.
Run = Callable[[], dict[str, float]]


class TooManyRestarts(RunError):
    """The actor ranks died more than `runner.max_restarts` times without a checkpoint in
    between."""


def supervise(
    config: Config,
    model_path: str,
    reservation: Reservation,
    run_dir: Path,
    progress: RunProgress,
    stop: StopRequest,
    start: Folder | None = None,
) -> dict[str, float]:
    """Train to the last step, and replace processes that die; returns the last step's metrics.

    Args:
        run_dir: holds this run's history only, up to the step of the checkpoint `start`.
        start: the checkpoint to resume from; None: begin with the model in `model_path`.

    Raises:
        Interrupted: the run was asked to stop, and has written a checkpoint.
        RunError: the run can't go on; see `train`.
    """
    start_time = time.monotonic()
    home = checkpoint_home(config, run_dir)
    strategy = strategy_of(config, reservation)
    config.rollout.weight_sync = strategy.name  # engines and ranks need to know it
    start_writer = partial(RemoteWriter, config, run_dir, model_path)
    with ExitStack() as stack:
        log = stack.enter_context(closing(RunLog(config, run_dir, start_writer, progress)))
        progress.phase("starting rollout workers and actor ranks")
        pool = RolloutPool(
            config,
            model_path,
            reservation,
            reproducible=SCHEDULES[config.runner.schedule].is_reproducible(config.runner),
            report=log.event,
            check=stop.check,
        )
        stack.callback(pool.close)
        learner = ActorGroup(config, model_path, reservation.device, reservation.actor)
        data = find_usable_rows(config, run_dir, pool, progress)
        if pays_row_answers(config):
            write_baselines(run_dir, data.answers)
        engines = EngineLink(config, reservation, pool, strategy)
        pool.open_membership()

        def load(learner: ActorGroup) -> Run:
            progress.phase("sharding the policy")
            sync = engines.connect(learner, data.total_steps)
            return partial(
                train,
                config,
                pool,
                learner,
                data,
                home,
                stop,
                gpu=engines.gpu,
                sync=sync,
                log=log,
                start=start,
            )

        restarting = Restarting(config, model_path, reservation, home, start, log, stop)
        learner, outcome = restarting.run(
            learner, load, engines.forget_weights, data.total_steps, start_time
        )
        pool.release(log.recorder.close())
        pool.stop()
        # The ranks have nothing left to do: a rank lost now costs nothing.
        with suppress(ActorsLost):
            learner.stop()
    if isinstance(outcome, Interrupted):
        raise outcome
    return outcome


def strategy_of(config: Config, reservation: Reservation) -> Strategy:
    """Return the strategy by which weights reach the engines. Raises as `choose_strategy`."""
    placement = reservation.placement
    site = Site(reservation.device, placement.shared, placement.beside_actors)
    return choose_strategy(config.rollout.weight_sync, site)


class EngineLink:
    """Connects the engines of a run with one learner after the other.

    Attributes:
        gpu: hands shared GPUs from one to the other.
    """

    def __init__(
        self, config: Config, reservation: Reservation, pool: RolloutPool, strategy: Strategy
    ) -> None:
        self.gpu = SharedGpu(
            pool,
            shared=reservation.placement.shared,
            offload=config.actor.enable_offload,
            wakes_empty=wakes_empty(config),
        )
        self._reservation, self._pool, self._strategy = reservation, pool, strategy
        self._sync: WeightSync | None = None

    def connect(self, learner: ActorGroup, total_steps: int) -> WeightSync:
        """Start a learner on the GPUs that the engines leave to it."""
        self.gpu.to_ranks()
        learner.start(total_steps)
        # In a shrunk run an engine may have lost the ranks on its GPUs, which a strategy may need.
        all_ranks = len(learner.ranks) == len(self._reservation.actor)
        usable = all_ranks or self._strategy.survives_lost_ranks
        strategy = self._strategy if usable else strategy_named(FALLBACK)
        self._sync = WeightSync(
            strategy,
            learner,
            self._pool,
            device=self._reservation.device,
            sends_frozen=self.gpu.loses_weights,
        )
        return self._sync

    def forget_weights(self) -> None:
        """Forget the weights of a lost learner, and what was sampled from them."""
        # The steps after the checkpoint are trained again: their weights are void.
        self._pool.forget_weights()
        if self._sync is not None and self._sync.busy:
            self._pool.replace_all("they may wait for weights that will not come")
        self._pool.release()


@dataclass(frozen=True)
class Restarting:
    """Trains, and starts the ranks again from the newest checkpoint when some were lost.

    Attributes:
        home: where checkpoints are written.
        start: the checkpoint that the run was resumed from; None: it was not.
    """

    config: Config
    model_path: str
    reservation: Reservation
    home: Folder
    start: Folder | None
    log: RunLog
    stop: StopRequest

    def run(
        self,
        learner: ActorGroup,
        load: Callable[[ActorGroup], Run],
        forget_weights: Callable[[], None],
        total_steps: int,
        start_time: float,
    ) -> tuple[ActorGroup, dict[str, float] | Interrupted]:
        """Train to the last step; returns the last learner, and the metrics or why it stopped.

        Args:
            load: starts a learner, and returns the function that trains it.
            forget_weights: called before a lost learner is replaced.
        """
        stop, home = self.stop, self.home
        loss_error: ActorsLost | None = None
        restarts = Counter[Folder | None]()  # by the checkpoint that the run was resumed from
        while True:
            try:
                if loss_error is not None:
                    learner.kill()
                    stop.check()
                    # A damaged checkpoint would fail every restart.
                    set_damaged_aside(home, partial(self.log.event, "checkpoint_damaged"))
                    checkpoint = newest_checkpoint(home, self.start)
                    limit = self.config.runner.max_restarts
                    count_restart(loss_error, restarts[checkpoint], limit, checkpoint, self.log)
                    restarts[checkpoint] += 1
                    forget_weights()
                    learner = ranks_again(
                        self.config, self.model_path, self.reservation, self.log, stop
                    )
                train_to_end = load(learner)
                stop.grace_period, stop.graceful = self.config.runner.grace_period, True
                if loss_error is None:
                    seconds = time.monotonic() - start_time
                    logger.info("started in %.0f s; training to step %d", seconds, total_steps)
                return learner, train_to_end()
            except ActorsLost as error:
                loss_error = error
            except Interrupted as request:
                return learner, request


def ranks_again(
    config: Config, model_path: str, reservation: Reservation, log: RunLog, stop: StopRequest
) -> ActorGroup:
    """Start all ranks. If a node is lost, wait for it or start fewer, as
    `cluster.on_node_loss` says; raises `Interrupted` if the run is asked to stop meanwhile."""
    placements, reported = reservation.actor, False
    while True:
        lost = find_lost(placements)
        surviving = [options for number, options in enumerate(placements) if number not in lost]
        # Ranks share sequences and experts in groups: an incomplete group is of no use.
        surviving = surviving[: len(surviving) - len(surviving) % config.actor.rank_multiple]
        if not lost or (surviving and config.cluster.on_node_loss == "shrink"):
            if lost:
                message = f"the nodes of {len(lost)} of {len(placements)} actor ranks are lost; {len(surviving)} go on"
                log.event("run_shrunk", message)
            learner = ActorGroup(config, model_path, reservation.device, surviving)
            try:
                # A node may be lost while the ranks start: then look again.
                if learner.placed(lambda: bool(stop.check() or find_lost(surviving))):  # noqa: B023
                    return learner
            except (Interrupted, ActorsLost):
                learner.kill()
                raise
            learner.kill()
        elif not reported:
            reported = True
            message = f"the nodes of {len(lost)} of {len(placements)} actor ranks are lost; the run waits: {NODE_LOSS_HINT}"
            log.event("node_lost", message)
        stop.check()
        time.sleep(POLL_S)


def count_restart(
    lost: ActorsLost, times: int, limit: int, checkpoint: Folder | None, log: RunLog
) -> None:
    """Record that the learner starts again; raises `TooManyRestarts` if it has done so `limit`
    times from this checkpoint."""
    if times >= limit:
        raise TooManyRestarts(
            f"{lost}. The actor ranks were started again {limit} times before "
            "(runner.max_restarts) without a further checkpoint; the last complete one is "
            f"{checkpoint or 'none'}"
        ) from lost
    resumed = f"the run goes back to {checkpoint or 'its start: it has no checkpoint yet'}"
    log.event("actors_restarted", f"{lost}; the actor ranks start again, {resumed}")
