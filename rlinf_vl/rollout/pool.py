"""The pool of rollout workers, used as one. The supervisor replaces workers that fail."""

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayError, RayTaskError

from rlinf_vl.config.schema import Config
from rlinf_vl.data.dataset import FilterResult
from rlinf_vl.engines.base import MEMORY_TAGS, EngineDied
from rlinf_vl.rollout.batch_stream import BatchReport, StoredGroup
from rlinf_vl.rollout.slot import Place, WorkerDied
from rlinf_vl.rollout.submission import Event, Submission, Task
from rlinf_vl.rollout.supervisor import Supervisor
from rlinf_vl.rollout.updates import SnapshotSource, WeightUpdate
from rlinf_vl.rollout.worker import RolloutWorker
from rlinf_vl.runtime.launch import Reservation
from rlinf_vl.runtime.ray_process import ActorsLost, Heartbeat, cause_of, entry, kill
from rlinf_vl.runtime.seats import WAY_OUT, lost_seats
from rlinf_vl.transport.sender import Offer, Snapshot
from rlinf_vl.transport.strategies import STORED
from rlinf_vl.types import GroupSummary

log = logging.getLogger(__name__)

#: Rows per worker that are checked between two reports of progress.
FILTER_ROWS = 256
#: Seconds that a worker has to end its engine.
STOP_S = 60.0


class _RayWorker:
    """A rollout worker, a Ray actor, behind the supervisor's `Worker` protocol."""

    def __init__(self, actor: Any, heartbeat_timeout: float) -> None:
        self.actor = actor
        self.process: ray.ObjectRef = actor.process.remote()
        self._heart = Heartbeat(actor.heartbeat.remote, heartbeat_timeout)
        self._batch_numbers = itertools.count()
        #: The queues of the batches that somebody waits for, by number.
        self._batches: dict[int, asyncio.Queue[BatchReport | Exception]] = {}
        self._reader: asyncio.Task[None] | None = None

    async def call(self, method: str, *arguments: Any) -> Any:
        return await answer(getattr(self.actor, method).remote(*arguments))

    async def generate(self, tasks: Sequence[Task]) -> AsyncIterator[StoredGroup]:
        """Answer tasks as one batch; yield their groups as they finish.

        Leaving the loop early cancels the unanswered tasks, and frees groups that still arrive.
        """
        batch, reports = next(self._batch_numbers), asyncio.Queue[BatchReport | Exception]()
        unanswered = {task.group_id for task in tasks}
        self._batches[batch] = reports
        if self._reader is None or self._reader.done():
            self._reader = asyncio.ensure_future(self._read_reports())
        try:
            await answer(self.actor.enqueue_batch.remote(batch, tasks))
            while True:
                report = await reports.get()
                if isinstance(report, Exception):
                    raise report
                unanswered -= {summary.id for summary, _ in report.groups}
                for group in report.groups:
                    yield group
                if report.failed:
                    await answer(self.actor.raise_batch_error.remote(batch))
                if report.ended:
                    unanswered = set[str]()
                    return
        finally:
            del self._batches[batch]
            if unanswered:
                self.cancel(unanswered)
            while not reports.empty():
                self._release_report(reports.get_nowait())

    async def _read_reports(self) -> None:
        """Distribute the worker's reports to the queues of their batches, until an error ends that.

        The error goes to all queues.
        """
        try:
            while True:
                async for reference in self.actor.stream_reports.remote():
                    for report in await answer(reference):
                        if report.batch in self._batches:
                            self._batches[report.batch].put_nowait(report)
                        else:
                            self._release_report(report)
        except RayTaskError as raised:
            error: Exception = raised
        except RayError as raised:  # of the stream itself; `answer` converts those of a message
            error = WorkerDied(cause_of(raised))
        except Exception as raised:
            error = raised
        for reports in self._batches.values():
            reports.put_nowait(error)

    def _release_report(self, report: BatchReport | Exception) -> None:
        """Free the groups of a report that came after its batch was left."""
        if isinstance(report, BatchReport):
            stored = [summary.id for summary, reference in report.groups if reference is not None]
            if stored:
                self.release(stored)

    def cancel(self, group_ids: Collection[str]) -> None:
        self.actor.cancel.remote(list(group_ids))

    def release(self, group_ids: Sequence[str] | None) -> None:
        self.actor.release.remote(group_ids)

    def watch(self) -> None:
        self._heart.restart()

    def failure(self) -> str | None:
        return self._heart.failure() if ray.is_initialized() else None

    def kill(self) -> None:
        kill(self.actor, self.process)


