"""The stream over which a rollout worker reports on all its batches of tasks.

It imports neither torch nor an engine, so that a worker without them starts in a small process.
"""

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from rlinf_vl.rollout.submission import Task
from rlinf_vl.types import GroupSummary, Reference

#: Messages of one stream, after which the controller opens another, because Ray's records of a
#: stream grow with its length.
STREAM_MESSAGES = 1000


class StoredGroup(NamedTuple):
    """A group that a worker has finished; `reference` is None if only the summary is wanted."""

    summary: GroupSummary
    reference: Reference | None


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


class BatchStream(Protocol):
    """A worker that answers batches of tasks by its `generate`; one stream reports on all."""

    reports: asyncio.Queue[BatchReport]  # not yet sent by a stream
    batch_errors: dict[int, Exception]
    #: References, because asyncio itself keeps none to a running task.
    batch_tasks: set[asyncio.Task[None]]

    def __init__(self) -> None:
        self.reports = asyncio.Queue()
        self.batch_errors = {}
        self.batch_tasks = set()

    @abstractmethod
    def generate(self, tasks: Sequence[Task]) -> AsyncIterator[list[StoredGroup]]:
        """Answer tasks; yield the groups that have finished since the last ones."""

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
            # Kept here: an error that a stream raised would end it for all other batches, too.
            self.batch_errors[batch] = error
        self.reports.put_nowait(BatchReport(batch, ended=True, failed=batch in self.batch_errors))

    async def stream_reports(self) -> AsyncIterator[list[BatchReport]]:
        """Report on all batches, as their groups finish. One caller at a time."""
        for _ in range(STREAM_MESSAGES):
            for message in await self._next_messages():
                yield message

    async def _next_messages(self) -> list[list[BatchReport]]:
        """Wait for reports; return those with groups, and then those of batches that have ended.

        A message is held at both ends, and by Ray, until the next one comes: groups in the last
        message before a pause would stay in the object store when they have been released.
        """
        reports = [await self.reports.get()]
        while not self.reports.empty():
            reports.append(self.reports.get_nowait())
        groups = [report for report in reports if report.groups]
        ends = [report for report in reports if not report.groups]
        return [message for message in (groups, ends) if message]

    async def raise_batch_error(self, batch: int) -> None:
        """Raise the error that ended a batch, so that it reaches the caller as any call's would."""
        raise self.batch_errors.pop(batch)
