"""The pool of rollout workers, used as one. The supervisor replaces workers that fail."""

import itertools
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any

import ray
from ray.exceptions import RayError

from rlinf_vl.config.schema import Config
from rlinf_vl.data.dataset import FilterResult
from rlinf_vl.engines.base import MEMORY_TAGS
from rlinf_vl.rollout.episode.image_order import ImageOrder
from rlinf_vl.rollout.pool.supervisor import Supervisor
from rlinf_vl.rollout.pool.updates import SnapshotSource, WeightUpdate
from rlinf_vl.rollout.pool.worker import RolloutRank
from rlinf_vl.rollout.pool.worker_handle import WorkerHandle, answer
from rlinf_vl.rollout.pool.worker_placements import WorkerPlacements
from rlinf_vl.rollout.submission import Event, Submission, Task
from rlinf_vl.runtime.launch import Reservation
from rlinf_vl.runtime.ray_process import entry, gpu_ids
from rlinf_vl.types import GroupSummary
from rlinf_vl.weights.strategy import Strategy

log = logging.getLogger(__name__)

#: Rows per worker that are checked between two reports of progress.
FILTER_ROWS = 256
#: Seconds that a worker has to end its engine.
STOP_S = 60.0

RolloutWorker = ray.remote(RolloutRank)


@dataclass(frozen=True, slots=True)
class PendingUpdate:
    """A weight sync that has begun, and the calls of the workers that were live then."""

    update: WeightUpdate[WorkerHandle]
    calls: list[ray.ObjectRef] = field(default_factory=list)


