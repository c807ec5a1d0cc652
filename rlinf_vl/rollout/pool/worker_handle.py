"""The controller's handle of a rollout worker that is a Ray actor: its calls, groups and heartbeats."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayError, RayTaskError

from rlinf_vl.engines.base import EngineDied
from rlinf_vl.rollout.episode.batch_stream import BatchReport, StoredGroup
from rlinf_vl.rollout.pool.slot import WorkerDied
from rlinf_vl.rollout.submission import Task
from rlinf_vl.runtime.ray_process import ActorsLost, Heartbeat, cause_of, kill


@dataclass(frozen=True, slots=True)
class StreamFailed:
    """The message that a worker's stream of reports has ended with an error."""

    error: Exception


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


class WorkerHandle:
    """A rollout worker, a Ray actor, behind the supervisor's `Worker` protocol."""

    def __init__(self, actor: Any, heartbeat_timeout: float) -> None:
        self.actor = actor
        self.process: ray.ObjectRef = actor.process.remote()
        self._heart = Heartbeat(actor.heartbeat.remote, heartbeat_timeout)
        self._batch_numbers = itertools.count()
        #: The queues of the batches that somebody waits for, by number.
        self._batches: dict[int, asyncio.Queue[BatchReport | StreamFailed]] = {}
        self._reader: asyncio.Task[None] | None = None

    async def call(self, method: str, *arguments: Any) -> Any:
        return await answer(getattr(self.actor, method).remote(*arguments))

    async def generate(self, tasks: Sequence[Task]) -> AsyncIterator[StoredGroup]:
        """Answer tasks as one batch; yield their groups as they finish.

        Leaving the loop early cancels the unanswered tasks, and frees groups that still arrive.
        """
        batch, reports = next(self._batch_numbers), asyncio.Queue[BatchReport | StreamFailed]()
        unanswered = {task.group_id for task in tasks}
        # Before the worker is asked: a report may be there before the call returns.
        self._batches[batch] = reports
        if self._reader is None or self._reader.done():
            self._reader = asyncio.ensure_future(self._read_reports())
        try:
            await answer(self.actor.enqueue_batch.remote(batch, tasks))
            while True:
                report = await reports.get()
                if isinstance(report, StreamFailed):
                    raise report.error
                unanswered -= {summary.id for summary, _ in report.groups}
                for group in report.groups:
                    yield group
                if report.failed:
                    await answer(self.actor.raise_batch_error.remote(batch))
                if report.ended:
                    unanswered = set[str]()
                    return
        finally:
            # From here on its reports belong to nobody, and their groups are freed as they come.
            del self._batches[batch]
            if unanswered:
                self.cancel(unanswered)
            while not reports.empty():
                self._release_report(reports.get_nowait())

    async def _read_reports(self) -> None:
        """Distribute the worker's reports to the queues of their batches, until an error ends that.

        All queues get it.
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
            reports.put_nowait(StreamFailed(error))

    def _release_report(self, report: BatchReport | StreamFailed) -> None:
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
