"""All rollout workers as one: problems out by load, finished groups back as they come."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import ray

from rlinf_vl.config.schema import Config
from rlinf_vl.rollout.worker import RolloutWorker, Task
from rlinf_vl.types import GroupSummary


class RolloutPool:
    """The workers; `options[i]` are the Ray options that place each.

    Every worker first gets its share of the tasks in one call, up to what keeps its engine busy; the rest goes, task by
    task, to whichever worker finishes one.
    """

    def __init__(self, config: Config, model_path: str, device: str, options: Sequence[dict[str, Any]]) -> None:
        self.max_running = config.rollout.max_running_requests
        self.collocated_memory = device == "cuda"
        self.workers = [RolloutWorker.options(**option).remote(config, model_path, device) for option in options]

    def start(self) -> list[ray.ObjectRef]:
        """References to wait for: each worker's rows per split."""
        return [worker.ready.remote() for worker in self.workers]

    def filter_rows(self, split: str, rows: Sequence[int]) -> tuple[list[int], int, dict[int, str]]:
        """Rows whose prompts fit, in order; how many were too long; and the reason for each row that can't be read."""
        n = len(self.workers)
        results = ray.get([w.filter_rows.remote(split, list(rows[i::n])) for i, w in enumerate(self.workers)])
        kept = sorted(row for result in results for row in result.kept)
        bad = {row: reason for result in results for row, reason in result.bad.items()}
        return kept, sum(len(result.too_long) for result in results), bad

    def generate(
        self, tasks: Sequence[Task], on_group: Callable[[GroupSummary], None] | None = None
    ) -> list[tuple[GroupSummary, ray.ObjectRef]]:
        """Answer all tasks; results in the order of `tasks`. `on_group` sees each summary as it arrives."""
        samples = max(1, len(tasks[0].seeds)) if tasks else 1
        window = max(1, 2 * self.max_running // samples)
        queue = deque(tasks)
        streams: dict[Any, Any] = {}  # generator → worker
        share = min(window, -(-len(tasks) // len(self.workers)))
        for worker in self.workers:
            first = [queue.popleft() for _ in range(min(share, len(queue)))]
            if first:
                streams[worker.generate.remote(first)] = worker
        results: dict[str, tuple[GroupSummary, ray.ObjectRef]] = {}
        while streams:
            ready, _ = ray.wait(list(streams), num_returns=1)
            stream = ready[0]
            try:
                summary, group = ray.get(next(stream))
            except StopIteration:
                del streams[stream]
                continue
            assert summary.id not in results, f"group {summary.id} came twice"
            results[summary.id] = (summary, group)
            if on_group:
                on_group(summary)
            if queue:
                worker = streams[stream]
                streams[worker.generate.remote([queue.popleft()])] = worker
        return [results[task.group_id] for task in tasks]

    def release(self, summaries: Sequence[GroupSummary]) -> None:
        """Let the groups of these summaries go from the object store, once nobody reads them any more."""
        ids = [summary.id for summary in summaries]
        for worker in self.workers:
            worker.release.remote(ids)

    def load_weights(self, buckets: Sequence[ray.ObjectRef], version: int) -> None:
        """Have every worker take the published weights."""
        ray.get([worker.load_weights.remote(list(buckets), version) for worker in self.workers])

    def release_memory(self) -> None:
        ray.get([worker.release_memory.remote() for worker in self.workers])

    def restore_memory(self) -> None:
        ray.get([worker.restore_memory.remote() for worker in self.workers])

    def stop(self) -> None:
        ray.get([worker.stop.remote() for worker in self.workers])
