"""All rollout workers as one: problems out by load, finished groups back as they come, failed workers replaced.

Invariant: `generate` returns exactly one group per task, whatever dies on the way. A worker that dies, or does not answer
its heartbeat, is replaced; the new one gets the current weights, and every task of the old one is sent again, those
included whose groups it had already delivered (they lived in its memory).
"""

import dataclasses
import logging
import os
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlinf_vl.config.schema import Config
from rlinf_vl.rollout.engine import EngineDied
from rlinf_vl.rollout.worker import RolloutWorker, Task
from rlinf_vl.types import GroupSummary

log = logging.getLogger(__name__)

#: Seconds between two heartbeats of a worker that is generating.
HEARTBEAT_PERIOD_S = 5.0
#: Seconds that a replacement is given to load its model and start its engine.
START_TIMEOUT_S = 1800
#: Workers replaced in one call of `generate` before the pool gives up: what kills every replacement is not chance.
MAX_REPLACEMENTS = 8


@ray.remote(num_cpus=0)
def _kill_process(pid: int) -> None:
    """A stopped or wedged process does not obey Ray; it obeys this."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _cause_of_death(error: RayActorError | RayTaskError) -> str:
    """Why a worker must be replaced: it is dead, or its engine is. Any other error of a task is raised again."""
    if isinstance(error, RayTaskError):
        if not isinstance(error.cause, EngineDied):
            raise error
        return str(error.cause)
    return str(error).splitlines()[0]


class _Slot:
    """One place for a worker: its placement, who is in it, and what that one has been given in the running call."""

    def __init__(self, option: dict[str, Any], make: Callable[[dict[str, Any]], Any]) -> None:
        self.option, self._make = option, make
        self.start()

    def start(self) -> None:
        self.worker = self._make(self.option)
        self.tasks: dict[str, Task] = {}
        self.beat: ray.ObjectRef | None = None
        self.beat_sent = 0.0
        self._process: ray.ObjectRef = self.worker.process.remote()

    def kill(self) -> None:
        """End the worker's process even if it is stopped. Its engine's processes end with it."""
        ray.kill(self.worker)
        try:
            node, pid = ray.get(self._process, timeout=1)
        except (GetTimeoutError, RayActorError, RayTaskError):
            return  # it never lived, or is dead already
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        ray.get(_kill_process.options(scheduling_strategy=there).remote(pid))


class RolloutPool:
    """The workers; `options[i]` are the Ray options that place each.

    Every worker first gets its share of the tasks in one call, up to what keeps its engine busy; the rest goes, task by
    task, to whichever worker finishes one.
    """

    def __init__(self, config: Config, model_path: str, device: str, options: Sequence[dict[str, Any]]) -> None:
        self.max_running = config.rollout.max_running_requests
        self.heartbeat_timeout = config.rollout.heartbeat_timeout
        self.restarts = 0
        self._current: tuple[Callable[[], Sequence[ray.ObjectRef]], int] | None = None  # weights in buckets, version

        def make(option: dict[str, Any]):
            return RolloutWorker.options(**option).remote(config, model_path, device)

        self._slots = [_Slot(option, make) for option in options]
        #: (split, row) → what stands for an image that other rows have too; None where no other has
        self._shared: dict[tuple[str, int], int | None] = {}

    @property
    def workers(self) -> list[Any]:
        return [slot.worker for slot in self._slots]

    def start(self) -> list[ray.ObjectRef]:
        """References to wait for: each worker's rows per split."""
        return [worker.ready.remote() for worker in self.workers]

    def filter_rows(self, split: str, rows: Sequence[int]) -> tuple[list[int], int, dict[int, str]]:
        """Rows whose prompts fit, in order; how many were too long; and the reason for each row that can't be read."""
        n = len(self._slots)
        results = ray.get([w.filter_rows.remote(split, list(rows[i::n])) for i, w in enumerate(self.workers)])
        kept = sorted(row for result, _ in results for row in result.kept)
        bad = {row: reason for result, _ in results for row, reason in result.bad.items()}
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
        """
        samples = max(1, len(tasks[0].seeds)) if tasks else 1
        window = max(1, 2 * self.max_running // samples)
        share = min(window, -(-len(tasks) // len(self._slots)))
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
            log.warning("a rollout worker is replaced, its %d groups are sent again: %s", len(lost), reason)
            for stream in [s for s, owner in streams.items() if owner is slot]:
                del streams[stream]
            for task in lost:
                results.pop(task.group_id, None)
            queue.extendleft(reversed(lost))
            self._replace(slot)
            send(slot, len(lost))

        for slot in self._slots:
            slot.tasks = {}
            slot.beat, slot.beat_sent = None, time.monotonic()
            send(slot, share)
        while streams or queue:
            for slot in self._slots:
                if reason := self._heartbeat(slot):
                    replace(slot, reason)
            ready, _ = ray.wait(list(streams), num_returns=1, timeout=HEARTBEAT_PERIOD_S / 5)
            if not ready:
                continue
            stream, slot = ready[0], streams[ready[0]]
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

    def _heartbeat(self, slot: _Slot) -> str | None:
        """Ask a worker now and then whether it and its engine live; the reason to replace it, if there is one."""
        now = time.monotonic()
        if slot.beat is None:
            if now - slot.beat_sent >= HEARTBEAT_PERIOD_S:
                slot.beat, slot.beat_sent = slot.worker.heartbeat.remote(), now
            return None
        answered, _ = ray.wait([slot.beat], timeout=0)
        if not answered:
            silent = now - slot.beat_sent
            return f"no heartbeat for {silent:.0f} s" if silent > self.heartbeat_timeout else None
        try:
            alive = ray.get(slot.beat)
        except RayActorError as error:
            return _cause_of_death(error)
        slot.beat, slot.beat_sent = None, now
        return None if alive else "its engine is dead"

    def _replace(self, slot: _Slot) -> None:
        """A new worker in the place of one that is dead or not to be trusted, with the current weights."""
        slot.kill()
        slot.start()
        self.restarts += 1
        ray.get(slot.worker.ready.remote(), timeout=START_TIMEOUT_S)
        slot.beat_sent = time.monotonic()
        if self._current:
            buckets, version = self._current
            ray.get(slot.worker.load_weights.remote(buckets(), version))

    def release(self, summaries: Sequence[GroupSummary]) -> None:
        """Let the groups of these summaries go from the object store, once nobody reads them any more."""
        ids = [summary.id for summary in summaries]
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
            slot.beat, slot.beat_sent = None, time.monotonic()
            reason = None
            while reason is None and not ray.wait([reference], timeout=HEARTBEAT_PERIOD_S / 5)[0]:
                reason = self._heartbeat(slot)
            try:
                if reason is None:
                    ray.get(reference)
                    continue
            except (RayActorError, RayTaskError) as error:
                reason = _cause_of_death(error)
            log.warning("a rollout worker is replaced during a weight sync: %s", reason)
            self._replace(slot)

    def release_memory(self) -> None:
        ray.get([worker.release_memory.remote() for worker in self.workers])

    def restore_memory(self) -> None:
        ray.get([worker.restore_memory.remote() for worker in self.workers])

    def stop(self) -> None:
        ray.get([worker.stop.remote() for worker in self.workers])
