"""All rollout workers as one. Those that fail are replaced (`rlinf_vl.rollout.supervisor`)."""

import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayError, RayTaskError

from rlinf_vl.config.schema import Config
from rlinf_vl.data.dataset import FilterResult
from rlinf_vl.engines.base import MEMORY_TAGS, EngineDied
from rlinf_vl.rollout.slot import Slot, WorkerDied
from rlinf_vl.rollout.submission import Event, Submission, Task
from rlinf_vl.rollout.supervisor import Supervisor
from rlinf_vl.rollout.worker import RolloutWorker
from rlinf_vl.runtime.launch import Reservation
from rlinf_vl.runtime.ray_process import ActorsLost, Heartbeat, cause_of, entry, kill
from rlinf_vl.runtime.seats import WAY_OUT, lost_seats
from rlinf_vl.transport.sender import Offer
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

    async def call(self, method: str, *arguments: Any) -> Any:
        return await answer(getattr(self.actor, method).remote(*arguments))

    async def generate(self, tasks: Sequence[Task]) -> AsyncIterator[tuple[GroupSummary, ray.ObjectRef]]:
        try:
            async for reference in self.actor.generate.remote(tasks):
                for group in await answer(reference):
                    yield group
        except RayTaskError:
            raise
        except RayError as error:  # of the stream, not of one message
            raise WorkerDied(cause_of(error)) from error

    def watch(self) -> None:
        self._heart.restart()

    def failure(self) -> str | None:
        return self._heart.failure() if ray.is_initialized() else None

    def kill(self) -> None:
        kill(self.actor, self.process)


#: The number of a slot, the worker in it, and its answer to come.
Taken = tuple[int, _RayWorker, ray.ObjectRef]


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
        self._waits: set[int] = set()  # workers whose wait for a node was told
        runner, rollout = config.runner, config.rollout
        whole = runner.schedule == "sync" or (runner.schedule == "one_step_off" and runner.max_staleness == 1)
        max_running = None if rollout.rollout_backend == "torch" and whole else rollout.max_running_requests
        self._supervisor = Supervisor[_RayWorker](
            make,
            len(reservation.rollout),
            max_running=max_running,
            report=lambda message, kind="worker_replaced": report(kind, message),
            max_row_faults=config.data.max_row_faults,
            lost=self._lost,
            newcomers=self._newcomers,
        )
        #: (split, row) → number of an image that other rows have too; None where no other has
        self._shared: dict[tuple[str, int], int | None] = {}

    @property
    def workers(self) -> list[Any]:
        return [slot.worker.actor for slot in self._there]

    @property
    def _there(self) -> list[Slot[_RayWorker]]:
        return [slot for slot in self._supervisor.slots if not slot.left]

    @property
    def restarts(self) -> int:
        """Workers that were replaced so far."""
        return self._supervisor.replaced

    @property
    def turnover(self) -> int:
        """How often a worker was replaced, joined or left."""
        return self._supervisor.turnover

    @property
    def engine_slots(self) -> list[int]:
        """Processes of each worker's engine that have weights."""
        return [self._seats[slot.number].slots for slot in self._there]

    def same_workers(self) -> AbstractContextManager[Any]:
        """While it lasts, no worker joins, and what one that leaves owes can still be waited for."""
        return self._supervisor.membership

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

    def _lost(self, number: int) -> bool:
        """Whether a worker leaves, because its node is lost. Where it waits instead (`cluster.on_node_loss`), that is told once. The
        last worker waits always, unless others may join."""
        if not self._may_change:
            return False
        seat = self._seats[number]
        if self._elastic is not None:
            return self._elastic.lost(seat)
        try:
            lost = bool(lost_seats([seat.options]))
        except RayError:  # the cluster's head does not answer: later
            return False
        if lost and self._shrinks and len(self._there) > 1:
            return True
        if lost and number not in self._waits:
            self._waits.add(number)
            self._report("node_lost", f"rollout worker {number} waits for its node: {WAY_OUT}")
        return False

    def entries(self) -> list[dict[str, object]]:
        """A line on each worker, for `StatusFile`."""
        slots = self._there
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

    def replace_dead(self) -> None:
        """Replace every worker that is dead already, or whose engine is; the others answer at once."""
        self._call_all("while idle", "ready")

    def replace_all(self, reason: str) -> None:
        """Replace every worker: what the old ones are in the middle of can't be ended otherwise."""
        self._report("worker_replaced", f"all rollout workers are replaced: {reason}")
        self._supervisor.replace_all()

    def release(self, summaries: Sequence[GroupSummary] | None = None) -> None:
        """Free the groups of these summaries (None: all) in the object store once nobody reads them any more."""
        ids = None if summaries is None else [summary.id for summary in summaries]
        for worker in self.workers:
            worker.release.remote(ids)

    def forget_weights(self) -> None:
        """The spare weights are gone: until the next sync, replacements have the weights of the start."""
        self._supervisor.weights = None

    def load_weights(self, buckets: Sequence[ray.ObjectRef], version: int) -> None:
        """Have every worker take weights from the object store, and every replacement."""
        self.settle(self.take_weights("object_store", [ray.put(Offer(list(buckets)))], version, lambda: buckets))

    def take_weights(
        self, strategy: str, offers: Sequence[ray.ObjectRef], version: int, spare: Callable[[], Sequence[ray.ObjectRef]]
    ) -> list[Taken]:
        """Have every worker take the weights that the ranks offer, or will; returns what to wait for. When a worker is replaced,
        `spare` gives the same weights as buckets in the object store."""
        self._supervisor.weights = (spare, version)
        workers = [(slot.number, slot.worker) for slot in self._there]
        return [(i, worker, worker.actor.take_weights.remote(strategy, offers, version)) for i, worker in workers]

    def settle(self, taken: Sequence[Taken]) -> list[float | None]:
        """Wait for what `take_weights` began; the seconds for which each engine was written. A worker that dies or hangs meanwhile
        is replaced by one with the spare weights (None)."""
        settled = [self._supervisor.settle(i, worker, answer(reference)) for i, worker, reference in taken]
        return [future.result() for future in settled]

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
        self._supervisor.stop()
        for ended in [worker.stop.remote() for worker in self.workers]:
            with suppress(RayError):  # it has died since, or waits for a node
                ray.get(ended, timeout=STOP_S)

    def _call_all(self, what: str, method: str, arguments: Callable[[int], tuple] = lambda i: ()) -> list[Any]:
        """What the method returns for each worker; one that fails is replaced, and its replacement called."""
        numbers = [slot.number for slot in self._there]
        futures = [self._supervisor.call(number, what, method, *arguments(i)) for i, number in enumerate(numbers)]
        return [future.result() for future in futures]