class RolloutPool:
    """The rollout workers of a reservation."""

    def __init__(
        self,
        config: Config,
        model_path: str,
        reservation: Reservation,
        *,
        reproducible: bool = True,
        report: Callable[[str, str], None] = lambda kind, message: log.warning(message),
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            reproducible: whether the schedule makes the same groups again if the engines' batches
                are the same (`RolloutScheduler.is_reproducible`).
            report: called in another thread with a kind (worker_replaced, worker_joined,
                worker_left, node_lost) and a sentence whenever that happens.
            check: called at least once a second by threads that wait for groups; an error that it
                raises ends the rollout.
        """
        self._report = report
        self._check = check

        def make(number: int) -> WorkerHandle:
            # Looked up now: a worker that joined or moved has another placement than at the start.
            placement = self._placements[number]
            # The placement decides how many GPUs the engine has.
            rollout = replace(config.rollout, tensor_parallel_size=placement.slots)
            actor = RolloutWorker.options(**placement.options).remote(
                replace(config, rollout=rollout),
                model_path,
                reservation.device,
                number,
                placement.shared,
                # Looked up by tasks in their bundles; the worker is made when all have ended.
                *(gpu_ids.options(**options).remote() for options in placement.further_slots),
            )
            return WorkerHandle(actor, config.runner.heartbeat_timeout)

        self._placements = WorkerPlacements(
            reservation, shrinks=config.cluster.on_node_loss == "shrink", report=report
        )
        max_running = config.rollout.max_running_requests
        if config.rollout.rollout_backend == "torch" and reproducible:
            # Without the limit batches don't depend on how long anything takes (`Supervisor`).
            max_running = None
        self._supervisor = Supervisor[WorkerHandle](
            make,
            len(reservation.rollout),
            max_running=max_running,
            report=lambda message, kind="worker_replaced": report(kind, message),
            places=lambda numbers: self._placements.places(numbers, len(self._supervisor.slots)),
            newcomers=self._placements.newcomers,
        )
        self._order = ImageOrder()

    @property
    def workers(self) -> list[Any]:
        """The actors that share the work."""
        return [slot.worker.actor for slot in self._supervisor.slots]

    @property
    def restarts(self) -> int:
        """The number of replacements of workers so far."""
        return self._supervisor.replaced

    @property
    def turnover(self) -> int:
        """The number of times a worker was replaced, joined or left."""
        return self._supervisor.turnover

    def open_membership(self) -> None:
        """Allow workers to leave with their nodes, and to join if the reservation is elastic."""
        self._placements.may_change = True

    def entries(self) -> list[dict[str, object]]:
        """Return an entry on each worker for `StatusFile`."""
        slots = self._supervisor.slots
        return [
            entry(f"rollout {slot.number}", slot.worker.process, slot.restarts) for slot in slots
        ]

    def start(self) -> dict[str, int]:
        """Wait until every worker has its model and data.

        Returns:
            The number of rows of each split.

        Raises:
            RayActorError: a worker's constructor raised. This is the config's fault; a process that
                dies, which may be chance, is replaced.
        """
        self._supervisor.start()
        return self._call_all("while it starts", "ready")[0]

    def filter_rows(
        self, split: str, rows: Sequence[int], progress: Callable[[int], None] = lambda done: None
    ) -> FilterResult:
        """Check which of these rows can be used.

        Args:
            progress: called with the number of rows that were checked.
        """
        n, results = len(self.workers), []
        # In chunks, so that progress shows, and a worker that dies repeats little.
        for start in range(0, len(rows), FILTER_ROWS * n):
            chunk = list(rows[start : start + FILTER_ROWS * n])
            shares = [chunk[i::n] for i in range(n)]
            results += self._call_all(
                "while checking rows", "filter_rows", lambda i, shares=shares: (split, shares[i])
            )
            self._check()
            progress(start + len(chunk))
        row_images: dict[int, set[int]] = {}
        for _, images in results:
            row_images |= images
        self._order.add_rows(split, row_images)
        return FilterResult.merged([result for result, _ in results])

    def submit(self, tasks: Sequence[Task], events: SimpleQueue[Event] | None = None) -> Submission:
        """Begin to answer tasks; several submissions may be open. `events`: as in `Submission`.

        They are dispatched in the order of `ImageOrder`.
        """
        order = self._order.sorted(tasks)
        return self._supervisor.submit(tasks, order, self._check, events)

    def acknowledge(self, group_ids: Collection[str]) -> None:
        """Note that these groups were fetched: they are not sampled again if their worker dies."""
        self._supervisor.soon(self._supervisor.groups.acknowledge, group_ids)

    def cancel(self, group_ids: Collection[str]) -> None:
        """Stop sampling these groups. Then `results` of their submission must not be called."""
        self._supervisor.soon(self._supervisor.groups.cancel, group_ids)

    def replace_all(self, reason: str) -> None:
        """Replace every worker, because the calls that the old ones are running can't be ended."""
        self._report("worker_replaced", f"all rollout workers are replaced: {reason}")
        self._supervisor.replace_all()

    def release(self, summaries: Sequence[GroupSummary] | None = None) -> None:
        """Free the groups of these summaries (None: all) in the object store.

        Those that are being read are freed afterwards.
        """
        group_ids = None if summaries is None else [summary.id for summary in summaries]
        self._supervisor.soon(self._supervisor.groups.release, group_ids)

    def forget_weights(self) -> None:
        """Forget the weights of the last sync: until the next one, new workers keep their own."""
        self._supervisor.in_loop(self._supervisor.updates.forget)

    def replace_dead(self, occasion: str) -> None:
        """Replace live workers that are dead, or whose engine is, without waiting for the new ones.

        Args:
            occasion: ends the sentence "a rollout worker is replaced …".
        """
        self._supervisor.probe(occasion)

    def choose_receivers(self) -> WeightUpdate[WorkerHandle]:
        """Begin a sync whose strategy must know its receivers before weights are offered.

        `take_weights` continues it.
        """
        return self._supervisor.in_loop(self._supervisor.updates.open)

    def engine_slots(self, update: WeightUpdate[WorkerHandle]) -> list[int]:
        """Return the number of each receiver's engine processes that have weights."""
        return [self._placements[slot.number].slots for slot, _ in update.receivers]

    def take_weights(
        self,
        strategy: Strategy,
        offers: Sequence[ray.ObjectRef],
        version: int,
        snapshot_source: SnapshotSource,
        update: WeightUpdate[WorkerHandle] | None = None,
    ) -> PendingUpdate:
        """Make workers take the weights that the ranks offer or will offer; `settle` ends the sync.

        Args:
            offers: an `Offer` of each rank.
            snapshot_source: returns the same weights, or newer ones, for workers that start
                meanwhile or later.
            update: the sync whose receivers were chosen before; None: all live workers take part.
        """
        calls: list[ray.ObjectRef] = []

        def take(worker: WorkerHandle) -> Awaitable[Any]:
            calls.append(worker.actor.take_weights.remote(strategy, offers, version))
            return answer(calls[-1])

        offer = self._supervisor.updates.offer
        joinable = strategy.through_store
        update = self._supervisor.in_loop(offer, update, take, version, snapshot_source, joinable)
        return PendingUpdate(update, calls)

    def settle(self, sync: PendingUpdate) -> list[float | None]:
        """Wait until all receivers have the weights, which exist by now; end the sync.

        A worker that dies or hangs meanwhile is replaced, without waiting for its replacement.

        Returns:
            The seconds for which each engine was being written; None for a replaced worker.
        """
        return self._supervisor.run(self._supervisor.updates.settle(sync.update)).result()

    def release_tags(self) -> tuple[str, ...]:
        """Return the kinds of memory that engines release while a trainer needs their GPUs.

        See `rlinf_vl.engines.base.release_tags`.
        """
        # Engines on GPUs of different sizes may keep different things.
        tags_of_workers = ray.get([worker.release_tags.remote() for worker in self.workers])
        tags = set(itertools.chain.from_iterable(tags_of_workers))
        return tuple(tag for tag in MEMORY_TAGS if tag in tags)

    def release_memory(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Release device memory of every engine, as in `Engine`. Workers that fail are replaced."""
        self._call_all("while it releases memory", "release_memory", lambda i: (tags,))

    def restore_memory(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Restore the device memory of every engine. Workers that fail are replaced."""
        self._call_all("while it restores memory", "restore_memory", lambda i: (tags,))

    def stop(self) -> None:
        """End every engine and its processes."""
        slots, joining = self._supervisor.slots, self._supervisor.joining
        self._supervisor.stop()
        stop_calls = [slot.worker.actor.stop.remote() for slot in slots if slot.live]
        # Workers that are starting, or dead, don't answer a call.
        for slot in [*joining, *(slot for slot in slots if not slot.live)]:
            slot.worker.kill()
        for stop_call in stop_calls:
            with suppress(RayError):  # the worker has died meanwhile
                ray.get(stop_call, timeout=STOP_S)

    def close(self) -> None:
        """Stop replacing workers, which end with Ray.

        A replacement that was made once Ray has ended would start a cluster of its own.
        """
        self._supervisor.stop()

    def _call_all(
        self, occasion: str, method: str, arguments: Callable[[int], tuple] = lambda i: ()
    ) -> list[Any]:
        """Call a method of every worker, and return the results.

        A worker that fails is replaced, and its replacement is called.

        Args:
            occasion: ends the sentence "a rollout worker is replaced …".
            arguments: returns the arguments for the i-th worker.
        """
        numbers = [slot.number for slot in self._supervisor.slots]
        futures = [
            self._supervisor.call(number, occasion, method, *arguments(i))
            for i, number in enumerate(numbers)
        ]
        return [future.result() for future in futures]