@dataclass(frozen=True, slots=True)
class PendingSync:
    """A weight sync that has begun, and the calls of the workers that were live then."""

    update: WeightUpdate[_RayWorker]
    calls: list[ray.ObjectRef] = field(default_factory=list)


async def answer(reference: ray.ObjectRef) -> Any:
    """Wait for a call's result.

    Raises:
        WorkerDied: the worker, its engine, their node or the result is lost.
        ActorsLost: weights that the call refers to are lost.
    """
    try:
        return await reference
    except RayTaskError as error:
        if isinstance(error.cause, EngineDied):
            raise WorkerDied(str(error.cause)) from error
        if isinstance(error.cause, ObjectLostError):
            # Workers get nothing but weights through the object store.
            raise ActorsLost(
                f"weights are lost on their way to a rollout worker: {error.cause}"
            ) from error
        raise
    except RayError as error:
        raise WorkerDied(
            cause_of(error), in_constructor=getattr(error, "actor_init_failed", False)
        ) from error


class RolloutPool:
    """The rollout workers of a reservation."""

    def __init__(
        self,
        config: Config,
        model_path: str,
        reservation: Reservation,
        *,
        report: Callable[[str, str], None] = lambda kind, message: log.warning(message),
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            report: called in another thread with a kind (worker_replaced, worker_joined,
                worker_left, node_lost) and a sentence whenever that happens.
            check: called at least once a second by threads that wait for groups; an error that it
                raises ends the rollout.
        """
        self._report = report
        self._check = check

        def make(number: int) -> _RayWorker:
            seat = self._seats[number]
            # The seat decides how many GPUs the engine has.
            rollout = replace(config.rollout, tensor_parallel_size=seat.slots)
            actor = RolloutWorker.options(**seat.options).remote(
                replace(config, rollout=rollout),
                model_path,
                reservation.device,
                number,
                seat.shared,
            )
            return _RayWorker(actor, config.runner.heartbeat_timeout)

        self._seats = list(reservation.rollout)  # by the workers' numbers
        self._elastic = reservation.elastic
        self._shrinks = config.cluster.on_node_loss == "shrink"
        self._may_change = False  # whether workers may join and leave
        self._reported_waits: set[int] = set()  # workers whose wait for a node was reported
        runner, rollout = config.runner, config.rollout
        # With these schedules a run is reproducible if its batches are (`Supervisor`).
        whole_batches = runner.schedule == "sync" or (
            runner.schedule == "one_step_off" and runner.max_staleness == 1
        )
        max_running = rollout.max_running_requests
        if rollout.rollout_backend == "torch" and whole_batches:
            max_running = None
        self._supervisor = Supervisor[_RayWorker](
            make,
            len(reservation.rollout),
            max_running=max_running,
            report=lambda message, kind="worker_replaced": report(kind, message),
            max_row_faults=config.data.max_row_faults,
            places=self._places,
            newcomers=self._newcomers,
        )
        #: (split, row) → number of an image that other rows have, too; None if there is none.
        self._shared: dict[tuple[str, int], int | None] = {}

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
        self._may_change = True

    def _newcomers(self) -> Sequence[int]:
        """Return the numbers of new workers, for nodes that have joined."""
        if self._elastic is None or not self._may_change or not ray.is_initialized():
            return ()
        first = len(self._seats)
        with suppress(RayError):  # the cluster's head does not answer: the next call tries again
            self._seats += self._elastic.newcomers()
        return range(first, len(self._seats))

    def _places(self, numbers: Collection[int]) -> Mapping[int, Place]:
        """Return the places of these workers that no node has now.

        In an elastic reservation a place is gone with its node. Otherwise its worker waits for a
        node, which is reported once, or leaves if `cluster.on_node_loss` is shrink; the last worker
        always waits.
        """
        if not self._may_change or not ray.is_initialized():
            return {}
        try:
            if self._elastic is not None:
                return {
                    number: Place.GONE
                    for number in numbers
                    if self._elastic.lost(self._seats[number])
                }
            ordered = list(numbers)
            options = [self._seats[number].options for number in ordered]
            lost = [ordered[k] for k in lost_seats(options)]
        except RayError:  # the cluster's head does not answer: the next call tries again
            return {}
        if self._shrinks and len(self._supervisor.slots) > 1:
            return dict.fromkeys(lost, Place.GONE)
        for number in set(lost) - self._reported_waits:
            self._reported_waits.add(number)
            self._report("node_lost", f"rollout worker {number} waits for its node: {WAY_OUT}")
        return dict.fromkeys(lost, Place.AWAITED)

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
        n_rows = Counter(image for images in row_images.values() for image in images)
        for row, images in row_images.items():
            shared_images = [image for image in images if n_rows[image] > 1]
            self._shared[split, row] = min(shared_images, default=None)
        return FilterResult.merged([result for result, _ in results])

    def submit(self, tasks: Sequence[Task], events: SimpleQueue[Event] | None = None) -> Submission:
        """Begin to answer tasks; several submissions may be open. `events`: as in `Submission`.

        Tasks whose rows share an image are dispatched one after the other, so that mostly one
        worker stores the image.
        """
        by_image: dict[Any, list[Task]] = {}
        for task in tasks:
            # A row that was never checked counts as one that shares an image with no other row, but
            # perhaps it does: `own_images` stays False.
            image = self._shared.get((task.split, task.row), task.group_id)
            key = task.group_id if image is None else image
            by_image.setdefault(key, []).append(replace(task, own_images=image is None))
        order = list(itertools.chain.from_iterable(by_image.values()))
        return self._supervisor.submit(tasks, order, self._check, events)

    def acknowledge(self, group_ids: Collection[str]) -> None:
        """Note that these groups were fetched: they are not sampled again if their worker dies."""
        self._supervisor.acknowledge(group_ids)

    def cancel(self, group_ids: Collection[str]) -> None:
        """Stop sampling these groups. Then `results` of their submission must not be called."""
        self._supervisor.cancel(group_ids)

    def replace_all(self, reason: str) -> None:
        """Replace every worker, because the calls that the old ones are running can't be ended."""
        self._report("worker_replaced", f"all rollout workers are replaced: {reason}")
        self._supervisor.replace_all()

    def release(self, summaries: Sequence[GroupSummary] | None = None) -> None:
        """Free the groups of these summaries (None: all) in the object store.

        Those that are being read are freed afterwards.
        """
        self._supervisor.release(
            None if summaries is None else [summary.id for summary in summaries]
        )

    def forget_weights(self) -> None:
        """Forget the weights of the last sync: until the next one, new workers keep their own."""
        self._supervisor.forget_weights()

    def load_weights(self, buckets: Sequence[ray.ObjectRef], version: int) -> None:
        """Load weights from the object store into every live worker, and into later ones."""
        offers = [ray.put(Offer(list(buckets)))]
        self.settle(
            self.take_weights("object_store", offers, version, lambda: Snapshot(version, buckets))
        )

    def replace_dead(self, occasion: str) -> None:
        """Replace live workers that are dead, or whose engine is, without waiting for the new ones.

        Args:
            occasion: ends the sentence "a rollout worker is replaced …".
        """
        self._supervisor.probe(occasion)

    def choose_receivers(self) -> WeightUpdate[_RayWorker]:
        """Begin a sync whose strategy must know its receivers before weights are offered.

        `take_weights` continues it.
        """
        return self._supervisor.choose_receivers()

    def engine_slots(self, update: WeightUpdate[_RayWorker]) -> list[int]:
        """Return the number of each receiver's engine processes that have weights."""
        return [self._seats[slot.number].slots for slot, _ in update.receivers]

    def take_weights(
        self,
        strategy: str,
        offers: Sequence[ray.ObjectRef],
        version: int,
        snapshot_source: SnapshotSource,
        update: WeightUpdate[_RayWorker] | None = None,
    ) -> PendingSync:
        """Make workers take the weights that the ranks offer or will offer; `settle` ends the sync.

        Args:
            offers: an `Offer` of each rank.
            snapshot_source: returns the same weights, or newer ones, for workers that start
                meanwhile or later.
            update: the sync whose receivers were chosen before; None: all live workers take part.
        """
        calls: list[ray.ObjectRef] = []

        def take(worker: _RayWorker) -> Awaitable[Any]:
            calls.append(worker.actor.take_weights.remote(strategy, offers, version))
            return answer(calls[-1])

        joinable = strategy in STORED
        update = self._supervisor.begin_update(
            take, version, snapshot_source, joinable=joinable, update=update
        )
        return PendingSync(update, calls)

    def settle(self, sync: PendingSync) -> list[float | None]:
        """Wait until all receivers have the weights, which exist by now; end the sync.

        A worker that dies or hangs meanwhile is replaced, without waiting for its replacement.

        Returns:
            The seconds for which each engine was being written; None for a replaced worker.
        """
        return self._supervisor.settle(sync.update)

    def release_tags(self) -> tuple[str, ...]:
        """Return the kinds of memory that engines release while a trainer needs their GPUs.

        See `rlinf_vl.engines.base.release_tags`.
        """
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
