"""One weight sync: the actor ranks offer and deliver, every rollout worker takes (`rlinf_vl.transport.sender`)."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import ray
from ray.exceptions import RayActorError, RayTaskError

from rlinf_vl.actor.group import ActorGroup, ActorsLost
from rlinf_vl.engines.base import EngineDied
from rlinf_vl.rollout.pool import RolloutPool
from rlinf_vl.runtime.ray_process import HEARTBEAT_PERIOD_S, Heartbeat, cause_of, find_dead
from rlinf_vl.transport.broadcast import TIMEOUT, WeightGroup
from rlinf_vl.transport.buckets import BUCKET_BYTES, WeightsDiffer

log = logging.getLogger(__name__)

#: Seconds in which rank 0 and all engines must have joined a weight group: moments, where all of them live.
JOIN_TIMEOUT_S = 180.0


class WeightSync:
    """Calls are syncs. The first carries fingerprints: it fails unless engines get, and where they can say so hold, what
    the ranks sent."""

    def __init__(
        self,
        way: str,
        actors: ActorGroup,
        pool: RolloutPool,
        *,
        device: str,
        engine_ranks: int,
        heartbeat_timeout: float = 120.0,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """`way`: as from `rlinf_vl.transport.resolve_weight_sync`; `engine_ranks`: processes of one engine that hold weights;
        `heartbeat_timeout`: seconds after which a silent member is taken for hung. Actors and pool have started."""
        self.way, self.actors, self.pool = way, actors, pool
        self._backend, self._engine_ranks = "nccl" if device == "cuda" else "gloo", engine_ranks
        self._heartbeat_timeout = heartbeat_timeout
        self._checked, self._joined, self.busy = False, -1, False
        actors.set_weight_sync(way, bucket_bytes)
        log.info("weights are synced by %s", way)

    def __call__(self, version: int) -> None:
        """Have every engine take the actors' weights, as `version`. `busy` afterwards: it failed, and engines may wait for
        weights that will not come."""
        self.busy = True
        if self.way == "broadcast":
            self.pool.replace_dead()
            if self._joined != self.pool.restarts:
                self._join()
        labels = self.actors.offer_weights(check=not self._checked)
        taken = self.pool.take_weights(self.way, labels, version, spare=self.actors.spare_weights)
        delivered = self.actors.deliver_weights()
        if self.way == "broadcast":
            self._wait("a weight broadcast", taken + delivered, TIMEOUT.total_seconds())
        else:
            self.actors.wait(delivered)
            self.pool.settle(taken)
        self.actors.release_weights()
        self._checked, self.busy = True, False

    def _join(self) -> None:
        """A new group of rank 0 and every engine: at first, and when a worker was replaced since."""
        sender, workers = self.actors.ranks[0], self.pool.workers
        ((host, port),) = self.actors.wait([sender.address.remote()])
        size = 1 + len(workers) * self._engine_ranks
        group = WeightGroup(host, port, f"weights-{self.pool.restarts}", self._backend, size, rank=0)
        joined = [
            worker.join_weight_group.remote(replace(group, rank=1 + i * self._engine_ranks))
            for i, worker in enumerate(workers)
        ]
        self._wait("joining the weight group", [sender.call.remote("sender.join", group), *joined], JOIN_TIMEOUT_S)
        self._joined = self.pool.restarts

    def _wait(self, what: str, pending: Sequence[ray.ObjectRef], seconds: float) -> None:
        """Wait for calls of members that wait for each other, in any order: one that dies or hangs ends it for everybody.

        Raises:
            ActorsLost: a member died or hangs, or it takes longer than `seconds`. Engines may be left waiting: see `busy`.
            Exception: what a call raised, if all members live.
        """
        members = [*self.actors.ranks, *self.pool.workers]
        hearts = [Heartbeat(member.process.remote, self._heartbeat_timeout) for member in members]
        pending, deadline = list(pending), time.monotonic() + seconds
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=HEARTBEAT_PERIOD_S / 5)
            try:
                ray.get(done)
            except RayActorError as error:
                raise ActorsLost(f"a member died in {what}: {cause_of(error)}") from error
            except RayTaskError as error:  # perhaps only because another member died
                if isinstance(error.cause, EngineDied):
                    raise ActorsLost(f"an engine died in {what}: {error.cause}") from error
                if not isinstance(error.cause, WeightsDiffer) and (dead := find_dead(members)) is not None:
                    raise ActorsLost(f"a member died in {what}: {cause_of(dead)}") from error
                raise
            reason = next((reason for heart in hearts if (reason := heart.failure())), None)
            if reason is None and pending and time.monotonic() > deadline:
                reason = f"not done within {seconds:.0f} s"
            if reason is not None:
                raise ActorsLost(f"a member hangs in {what}: {reason}")
