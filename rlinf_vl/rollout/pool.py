"""All rollout workers as one: problems out by load, finished groups back as they come, failed workers replaced.

Invariant: `generate` returns exactly one group per task, whatever dies on the way. A worker that dies, or does not answer
its heartbeat, is replaced; the new one gets the current weights, and every task of the old one is sent again, those
included whose groups it had already delivered (they lived in its memory).
"""

import dataclasses
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from rlinf_vl.config.schema import Config
from rlinf_vl.data.dataset import BadRow
from rlinf_vl.engines.base import MEMORY_TAGS, EngineDied
from rlinf_vl.errors import RunError
from rlinf_vl.rollout.worker import RolloutWorker, Task
from rlinf_vl.runtime.ray_process import HEARTBEAT_PERIOD_S, Heartbeat, cause_of, entry, kill
from rlinf_vl.types import GroupSummary

log = logging.getLogger(__name__)

#: Seconds that a replacement is given to load its model and start its engine.
START_TIMEOUT_S = 1800
#: Workers replaced between two rollouts that end well before the pool gives up: what kills every replacement is not chance.
MAX_REPLACEMENTS = 8
#: Rows that a worker checks between two reports of progress.
FILTER_ROWS = 256


class WorkersLost(RunError):
    """Rollout workers keep dying."""


def _cause_of_death(error: RayActorError | RayTaskError) -> str:
    """Why a worker must be replaced: it is dead, or its engine is. Any other error of a task is raised again."""
    if isinstance(error, RayTaskError):
        if not isinstance(error.cause, EngineDied):
            raise error
        return str(error.cause)
    return cause_of(error)


class _Slot:
    """One place for a worker: its placement, who is in it, and what that one has been given in the running call."""

    def __init__(self, option: dict[str, Any], make: Callable[[dict[str, Any]], Any], timeout: float) -> None:
        self.option, self._make = option, make
        self.heart = Heartbeat(lambda: self.worker.heartbeat.remote(), timeout)
        self.restarts = -1
        self.start()

    def start(self) -> None:
        self.worker = self._make(self.option)
        self.tasks: dict[str, Task] = {}
        self.process: ray.ObjectRef = self.worker.process.remote()
        self.heart.restart()
        self.restarts += 1

    def kill(self) -> None:
        """End the worker's process even if it is stopped. Its engine's processes end with it."""
        kill(self.worker, self.process)


