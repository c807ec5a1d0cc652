"""All rollout workers as one. Those that fail are replaced (`rlinf_vl.rollout.supervisor`)."""

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
from rlinf_vl.rollout.slot import Place, WorkerDied
from rlinf_vl.rollout.submission import Event, Submission, Task
from rlinf_vl.rollout.supervisor import Supervisor
from rlinf_vl.rollout.updates import SnapshotSource, WeightUpdate
from rlinf_vl.rollout.worker import BatchReport, RolloutWorker, StoredGroup
from rlinf_vl.runtime.launch import Reservation
from rlinf_vl.runtime.ray_process import ActorsLost, Heartbeat, cause_of, entry, kill
from rlinf_vl.runtime.seats import WAY_OUT, lost_seats
from rlinf_vl.transport.sender import Offer, Snapshot
from rlinf_vl.transport.strategies import STORED
from rlinf_vl.types import GroupSummary

log = logging.getLogger(__name__)

#: Rows that a worker checks between two reports of progress.
FILTER_ROWS = 256
#: Seconds that a worker has to end its engine.
STOP_S = 60.0


class _RayWorker:
    """A rollout worker as the supervisor sees it."""

    def __init__(self, actor: Any, heartbeat_timeout: float) -> None:
        self.actor = actor
        self.process: ray.ObjectRef = actor.process.remote()
        self._heart = Heartbeat(actor.heartbeat.remote, heartbeat_timeout)
        self._batch_numbers = itertools.count()
        self._batches: dict[int, asyncio.Queue[BatchReport | Exception]] = {}  # that somebody waits for
        self._reader: asyncio.Task[None] | None = None

    async def call(self, method: str, *arguments: Any) -> Any:
        return await answer(getattr(self.actor, method).remote(*arguments))

    async def generate(self, tasks: Sequence[Task]) -> AsyncIterator[StoredGroup]:
        """As `Worker.generate`. Whoever leaves it ends the work, and frees what arrives too late."""
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
        """Pass what the worker reports to whoever waits for its batches."""
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
        except RayError as raised:  # of the stream, not of one message
            error = WorkerDied(cause_of(raised))
        except Exception as raised:
            error = raised
        for reports in self._batches.values():
            reports.put_nowait(error)

    def _release_report(self, report: BatchReport | Exception) -> None:
        """Free groups that nobody waits for any more."""
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
    """What a call returned. Raises WorkerDied if its worker, the engine, their node or the answer is lost."""
    try:
        return await reference
    except RayTaskError as error:
        if isinstance(error.cause, EngineDied):
            raise WorkerDied(str(error.cause)) from error
        if isinstance(error.cause, ObjectLostError):  # the weights: nothing else is sent to a worker as an object
            raise ActorsLost(f"weights are lost on their way to a rollout worker: {error.cause}") from error
        raise
    except RayError as error:
        raise WorkerDied(cause_of(error), in_constructor=getattr(error, "actor_init_failed", False)) from error


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
            report: called with a kind (worker_replaced, worker_joined, worker_left) and a sentence, in another thread, whenever
                that happens.
            check: called at least once a second by whoever waits for groups; what it raises ends the rollout.
        """
        self._report = report
        self._check = check

        def make(number: int) -> _RayWorker:
            seat = self._seats[number]
            own = replace(config, rollout=replace(config.rollout, tensor_parallel_size=seat.slots))
            actor = RolloutWorker.options(**seat.options).remote(
                own, model_path, reservation.device, number, seat.shared
            )
            return _RayWorker(actor, config.runner.heartbeat_timeout)

        self._seats = list(reservation.rollout)  # by the workers' numbers
        self._elastic = reservation.elastic
        self._shrinks = config.cluster.on_node_loss == "shrink"
        self._may_change = False  # workers may join and leave
        self._reported_waits: set[int] = set()  # workers of whose wait for a node was reported
        runner, rollout = config.runner, config.rollout
        whole = runner.schedule == "sync" or (runner.schedule == "one_step_off" and runner.max_staleness == 1)
        max_running = None if rollout.rollout_backend == "torch" and whole else rollout.max_running_requests
        self._supervisor = Supervisor[_RayWorker](
            make,
            len(reservation.rollout),
            max_running=max_running,
            report=lambda message, kind="worker_replaced": report(kind, message),
            max_row_faults=config.data.max_row_faults,
            places=self._places,
            newcomers=self._newcomers,
        )
        #: (split, row) → number of an image that other rows have too; None where no other has
        self._shared: dict[tuple[str, int], int | None] = {}

    @property
    def workers(self) -> list[Any]:
        return [slot.worker.actor for slot in self._supervisor.slots]

    @property
    def restarts(self) -> int:
        """Workers that were replaced so far."""
        return self._supervisor.replaced

    @property
    def turnover(self) -> int:
        """How often a worker was replaced, joined or left."""
        return self._supervisor.turnover

    def open_membership(self) -> None:
        """From now on workers may leave with their nodes, and join if the reservation is elastic."""
        self._may_change = True

    def _newcomers(self) -> Sequence[int]:
        """Numbers of workers for the nodes that have joined."""
        if self._elastic is None or not self._may_change or not ray.is_initialized():
            return ()
        first = len(self._seats)
        with suppress(RayError):  # the cluster's head does not answer: later
            self._seats += self._elastic.newcomers()
        return range(first, len(self._seats))

    def _places(self, numbers: Collection[int]) -> Mapping[int, Place]:
        """Return the places of these workers that no node has now.

        An elastic worker's is gone with its node. Others wait for a node, which is reported once, or are gone where
        `cluster.on_node_loss` says so; the last worker always waits.
        """
        if not self._may_change or not ray.is_initialized():
            return {}
        try:
            if self._elastic is not None:
                return {number: Place.GONE for number in numbers if self._elastic.lost(self._seats[number])}
            ordered = list(numbers)
            lost = [ordered[k] for k in lost_seats([self._seats[number].options for number in ordered])]
        except RayError:  # the cluster's head does not answer: later
            return {}
        if self._shrinks and len(self._supervisor.slots) > 1:
            return dict.fromkeys(lost, Place.GONE)
        for number in set(lost) - self._reported_waits:
            self._reported_waits.add(number)
            self._report("node_lost", f"rollout worker {number} waits for its node: {WAY_OUT}")
        return dict.fromkeys(lost, Place.AWAITED)

    def entries(self) -> list[dict[str, object]]:
        """A line on each worker, for `StatusFile`."""
        slots = self._supervisor.slots
        return [entry(f"rollout {slot.number}", slot.worker.process, slot.restarts) for slot in slots]

    def start(self) -> dict[str, int]:
        """Wait until every worker has its model and data; the number of rows of each split. RayActorError is what a worker's
        constructor raised: the config's fault, and not chance as is a process that dies."""
        self._supervisor.start()
        return self._call_all("while it starts", "ready")[0]

    def filter_rows(
        self, split: str, rows: Sequence[int], progress: Callable[[int], None] = lambda done: None
    ) -> FilterResult:
        """Which of these rows can be used. `progress` is told how many rows were checked."""
        n, results = len(self.workers), []
        for start in range(0, len(rows), FILTER_ROWS * n):
            part = list(rows[start : start + FILTER_ROWS * n])
            shares = [part[i::n] for i in range(n)]
            results += self._call_all("while checking rows", "filter_rows", lambda i, shares=shares: (split, shares[i]))
            self._check()
            progress(start + len(part))
        images = {row: image for _, part in results for row, image in part.items()}
        often = Counter(image for shown in images.values() for image in shown)
        self._shared |= {
            (split, row): next((image for image in sorted(shown) if often[image] > 1), None)
            for row, shown in images.items()
        }
        return FilterResult.merged([result for result, _ in results])

    def submit(self, tasks: Sequence[Task], events: SimpleQueue[Event] | None = None) -> Submission:
        """Have all tasks answered. Several submissions may be in flight. `events`: of `Submission`."""
        shown = [self._shared.get((task.split, task.row), task.group_id) for task in tasks]
        turn: dict[Any, int] = {}  # rows that share an image follow each other, so that mostly one worker stores it
        order = [
            turn.setdefault(task.group_id if s is None else s, len(turn)) for task, s in zip(tasks, shown, strict=True)
        ]
        sent = [replace(task, own_images=s is None) for task, s in zip(tasks, shown, strict=True)]
        in_turn = [sent[k] for k in sorted(range(len(tasks)), key=order.__getitem__)]
        return self._supervisor.submit(tasks, in_turn, self._check, events)

    def acknowledge(self, group_ids: Collection[str]) -> None:
        """Note that these groups are where they are needed: if their worker dies now, they are not sampled again."""
        self._supervisor.acknowledge(group_ids)

    def cancel(self, group_ids: Collection[str]) -> None:
        """Stop sampling these groups, which nobody wants any more. Nobody may wait for the results of their submission."""
        self._supervisor.cancel(group_ids)

    def replace_all(self, reason: str) -> None:
        """Replace every worker: what the old ones are in the middle of can't be ended otherwise."""
        self._report("worker_replaced", f"all rollout workers are replaced: {reason}")
        self._supervisor.replace_all()

    def release(self, summaries: Sequence[GroupSummary] | None = None) -> None:
        """Free the groups of these summaries (None: all) in the object store once nobody reads them any more."""
        self._supervisor.release(None if summaries is None else [summary.id for summary in summaries])

    def forget_weights(self) -> None:
        """Forget the weights of the last sync: until the next one, replacements have the weights of the start."""
        self._supervisor.forget_weights()

    def load_weights(self, buckets: Sequence[ray.ObjectRef], version: int) -> None:
        """Have every live worker take weights from the object store, and whoever starts later."""
        offers = [ray.put(Offer(list(buckets)))]
        self.settle(self.take_weights("object_store", offers, version, lambda: Snapshot(version, buckets)))

    def replace_dead(self, what: str) -> None:
        """Have those live workers replaced that are dead or whose engine is, without waiting for the new ones. `what` ends "a
        rollout worker is replaced …"."""
        self._supervisor.probe(what)

    def choose_receivers(self) -> WeightUpdate[_RayWorker]:
        """Begin a sync whose members must know each other before weights are offered; `take_weights` goes on with it."""
        return self._supervisor.choose_receivers()

    def engine_slots(self, update: WeightUpdate[_RayWorker]) -> list[int]:
        """Return the processes with weights of each receiver's engine."""
        return [self._seats[slot.number].slots for slot, _ in update.receivers]

    def take_weights(
        self,
        strategy: str,
        offers: Sequence[ray.ObjectRef],
        version: int,
        snapshot_source: SnapshotSource,
        update: WeightUpdate[_RayWorker] | None = None,
    ) -> PendingSync:
        """Have every live worker (or those chosen before, `update`) take the weights that the ranks offer, or will.

        `snapshot_source` gives the same weights, or newer ones, to workers that start meanwhile or later. `settle` ends the sync.
        """
        calls: list[ray.ObjectRef] = []

        def take(worker: _RayWorker) -> Awaitable[Any]:
            calls.append(worker.actor.take_weights.remote(strategy, offers, version))
            return answer(calls[-1])

        joinable = strategy in STORED
        update = self._supervisor.begin_update(take, version, snapshot_source, joinable=joinable, update=update)
        return PendingSync(update, calls)

    def settle(self, sync: PendingSync) -> list[float | None]:
        """Wait for what `take_weights` began, of weights that are there; the seconds for which each engine was written.

        A worker that dies or hangs meanwhile is replaced (None), and its replacement not waited for.
        """
        return self._supervisor.settle(sync.update)

    def release_tags(self) -> tuple[str, ...]:
        """What engines give back while a trainer needs their GPUs (`rlinf_vl.engines.base.release_tags`)."""
        wanted = {tag for tags in ray.get([worker.release_tags.remote() for worker in self.workers]) for tag in tags}
        return tuple(tag for tag in MEMORY_TAGS if tag in wanted)

    def release_memory(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Have every engine release its device memory, as in `Engine`. A worker that fails is replaced."""
        self._call_all("while it releases memory", "release_memory", lambda i: (tags,))

    def restore_memory(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Have every engine restore it, as in `Engine`. A worker that fails is replaced."""
        self._call_all("while it restores memory", "restore_memory", lambda i: (tags,))

    def stop(self) -> None:
        """End every engine and its processes."""
        slots, joining = self._supervisor.slots, self._supervisor.joining
        self._supervisor.stop()
        ending = [slot.worker.actor.stop.remote() for slot in slots if slot.live]
        for slot in [*joining, *(slot for slot in slots if not slot.live)]:  # they can't answer
            slot.worker.kill()
        for ended in ending:
            with suppress(RayError):  # it has died since
                ray.get(ended, timeout=STOP_S)

    def _call_all(self, what: str, method: str, arguments: Callable[[int], tuple] = lambda i: ()) -> list[Any]:
        """Return what the method returns for each worker; one that fails is replaced, and its replacement called."""
        numbers = [slot.number for slot in self._supervisor.slots]
        futures = [self._supervisor.call(number, what, method, *arguments(i)) for i, number in enumerate(numbers)]
        return [future.result() for future in futures]
