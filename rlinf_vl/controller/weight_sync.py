"""Weight syncs: the actor ranks offer and deliver, every rollout worker takes (`rlinf_vl.transport.sender`).

All calls of a sync are queued at once: a worker waits for the ranks' offers itself, no answer passes through the controller.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import ray
from ray.exceptions import RayTaskError

from rlinf_vl.actor.group import ActorGroup
from rlinf_vl.engines.base import EngineDied
from rlinf_vl.rollout.pool import RolloutPool, Taken
from rlinf_vl.runtime.ray_process import ActorsLost, wait_for_all
from rlinf_vl.transport.broadcast import TIMEOUT, WeightGroup
from rlinf_vl.transport.buckets import BUCKET_BYTES, WeightsDiffer
from rlinf_vl.transport.sender import Offer
from rlinf_vl.transport.strategies import STORED

log = logging.getLogger(__name__)

#: Seconds in which rank 0 and all engines must have joined a weight group: moments, where all of them live.
JOIN_TIMEOUT_S = 180.0


class WeightSync:
    """Call it to send the actors' weights to every engine, as this version. The first call carries fingerprints: it fails unless
    the engines receive, and where they can tell have, what the ranks sent.

    `begin` queues a sync behind what the ranks are doing, so that engines get weights as soon as they are trained, whatever the
    controller is busy with. A call that fails leaves `busy` set: engines may be waiting for weights that will not come.
    """

    def __init__(
        self,
        strategy: str,
        actors: ActorGroup,
        pool: RolloutPool,
        *,
        device: str,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """`strategy` is what `resolve_weight_sync` returns; actors and pool have started. `bucket_bytes` are sent at once."""
        self.busy = False
        self.strategy = strategy
        self._actors = actors
        self._pool = pool
        self._backend = "nccl" if device == "cuda" else "gloo"
        self._checked = False
        self._begun: tuple[int, list[ray.ObjectRef], list[Taken]] | None = None  # version, offers, who takes them
        self._joined = -1  # the pool's turnover when the process group was made
        actors.call("set_weight_sync", strategy, bucket_bytes)
        log.info("weights are synced by %s", strategy)

    def begin(self, version: int) -> None:
        """Queue this version's sync, which a call ends. Through the object store only: if a rank dies before it has offered, a
        worker's wait for the offer fails, and ends."""
        if self.strategy in STORED:
            self._begun = version, *self._offer(version)

    def __call__(self, version: int) -> dict[str, float]:
        """Returns its metrics, `sync/…`."""
        with self._pool.same_workers():
            return self._sync(version)

    def _sync(self, version: int) -> dict[str, float]:
        self.busy = True
        if self.strategy == "broadcast":
            self._pool.replace_dead()
            if self._joined != self._pool.turnover:
                self._join()
        begun, offered, taken = self._begun or (version, *self._offer(version))
        assert begun == version, f"version {begun} is on its way, not {version}"
        self._begun = None
        delivered = self._queue("sender.deliver")
        if self.strategy == "broadcast":
            references = [reference for *_, reference in taken]
            self._wait("a weight broadcast", offered + references + delivered, TIMEOUT.total_seconds())
            seconds = ray.get(references)
        else:
            self._actors.wait(offered + delivered)  # first: a worker that waits for a dead rank is not to blame
            seconds = self._pool.settle(taken)
        self._queue("sender.release")  # ranks answer in order: whatever they are asked next comes behind it
        self._checked = True
        self.busy = False
        return Offer.metrics(ray.get(offered), [s for s in seconds if s is not None])

    def _offer(self, version: int) -> tuple[list[ray.ObjectRef], list[Taken]]:
        offered = self._queue("sender.offer", version, not self._checked)
        return offered, self._pool.take_weights(self.strategy, offered, version, spare=self._spare)

    def _queue(self, method: str, *arguments: Any) -> list[ray.ObjectRef]:
        return [rank.call.remote(method, *arguments) for rank in self._actors.ranks]

    def _spare(self) -> list[ray.ObjectRef]:
        """The weights sent last, as buckets in the object store."""
        return sum(self._actors.call("sender.spare"), [])

    def _join(self) -> None:
        """Make a new process group of rank 0 and every engine: at first, and after a worker was replaced."""
        sender, workers = self._actors.ranks[0], self._pool.workers
        ((host, port),) = self._actors.wait([sender.call.remote("sender.listen")])
        firsts = list(
            accumulate(self._pool.engine_slots, initial=1)
        )  # the first rank of each engine, and how many there are
        group = WeightGroup(host, port, f"weights-{self._pool.turnover}", self._backend, firsts.pop(), rank=0)
        joined = [sender.call.remote("sender.join", group)]
        for first, worker in zip(firsts, workers, strict=True):
            joined.append(worker.join_weight_group.remote(replace(group, rank=first)))
        self._wait("joining the weight group", joined, JOIN_TIMEOUT_S)
        self._joined = self._pool.turnover

    def _wait(self, what: str, pending: Sequence[ray.ObjectRef], seconds: float) -> None:
        """Wait for calls of ranks and workers, which wait for each other: `wait_for_all`."""
        ranks = {f"actor rank {i}": rank for i, rank in enumerate(self._actors.ranks)}
        workers = {f"rollout worker {i}": worker for i, worker in enumerate(self._pool.workers)}
        try:
            wait_for_all(
                pending,
                ranks | workers,
                heartbeat_timeout=self._actors.heartbeat_timeout,
                timeout=seconds,
                own_faults=(EngineDied, WeightsDiffer),
            )
        except ActorsLost as error:
            raise ActorsLost(f"{what}: {error}") from error
        except RayTaskError as error:
            if isinstance(error.cause, EngineDied):
                raise ActorsLost(f"{what}: an engine died: {error.cause}") from error
            raise
