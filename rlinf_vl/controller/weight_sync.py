"""Weight syncs: the actor ranks offer and deliver, every rollout worker takes (`rlinf_vl.transport.sender`).

All calls of a sync are queued at once: a worker waits for the ranks' offers itself, no answer passes through the controller.
"""

import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import ray
from ray.exceptions import RayTaskError

from rlinf_vl.actor.group import ActorGroup
from rlinf_vl.engines.base import EngineDied
from rlinf_vl.rollout.pool import PendingSync, RolloutPool
from rlinf_vl.rollout.updates import WeightUpdate
from rlinf_vl.runtime.ray_process import ActorsLost, wait_for_all
from rlinf_vl.transport.broadcast import TIMEOUT, WeightGroup
from rlinf_vl.transport.buckets import BUCKET_BYTES, WeightsDiffer
from rlinf_vl.transport.sender import Offer, Snapshot
from rlinf_vl.transport.strategies import STORED

log = logging.getLogger(__name__)

#: Seconds in which rank 0 and all engines must have joined a weight group: moments, where all of them live.
JOIN_TIMEOUT_S = 180.0
#: Seconds after which ranks whose parts of a snapshot were of several versions are asked again.
SNAPSHOT_RETRY_S = 0.1


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
        self._begun: tuple[int, list[ray.ObjectRef], PendingSync] | None = None  # version, offers, who takes them
        self._members: list[Any] | None = None  # the workers in the process group; None: it was not made yet
        actors.call("set_weight_sync", strategy, bucket_bytes)
        log.info("weights are synced by %s", strategy)

    def begin(self, version: int) -> None:
        """Queue this version's sync, which a call ends. Through the object store only: if a rank dies before it has offered, a
        worker's wait for the offer fails, and ends."""
        if self.strategy in STORED:
            self._begun = self._offer(version)

    def __call__(self, version: int) -> dict[str, float]:
        """Returns its metrics, `sync/…`. Waits for the workers that are live when it begins, and for no other."""
        self.busy = True
        receivers = self._join_live_workers() if self.strategy == "broadcast" else None
        begun, offered, sync = self._begun or self._offer(version, receivers)
        assert begun == version, f"version {begun} is on its way, not {version}"
        self._begun = None
        delivered = self._queue("sender.deliver", self._readers(sync))
        if receivers is not None:
            pending = offered + sync.calls + delivered
            self._wait("a weight broadcast", pending, TIMEOUT.total_seconds(), receivers)
        else:
            self._actors.wait(offered + delivered)  # first: a worker that waits for a dead rank is not to blame
        seconds = [s for s in self._pool.settle(sync) if s is not None]
        self._queue("sender.release")  # ranks answer in order: whatever they are asked next comes behind it
        self._checked |= bool(seconds)
        self.busy = False
        return Offer.metrics(ray.get(offered), seconds)

    def _offer(
        self, version: int, receivers: WeightUpdate | None = None
    ) -> tuple[int, list[ray.ObjectRef], PendingSync]:
        offered = self._queue("sender.offer", version, not self._checked)
        sync = self._pool.take_weights(self.strategy, offered, version, self._snapshot, receivers)
        return version, offered, sync

    def _readers(self, sync: PendingSync) -> list[ray.ObjectRef]:
        """Ask the receivers of a sync where they read, if its ranks wait for them: on GPUs that both share."""
        if self.strategy != "shared_memory" or self._backend != "nccl":
            return []
        return [worker.actor.reads_at.remote() for _, worker in sync.update.receivers]

    def _queue(self, method: str, *arguments: Any) -> list[ray.ObjectRef]:
        return [rank.call.remote(method, *arguments) for rank in self._actors.ranks]

    def _snapshot(self) -> Snapshot | None:
        """Return the weights sent last, as buckets in the object store; None before the first sync.

        Called in threads of the supervisor's, so the next offer may come between the calls of two ranks.
        """
        while True:
            parts: list[Snapshot | None] = self._actors.call("sender.snapshot")
            snapshot = Snapshot.merged(parts)
            if snapshot is not None or None in parts:
                return snapshot
            time.sleep(SNAPSHOT_RETRY_S)

    def _join_live_workers(self) -> WeightUpdate:
        """Begin a sync with the workers that are live now, and see that they and rank 0 are one process group.

        The group is made anew whenever these are others than the last time. Workers that become live later take the snapshot,
        through the object store, and are in the next group.
        """
        self._pool.replace_dead("before a weight sync")
        update = self._pool.choose_receivers()
        members = [worker for _, worker in update.receivers]
        if members != self._members:
            self._join(update)
            self._members = members
        return update

    def _join(self, update: WeightUpdate) -> None:
        """Make a new process group of rank 0 and the engines of these workers."""
        sender, slots = self._actors.ranks[0], self._pool.engine_slots(update)
        ((host, port),) = self._actors.wait([sender.call.remote("sender.listen")])
        first_ranks = list(accumulate(slots, initial=1))  # of each engine, and last how many there are
        name = f"weights-{uuid.uuid4().hex[:8]}"
        group = WeightGroup(host, port, name, self._backend, first_ranks.pop(), rank=0)
        joined = [sender.call.remote("sender.join", group)]
        for first_rank, (_, worker) in zip(first_ranks, update.receivers, strict=True):
            joined.append(worker.actor.join_weight_group.remote(replace(group, rank=first_rank)))
        self._wait("joining the weight group", joined, JOIN_TIMEOUT_S, update)

    def _wait(self, what: str, pending: Sequence[ray.ObjectRef], seconds: float, update: WeightUpdate) -> None:
        """Wait for calls of ranks and receivers, which wait for each other: `wait_for_all`."""
        ranks = {f"actor rank {i}": rank for i, rank in enumerate(self._actors.ranks)}
        workers = {f"rollout worker {slot.number}": worker.actor for slot, worker in update.receivers}
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
