"""The parts of a run on Ray: workers, ranks and writers are actors, and ranks that are lost are started
again."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlinf_vl.actor.group import ActorGroup
from rlinf_vl.config.engines import wakes_empty
from rlinf_vl.config.schema import Config
from rlinf_vl.controller.protocols import StepProgress
from rlinf_vl.controller.remote_writer import RemoteWriter
from rlinf_vl.controller.schedules import SCHEDULES
from rlinf_vl.controller.shared_gpu import SharedGpu
from rlinf_vl.controller.weight_sync import WeightSync
from rlinf_vl.driver.parts import Parts, Run, Scores
from rlinf_vl.driver.restarts import Restarts, ranks_again
from rlinf_vl.rollout.pool.pool import RolloutPool
from rlinf_vl.runtime.checkpoints import Folder
from rlinf_vl.runtime.launch import Reservation
from rlinf_vl.runtime.ray_process import ActorsLost
from rlinf_vl.runtime.stop_request import StopRequest
from rlinf_vl.weights import FALLBACK
from rlinf_vl.weights.strategy import Site, Strategy, choose_strategy, strategy_named


class RayParts(Parts):
    """`Parts` in the slots of a reservation."""

    _strategy: Strategy  # from `start_pool` on, where there will be ranks

    def __init__(
        self,
        config: Config,
        model_path: str,
        run_dir: Path,
        progress: StepProgress,
        stop: StopRequest,
        reservation: Reservation,
    ) -> None:
        super().__init__(config, model_path, run_dir, progress, stop)
        self.device, self.n_ranks = reservation.device, len(reservation.actor)
        self._reservation = reservation
        self._sync: WeightSync | None = None
        self._open_log(RemoteWriter)

    @property
    def description(self) -> str:
        shared = self._reservation.placement.shared
        slots = "shared slots" if shared else "slots of their own"
        return (
            f"{self.config.rollout.rollout_backend} engines {len(self._reservation.rollout)}, actor "
            f"ranks {self.n_ranks}, {slots}, {self.device}, weights by {self._strategy.name}"
        )

    def start_pool(self, config: Config | None = None) -> RolloutPool:
        config = config or self.config
        placement, runner = self._reservation.placement, config.runner
        if self.n_ranks:
            site = Site(self.device, placement.shared, placement.beside_actors)
            self._strategy = choose_strategy(config.rollout.weight_sync, site)
            # Engines and ranks need to know it.
            config.rollout.weight_sync = self.config.rollout.weight_sync = self._strategy.name
        self.pool = RolloutPool(
            config,
            self.model_path,
            self._reservation,
            reproducible=SCHEDULES[runner.schedule].is_reproducible(runner),
            report=self.log.event,
            check=self.stop.check,
        )
        self._stack.callback(self.pool.close)
        return self.pool

    def _share_gpu(self) -> SharedGpu:
        return SharedGpu(
            self.pool,
            shared=self._reservation.placement.shared,
            offload=self.config.actor.enable_offload,
            wakes_empty=wakes_empty(self.config),
        )

    def begin_learner(self) -> None:
        self.learner = ActorGroup(
            self.config, self.model_path, self.device, self._reservation.actor
        )

    def connect(self, total_steps: int) -> None:
        if self.pool is None:
            self.learner.start(total_steps)
            return
        self.gpu.to_ranks()
        self.learner.start(total_steps)
        # In a shrunk run an engine may have lost the ranks on its GPUs, which a strategy may need.
        all_ranks = len(self.learner.ranks) == self.n_ranks
        usable = all_ranks or self._strategy.survives_lost_ranks
        self.sync = self._sync = WeightSync(
            self._strategy if usable else strategy_named(FALLBACK),
            self.learner,
            self.pool,
            device=self.device,
            sends_frozen=self.gpu.loses_weights,
        )

    def _train(self, run: Run, total_steps: int, start: Folder | None) -> dict[str, float]:
        restarts = Restarts(self.home, start, self.log)
        lost: ActorsLost | None = None
        while True:
            try:
                if lost is not None:
                    self._replace_learner(restarts, lost)
                self.progress.phase("sharding the policy")
                self.connect(total_steps)
                self._stop_gracefully()
                if lost is None:
                    self._report_start(total_steps)
                return run()
            except ActorsLost as error:
                lost = error

    def _replace_learner(self, restarts: Restarts, lost: ActorsLost) -> None:
        """Start all ranks again; they will load the newest checkpoint."""
        self.learner.kill()
        self.stop.check()
        restarts.count(lost)
        if self.pool is not None:
            # The steps after the checkpoint are trained again: their weights are void, and so is
            # what was sampled from them.
            self.pool.forget_weights()
            if self._sync is not None and self._sync.busy:
                self.pool.replace_all("they may wait for weights that will not come")
            self.pool.release()
        self.learner = ranks_again(
            self.config, self.model_path, self._reservation, self.log, self.stop
        )

    def score_at(self, minibatch: Sequence[Any], temperature: float) -> Scores:
        return sum(self.learner.call("score_at", minibatch, temperature), [])

    def fingerprints(self) -> list[int]:
        return self.learner.call("fingerprint")

    def end(self) -> None:
        if self.pool is not None:
            self.pool.stop()
        # The ranks have nothing left to do: a rank lost now costs nothing.
        if self.n_ranks:
            with suppress(ActorsLost):
                self.learner.stop()
