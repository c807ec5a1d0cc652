"""The stream over which a rollout worker reports on all its batches of tasks.

It imports neither torch nor an engine, so that a worker without them starts in a small process.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import ray

from rlinf_vl.rollout.submission import Task
from rlinf_vl.types import GroupSummary

#: Messages of one stream, after which the controller opens another, because Ray's records of a
#: stream grow with its length.
STREAM_MESSAGES = 1000

#: (summary, reference to its group, or None if only the summary is wanted)
StoredGroup = tuple[GroupSummary, ray.ObjectRef | None]


@dataclass(frozen=True, slots=True)
class BatchReport:
    """The groups of a batch of tasks that have finished since the last report of that batch.

    Attributes:
        batch: the number under which the batch was enqueued.
        ended: whether this is its last report.
        failed: whether an error ended it, which `BatchStream.raise_batch_error` raises.
    """

    batch: int
    groups: Sequence[StoredGroup] = ()
    ended: bool = False
    failed: bool = False


class BatchStream:
    """The worker's side: `generate` answers a batch of tasks, and one stream reports on all."""

    def __init__(self) -> None:
        self.reports: asyncio.Queue[BatchReport] = asyncio.Queue()  # not yet sent by a stream
        self.batch_errors: dict[int, Exception] = {}
        self.batch_tasks: set[asyncio.Task[None]] = set()

    def generate(self, tasks: Sequence[Task]) -> AsyncIterator[list[StoredGroup]]:
        """Answer tasks; yield the groups that have finished since the last ones."""
        raise AssertionError("a worker answers tasks in its own way")

    async def enqueue_batch(self, batch: int, tasks: Sequence[Task]) -> None:
        """Begin to answer tasks. `stream_reports` yields their groups, with this batch's number.

        All batches share one stream: an actor runs at most 1,000 calls at once, and a stream for
        each batch would keep heartbeats and weights waiting. Groups of calls would not: but each
        has an event loop of its own, and a heartbeat in another loop than the answers' would call
        a worker well whose answers hang.
        """
        task = asyncio.ensure_future(self._answer_batch(batch, tasks))
        self.batch_tasks.add(task)
        task.add_done_callback(self.batch_tasks.discard)

    async def _answer_batch(self, batch: int, tasks: Sequence[Task]) -> None:
        try:
            async for groups in self.generate(tasks):
                self.reports.put_nowait(BatchReport(batch, groups))
        except Exception as error:
            self.batch_errors[batch] = error
        self.reports.put_nowait(BatchReport(batch, ended=True, failed=batch in self.batch_errors))

    async def stream_reports(self) -> AsyncIterator[list[BatchReport]]:
        """Report on all batches, as their groups finish. One caller at a time."""
        for _ in range(STREAM_MESSAGES):
            reports = [await self.reports.get()]
            while not self.reports.empty():
                reports.append(self.reports.get_nowait())
            yield reports

    async def raise_batch_error(self, batch: int) -> None:
        """Raise the error that ended a batch, so that it reaches the caller as any call's would."""
        raise self.batch_errors.pop(batch)
