"""All rollout workers as one: problems out by load, finished groups back as they come, failed workers replaced.

Invariant: `generate` returns exactly one group per task, whatever dies on the way. A worker that dies, or does not answer
its heartbeat, is replaced; the new one gets the current weights, and every task of the old one is sent again, those
included whose groups it had already delivered (they lived in its memory).
"""

import dataclasses
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from rlinf_vl.config.schema import Config
from rlinf_vl.data.dataset import BadRow
from rlinf_vl.ray_process import HEARTBEAT_PERIOD_S, Heartbeat, cause_of, entry, kill
from rlinf_vl.rollout.engine import MEMORY_TAGS, EngineDied
from rlinf_vl.rollout.worker import RolloutWorker, Task
from rlinf_vl.types import GroupSummary

log = logging.getLogger(__name__)

#: Seconds that a replacement is given to load its model and start its engine.
START_TIMEOUT_S = 1800
#: Workers replaced in one call of `generate` before the pool gives up: what kills every replacement is not chance.
MAX_REPLACEMENTS = 8
#: Rows that a worker checks between two reports of progress.
FILTER_ROWS = 256


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
        self._current: tuple[Callable[[], Sequence[ray.ObjectRef]], int] | None = None  # weights in buckets, version

        def make(number: int, option: dict[str, Any]):
            return RolloutWorker.options(**option).remote(config, model_path, device, number)

        timeout = config.runner.heartbeat_timeout
        self._slots = [_Slot(option, partial(make, i), timeout) for i, option in enumerate(options)]
        #: Answers of the rows that can be used, by split, and how often each is the right one.
        self.answers: dict[str, Counter[str]] = {}
        #: (split, row) → what stands for an image that other rows have too; None where no other has
        self._shared: dict[tuple[str, int], int | None] = {}

    @property
    def workers(self) -> list[Any]:
        return [slot.worker for slot in self._slots]

    def entries(self) -> list[dict[str, object]]:
        """A line on each worker, for `StatusFile`."""
        return [entry(f"rollout {i}", slot.process, slot.restarts) for i, slot in enumerate(self._slots)]

    def start(self) -> list[ray.ObjectRef]:
        """References to wait for: each worker's rows per split."""
        return [worker.ready.remote() for worker in self.workers]

    def filter_rows(
        self, split: str, rows: Sequence[int], progress: Callable[[int], None] = lambda done: None
    ) -> tuple[list[int], int, dict[int, BadRow]]:
        """Rows whose prompts fit, in order; how many were too long; and those that can't be used. `progress` is told how
        many rows were looked at."""
        n, results = len(self._slots), []
        for start in range(0, len(rows), FILTER_ROWS * n):
            part = list(rows[start : start + FILTER_ROWS * n])
            results += ray.get([w.filter_rows.remote(split, part[i::n]) for i, w in enumerate(self.workers)])
            self._check()
            progress(start + len(part))
        kept = sorted(row for result, _ in results for row in result.kept)
        self.answers[split] = sum((result.answers for result, _ in results), Counter())
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
            RuntimeError: workers keep dying (more than `MAX_REPLACEMENTS` in this call).
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
        replaced = 0

        def send(slot: _Slot, n: int) -> None:
            batch = [queue.popleft() for _ in range(min(n, len(queue)))]
            if batch:
                slot.tasks |= {task.group_id: task for task in batch}
                streams[slot.worker.generate.remote(batch)] = slot

        def replace(slot: _Slot, reason: str) -> None:
            nonlocal replaced
            replaced += 1
            if replaced > MAX_REPLACEMENTS:
                raise RuntimeError(f"{replaced} rollout workers died in one rollout; the last one: {reason}")
            lost = list(slot.tasks.values())
            self._report(f"a rollout worker is replaced, its {len(lost)} groups are sent again: {reason}")
            for stream in [s for s, owner in streams.items() if owner is slot]:
                del streams[stream]
            for task in lost:
                results.pop(task.group_id, None)
            queue.extendleft(reversed(lost))
            self._replace(slot)
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
        return [results[task.group_id] for task in tasks]

    def _replace(self, slot: _Slot) -> None:
        """A new worker in the place of one that is dead or not to be trusted, with the current weights."""
        slot.kill()
        slot.start()
        self.restarts += 1
        ray.get(slot.worker.ready.remote(), timeout=START_TIMEOUT_S)
        slot.heart.restart()
        if self._current:
            buckets, version = self._current
            ray.get(slot.worker.load_weights.remote(buckets(), version))

    def replace_all(self, reason: str) -> None:
        """New workers in every place: what the old ones were in the middle of can't be ended otherwise."""
        self._report(f"all rollout workers are replaced: {reason}")
        self._current = None
        for slot in self._slots:
            self._replace(slot)

    def release(self, summaries: Sequence[GroupSummary] | None = None) -> None:
        """Let the groups of these summaries (None: all) go from the object store, once nobody reads them any more."""
        ids = None if summaries is None else [summary.id for summary in summaries]
        for worker in self.workers:
            worker.release.remote(ids)

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
            slot.heart.restart()
            reason = None
            while reason is None and not ray.wait([reference], timeout=HEARTBEAT_PERIOD_S / 5)[0]:
                reason = slot.heart.failure()
            try:
                if reason is None:
                    ray.get(reference)
                    continue
            except (RayActorError, RayTaskError) as error:
                reason = _cause_of_death(error)
            self._report(f"a rollout worker is replaced during a weight sync: {reason}")
            self._replace(slot)

    def release_memory(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Have every engine give its device memory back, as in `Engine`."""
        ray.get([worker.release_memory.remote(tags) for worker in self.workers])

    def restore_memory(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Have every engine take it again."""
        ray.get([worker.restore_memory.remote(tags) for worker in self.workers])

    def stop(self) -> None:
        """End every engine and its processes."""
        ray.get([worker.stop.remote() for worker in self.workers])