class RolloutPool:
    """The workers; `options[i]` are the Ray options that place each.

    Every worker first gets its share of the tasks in one call, up to what keeps its engine busy; the rest goes, task by
    task, to whichever worker finishes one. With the embedded engine the share is all: what a sample's logprobs are
    rounded to depends on who else is in its batch, and that must not depend on time if a resumed run is to equal one
    that was never stopped.
    """

    def __init__(
        self,
        config: Config,
        model_path: str,
        device: str,
        options: Sequence[dict[str, Any]],
        *,
        report: Callable[[str], None] = log.warning,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            report: told, in words, of every worker that is replaced.
            check: called at least once a second while `generate` waits; what it raises ends the rollout.
        """
        self.max_running = None if config.rollout.rollout_backend == "torch" else config.rollout.max_running_requests
        self.restarts, self._report, self._check = 0, report, check
        self._deaths = 0  # since the last rollout that ended well
        self._current: tuple[Callable[[], Sequence[ray.ObjectRef]], int] | None = None  # weights in buckets, version

        def make(number: int, option: dict[str, Any]):
            return RolloutWorker.options(**option).remote(config, model_path, device, number)

        timeout = config.runner.heartbeat_timeout
        self._slots = [_Slot(option, partial(make, i), timeout) for i, option in enumerate(options)]
        #: Answers of the rows that can be used, by split, and how often each is the right one.
        self.answers: dict[str, Counter[str]] = {}
        #: Tokens of the shortest and the longest prompt that is too long, by split; None where none is.
        self.too_long: dict[str, tuple[int, int] | None] = {}
        #: (split, row) → what stands for an image that other rows have too; None where no other has
        self._shared: dict[tuple[str, int], int | None] = {}

    @property
    def workers(self) -> list[Any]:
        return [slot.worker for slot in self._slots]

    def entries(self) -> list[dict[str, object]]:
        """A line on each worker, for `StatusFile`."""
        return [entry(f"rollout {i}", slot.process, slot.restarts) for i, slot in enumerate(self._slots)]

    def start(self) -> dict[str, int]:
        """Wait until every worker has its model and data; the rows of each split.

        Raises:
            RayActorError: what a worker's constructor raised: the config's fault, and not chance as is a process that dies.
        """
        pending = [worker.ready.remote() for worker in self.workers]
        for slot, reference in zip(self._slots, pending, strict=True):
            try:
                ray.get(reference)
            except RayActorError as error:
                if error.actor_init_failed:
                    raise
                self._replace(slot, "a rollout worker is replaced while it starts", cause_of(error))
        rows: dict[str, int] = ray.get(self.workers[0].ready.remote())
        return rows

    def filter_rows(
        self, split: str, rows: Sequence[int], progress: Callable[[int], None] = lambda done: None
    ) -> tuple[list[int], int, dict[int, BadRow]]:
        """Rows whose prompts fit, in order; how many were too long; and those that can't be used. `progress` is told how
        many rows were looked at."""
        n, results = len(self._slots), []
        for start in range(0, len(rows), FILTER_ROWS * n):
            part = list(rows[start : start + FILTER_ROWS * n])
            results += self._call_all(
                "checking rows", lambda worker, i, part=part: worker.filter_rows.remote(split, part[i::n])
            )
            self._check()
            progress(start + len(part))
        kept = sorted(row for result, _ in results for row in result.kept)
        self.answers[split] = sum((result.answers for result, _ in results), Counter())
        tokens = [n for result, _ in results for n in (result.fewest, result.most) if n is not None]
        self.too_long[split] = (min(tokens), max(tokens)) if tokens else None
        bad = {row: why for result, _ in results for row, why in result.bad.items()}
        images = {row: image for _, part in results for row, image in part.items()}
        often = Counter(image for shown in images.values() for image in shown)
        self._shared |= {
            (split, row): next((image for image in sorted(shown) if often[image] > 1), None)
            for row, shown in images.items()
        }
        return kept, sum(len(result.too_long) for result, _ in results), bad

    def generate(
        self, tasks: Sequence[Task], on_group: Callable[[GroupSummary], None] | None = None
    ) -> list[tuple[GroupSummary, ray.ObjectRef]]:
        """Answer all tasks; results in the order of `tasks`. `on_group` sees each summary as it arrives.

        Raises:
            WorkersLost: workers keep dying (more than `MAX_REPLACEMENTS` since the last call that ended well).
            Exception: what `check` raised.
        """
        samples = max(1, len(tasks[0].seeds)) if tasks else 1
        share = -(-len(tasks) // len(self._slots))
        if self.max_running is not None:
            share = min(share, max(1, 2 * self.max_running // samples))
        shown = [self._shared.get((task.split, task.row), task.group_id) for task in tasks]
        turn: dict[Any, int] = {}  # rows that share an image follow each other, so that mostly one worker stores it
        order = [
            turn.setdefault(task.group_id if s is None else s, len(turn)) for task, s in zip(tasks, shown, strict=True)
        ]
        queue = deque(
            dataclasses.replace(tasks[k], own_images=shown[k] is None)
            for k in sorted(range(len(tasks)), key=order.__getitem__)
        )
        streams: dict[Any, _Slot] = {}  # generator of (summary, reference) → who runs it
        results: dict[str, tuple[GroupSummary, ray.ObjectRef]] = {}

        def send(slot: _Slot, n: int) -> None:
            batch = [queue.popleft() for _ in range(min(n, len(queue)))]
            if batch:
                slot.tasks |= {task.group_id: task for task in batch}
                streams[slot.worker.generate.remote(batch)] = slot

        def replace(slot: _Slot, reason: str) -> None:
            lost = list(slot.tasks.values())
            for stream in [s for s, owner in streams.items() if owner is slot]:
                del streams[stream]
            for task in lost:
                results.pop(task.group_id, None)
            queue.extendleft(reversed(lost))
            self._replace(slot, f"a rollout worker is replaced, its {len(lost)} groups are sent again", reason)
            send(slot, len(lost))

        for slot in self._slots:
            slot.tasks = {}
            slot.heart.restart()
            send(slot, share)
        while streams or queue:
            self._check()
            for slot in self._slots:
                if reason := slot.heart.failure():
                    replace(slot, reason)
            ready, _ = ray.wait(list(streams), num_returns=1, timeout=HEARTBEAT_PERIOD_S / 5)
            if not ready:
                continue
            stream: Any = ready[0]  # a stream of references; Ray's annotation knows single ones only
            slot = streams[stream]
            try:
                summary, group = ray.get(next(stream))
            except StopIteration:
                del streams[stream]
                continue
            except (RayActorError, RayTaskError) as error:
                replace(slot, _cause_of_death(error))
                continue
            assert summary.id not in results, f"group {summary.id} came twice"
            results[summary.id] = (summary, group)
            if on_group:
                on_group(summary)
            send(slot, 1)
        self._deaths = 0
        return [results[task.group_id] for task in tasks]

    def _replace(self, slot: _Slot, what: str, reason: str) -> None:
        """A new worker, with the current weights, in the place of one that is dead or not to be trusted; yet another one
        where that one fails before it has them. `what` and `reason` are reported.

        Raises:
            WorkersLost: more than `MAX_REPLACEMENTS` failed since the last rollout that ended well.
        """
        failure: str | None = reason
        while failure is not None:
            self._deaths += 1
            if self._deaths > MAX_REPLACEMENTS:
                raise WorkersLost(
                    f"{self._deaths} rollout workers failed since the last rollout that ended well; the last one: {failure}"
                )
            self._report(f"{what}: {failure}")
            self._start_again(slot)
            what, failure = "the replacement of a rollout worker is replaced", self._start_failure(slot)

    def _start_again(self, slot: _Slot) -> None:
        slot.kill()
        slot.start()
        self.restarts += 1

    def _start_failure(self, slot: _Slot) -> str | None:
        """Wait until a replacement has its model and the current weights. Why it must be replaced itself; None where it has."""
        try:
            ray.get(slot.worker.ready.remote(), timeout=START_TIMEOUT_S)
        except GetTimeoutError:
            return f"it did not start within {START_TIMEOUT_S} s"
        except (RayActorError, RayTaskError) as error:
            return _cause_of_death(error)
        slot.heart.restart()
        if self._current is None:
            return None
        spare, version = self._current
        return self._failure(slot, slot.worker.load_weights.remote(spare(), version))

    def _failure(self, slot: _Slot, reference: ray.ObjectRef) -> str | None:
        """Wait for a call of the slot's worker. Why the worker must be replaced; None where the call ended well."""
        slot.heart.restart()
        while not ray.wait([reference], timeout=HEARTBEAT_PERIOD_S / 5)[0]:
            if reason := slot.heart.failure():
                return reason
        try:
            ray.get(reference)
        except (RayActorError, RayTaskError) as error:
            return _cause_of_death(error)
        return None

    def _call_all(self, what: str, call: Callable[[Any, int], ray.ObjectRef]) -> list[Any]:
        """What `call(worker, number)` returns for each worker; one that fails is replaced, and its replacement called."""
        pending = [call(slot.worker, i) for i, slot in enumerate(self._slots)]
        for i, slot in enumerate(self._slots):
            while (reason := self._failure(slot, pending[i])) is not None:
                self._replace(slot, f"a rollout worker is replaced while {what}", reason)
                pending[i] = call(slot.worker, i)
        return ray.get(pending)

    def replace_dead(self) -> None:
        """Replace every worker that is dead already, or whose engine is; the others answer at once."""
        self._call_all("idle", lambda worker, _: worker.ready.remote())

    def replace_all(self, reason: str) -> None:
        """New workers in every place: what the old ones were in the middle of can't be ended otherwise."""
        self._report(f"all rollout workers are replaced: {reason}")
        for slot in self._slots:
            self._start_again(slot)
        for slot in self._slots:
            if (failure := self._start_failure(slot)) is not None:
                self._replace(slot, "the replacement of a rollout worker is replaced", failure)

    def release(self, summaries: Sequence[GroupSummary] | None = None) -> None:
        """Let the groups of these summaries (None: all) go from the object store, once nobody reads them any more."""
        ids = None if summaries is None else [summary.id for summary in summaries]
        for worker in self.workers:
            worker.release.remote(ids)

    def forget_weights(self) -> None:
        """Those who have the spare weights are gone: until the next sync, a worker that is replaced has those of the start."""
        self._current = None

    def load_weights(self, buckets: Sequence[ray.ObjectRef], version: int) -> None:
        """Have every worker take weights from the object store; kept for workers that replace one."""
        self.settle(self.take_weights("object_store", list(buckets), version, lambda: buckets))

    def take_weights(
        self, way: str, labels: Sequence[Any], version: int, spare: Callable[[], Sequence[ray.ObjectRef]]
    ) -> list[ray.ObjectRef]:
        """Have every worker take the weights that were offered; references to wait for.

        Args:
            spare: the same weights as buckets in the object store, asked for when a worker is replaced.
        """
        self._current = (spare, version)
        return [worker.take_weights.remote(way, labels, version) for worker in self.workers]

    def settle(self, taken: Sequence[ray.ObjectRef]) -> None:
        """Wait for what `take_weights` began. A worker that dies or hangs meanwhile is replaced, and given the spare weights."""
        for slot, reference in zip(self._slots, taken, strict=True):
            if (reason := self._failure(slot, reference)) is not None:
                self._replace(slot, "a rollout worker is replaced during a weight sync", reason)

    def release_tags(self) -> tuple[str, ...]:
        """What engines give back while a trainer needs their GPUs (`rlinf_vl.engines.base.release_tags`)."""
        wanted = {tag for tags in ray.get([worker.release_tags.remote() for worker in self.workers]) for tag in tags}
        return tuple(tag for tag in MEMORY_TAGS if tag in wanted)

    def release_memory(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Have every engine give its device memory back, as in `Engine`. A worker that fails is replaced."""
        self._call_all("giving memory back", lambda worker, _: worker.release_memory.remote(tags))

    def restore_memory(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Have every engine take it again, as in `Engine`. A worker that fails is replaced."""
        self._call_all("taking memory back", lambda worker, _: worker.restore_memory.remote(tags))

    def stop(self) -> None:
        """End every engine and its processes. A worker that has died since needs no end: what it was for is done."""
        for ended in [worker.stop.remote() for worker in self.workers]:
            with suppress(RayActorError):
                ray.get(ended)
