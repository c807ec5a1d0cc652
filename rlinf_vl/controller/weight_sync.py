"""One weight sync: the actor ranks offer and deliver, every rollout worker takes (`rlinf_vl.weights.strategy`)."""

import logging
from collections.abc import Sequence
from dataclasses import replace

import ray
from ray.exceptions import RayActorError

from rlinf_vl.actor.group import ActorGroup, ActorsLost
from rlinf_vl.ray_process import cause_of
from rlinf_vl.rollout.pool import RolloutPool
from rlinf_vl.weights.buckets import BUCKET_BYTES
from rlinf_vl.weights.collective import WeightGroup

log = logging.getLogger(__name__)


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
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """`way`: as from `rlinf_vl.weights.choose`; `engine_ranks`: processes of one engine that hold weights. Actors and
        pool have started."""
        self.way, self.actors, self.pool = way, actors, pool
        self._backend, self._engine_ranks = "nccl" if device == "cuda" else "gloo", engine_ranks
        self._checked, self._joined, self.busy = False, -1, False
        actors.set_weight_sync(way, bucket_bytes)
        log.info("weights are synced by %s", way)

    def __call__(self, version: int) -> None:
        """Have every engine take the actors' weights, as `version`. `busy` afterwards: it failed, and engines may wait for
        weights that will not come."""
        self.busy = True
        if self.way == "nccl" and self._joined != self.pool.restarts:
            self._join()
        labels = self.actors.offer_weights(check=not self._checked)
        taken = self.pool.take_weights(self.way, labels, version, spare=self.actors.spare_weights)
        delivered = self.actors.deliver_weights()
        if self.way == "nccl":  # a broadcast needs all of its members: one that dies ends it for everybody
            try:
                _wait(taken + delivered)
            except RayActorError as error:
                raise ActorsLost(f"a member of the weight broadcast died: {cause_of(error)}") from error
        else:
            self.actors.wait(delivered)
            self.pool.settle(taken)
        self.actors.release_weights()
        self._checked, self.busy = True, False

    def _join(self) -> None:
        """A new group of rank 0 and every engine: at first, and when a worker was replaced since."""
        sender, workers = self.actors.ranks[0], self.pool.workers
        host, port = ray.get(sender.address.remote())
        size = 1 + len(workers) * self._engine_ranks
        group = WeightGroup(host, port, f"weights-{self.pool.restarts}", self._backend, size, rank=0)
        _wait(
            [sender.join_weight_group.remote(group)]
            + [
                worker.join_weight_group.remote(replace(group, rank=1 + i * self._engine_ranks))
                for i, worker in enumerate(workers)
            ]
        )
        self._joined = self.pool.restarts


def _wait(pending: Sequence[ray.ObjectRef]) -> None:
    """All of them, in any order: an error is raised at once, not behind others that wait for the one who failed."""
    pending = list(pending)
    while pending:
        (done,), pending = ray.wait(pending, num_returns=1)
        ray.get(done)
