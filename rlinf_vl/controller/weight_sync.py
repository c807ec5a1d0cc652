"""Weight syncs: the actor ranks offer and deliver, every rollout worker receives
(`rlinf_vl.weights.sender`).

All calls of a sync are queued at once: a worker waits for the ranks' offers itself, no answer
passes through the controller.
"""

import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayTaskError

from rlinf_vl.actor.group import ActorGroup
from rlinf_vl.engines.base import EngineDied
from rlinf_vl.rollout.pool.pool import PendingUpdate, RolloutPool
from rlinf_vl.rollout.pool.updates import WeightUpdate
from rlinf_vl.runtime.ray_process import ActorsLost, wait_for_all
from rlinf_vl.weights.buckets import BUCKET_BYTES, WeightsDiffer
from rlinf_vl.weights.process_group import TIMEOUT, WeightGroup
from rlinf_vl.weights.sender import Offer, Snapshot
from rlinf_vl.weights.strategy import Strategy

log = logging.getLogger(__name__)

#: Seconds in which rank 0 and all engines must have joined a weight group: moments, if all are
#: alive.
JOIN_TIMEOUT_S = 180.0
#: Seconds after which ranks whose parts of a snapshot were of several versions are asked again.
SNAPSHOT_RETRY_S = 0.1


class QueuedSync(NamedTuple):
    """A sync whose first calls are queued: the ranks' offers, and the workers that receive them."""

    version: int
    offers: list[ray.ObjectRef]
    pending: PendingUpdate


class WeightSync:
    """The sync of the actors' weights to every engine; call it with a version.

    The first call carries fingerprints: it fails unless the engines receive, and where they can
    tell have, the weights that the ranks sent.

    `begin` queues a sync behind the calls that the ranks are working on, so that engines get
    weights as soon as they are trained, whatever the controller is busy with.

    Attributes:
        busy: a sync is running. A call that fails leaves it True: engines may be waiting for
            weights that will not come.
    """

    def __init__(
        self,
        strategy: Strategy,
        actors: ActorGroup,
        pool: RolloutPool,
        *,
        device: str,
        bucket_bytes: int = BUCKET_BYTES,
        sends_frozen: bool = False,
    ) -> None:
        """Actors and pool have started.

        Args:
            strategy: a result of `choose_strategy`.
            bucket_bytes: size of the parts in which weights are sent.
            sends_frozen: whether weights that are not trained are sent, too.
        """
        self.busy = False
        self.strategy = strategy
        self._actors = actors
        self._pool = pool
        self._device = device
        self._checked = False  # whether engines have compared fingerprints
        self._queued: QueuedSync | None = None  # by `begin`, for the call that follows
        self._members: list[Any] | None = (
            None  # the workers in the process group; None: there is none yet
        )
        actors.call("set_weight_sync", strategy, bucket_bytes, sends_frozen)
        log.info("weights are synced by %s", strategy.name)

    def begin(self, version: int) -> None:
        """Queue this version's sync, which a call completes. Strategies without the object store do
        nothing here."""
        # Through the object store a worker's wait for the offer of a rank that dies fails, and so
        # ends.
        if self.strategy.through_store:
            self._queued = self._queue_offer(version)

    def __call__(self, version: int) -> dict[str, float]:
        """Send the weights as this version, and wait for the workers that are live when it begins,
        for no others. Returns the metrics `sync/…`."""
        self.busy = True
        receivers = self._join_live_workers() if self.strategy.joins_group else None
        queued = self._queued or self._queue_offer(version, receivers)
        assert queued.version == version, f"version {queued.version} is on its way, not {version}"
        self._queued = None
        deliveries = self._queue("sender.deliver", self._readers(queued.pending))
        if receivers is not None:
            # In a collective all wait for all: watch ranks and workers together.
            calls = queued.offers + queued.pending.calls + deliveries
            self._wait("a weight broadcast", calls, TIMEOUT.total_seconds(), receivers)
        else:
            # Wait for the ranks first: a worker that waits for a dead rank is not to blame.
            self._actors.wait(queued.offers + deliveries)
        # None is a worker that was replaced meanwhile.
        seconds = [s for s in self._pool.settle(queued.pending) if s is not None]
        # Ranks work in order: the next call of a rank comes after the release.
        self._queue("sender.release")
        self._checked |= bool(seconds)
        self.busy = False
        return Offer.metrics(ray.get(queued.offers), seconds)

    def _queue_offer(self, version: int, receivers: WeightUpdate | None = None) -> QueuedSync:
        offers = self._queue("sender.offer", version, not self._checked)
        pending = self._pool.take_weights(self.strategy, offers, version, self._snapshot, receivers)
        return QueuedSync(version, offers, pending)

    def _readers(self, pending: PendingUpdate) -> list[ray.ObjectRef]:
        """Ask the receivers of a sync where they read, if its ranks wait for them."""
        if not self.strategy.waits_for_readers(self._device):
            return []
        return [worker.actor.reads_at.remote() for _, worker in pending.update.receivers]

    def _queue(self, method: str, *arguments: Any) -> list[ray.ObjectRef]:
        return [rank.call.remote(method, *arguments) for rank in self._actors.ranks]

    def _snapshot(self) -> Snapshot | None:
        """Return the weights sent last, as buckets in the object store; None before the first sync.

        It is called in threads of the supervisor, so the next offer may come between the calls of
        two ranks: then their parts are of different versions.
        """
        while True:
            parts: list[Snapshot | None] = self._actors.call("sender.snapshot")
            snapshot = Snapshot.merged(parts)
            if snapshot is not None or None in parts:
                return snapshot
            time.sleep(SNAPSHOT_RETRY_S)

    def _join_live_workers(self) -> WeightUpdate:
        """Choose the workers that are live now as receivers, and join them and rank 0 in a process
        group.

        A new group is made whenever the workers are not those of the last sync. Workers that become
        live later receive the snapshot, through the object store, and are in the next group.
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
        # The first rank in the group of each engine, and last the size of the group; 0 is the
        # sender.
        first_ranks = list(accumulate(slots, initial=1))
        name = f"weights-{uuid.uuid4().hex[:8]}"
        backend = "nccl" if self._device == "cuda" else "gloo"
        group = WeightGroup(host, port, name, backend, first_ranks.pop(), rank=0)
        joins = [sender.call.remote("sender.join", group)]
        for first_rank, (_, worker) in zip(first_ranks, update.receivers, strict=True):
            joins.append(worker.actor.join_weight_group.remote(replace(group, rank=first_rank)))
        self._wait("joining the weight group", joins, JOIN_TIMEOUT_S, update)

    def _wait(
        self, action: str, calls: Sequence[ray.ObjectRef], timeout_s: float, update: WeightUpdate
    ) -> None:
        """Wait for calls of ranks and receivers, which wait for each other (`wait_for_all`);
        `action` names them in messages."""
        ranks = {f"actor rank {i}": rank for i, rank in enumerate(self._actors.ranks)}
        workers = {
            f"rollout worker {slot.number}": worker.actor for slot, worker in update.receivers
        }
        try:
            wait_for_all(
                calls,
                ranks | workers,
                heartbeat_timeout=self._actors.heartbeat_timeout,
                timeout=timeout_s,
                own_faults=(EngineDied, WeightsDiffer),
            )
        except ActorsLost as error:
            raise ActorsLost(f"{action}: {error}") from error
        except RayTaskError as error:
            # Whichever side died, the collective has failed on the ranks, too: start them again.
            if isinstance(error.cause, EngineDied):
                raise ActorsLost(f"{action}: an engine died: {error.cause}") from error
            raise
