"""Dispatches the tasks of open submissions to live workers, and tracks which has which group.

No Ray. Everything here runs in the supervisor's event loop. Invariants:
- Each task of a submission ends with exactly one group, or is cancelled, whatever dies. A worker's
  groups live in its memory, so when it dies its tasks are sent again, even those whose groups had
  arrived, unless these were acknowledged.
- The time to handle a group does not grow with the number of tasks, nor, while its worker has a
  share of its own left, with the number of workers.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Generic

from rlinf_vl.rollout.pool.quarantine import Quarantine
from rlinf_vl.rollout.pool.slot import Slot, W, WorkerDied
from rlinf_vl.rollout.submission import (
    GroupArrived,
    GroupsResent,
    QueuedTask,
    Submission,
    SubmissionEnded,
    Task,
)


class Dispatcher(Generic[W]):
    """The slots, the open submissions, and the share of each slot in their tasks.

    Attributes:
        slots: the slots that get work. The list is replaced, never changed, so that other threads
            may read it.
    """

    def __init__(
        self,
        slots: list[Slot[W]],
        *,
        max_running: int | None,
        lose: Callable[[Slot[W], W, str, str], None],
        revive: Callable[[Slot[W]], None],
    ) -> None:
        """
        Args:
            max_running: as in `Supervisor`.
            lose: called when a worker died, as `Supervisor.lose`.
            revive: called with a slot that gets work but may have no worker.
        """
        self.slots = slots
        self._max_running = max_running
        self._quarantine = Quarantine()
        self._lose, self._revive = lose, revive
        self._open: list[Submission] = []
        self._unshared: list[QueuedTask] = []  # tasks that wait for a worker to join
        self._queues_empty = False  # True: all slots' queues are empty; False: unknown
        self._holders: dict[str, Slot[W]] = {}  # group id → slot whose worker has it in memory

    # --- submissions ------------------------------------------------------------------------------

    def begin(self, submission: Submission, order: Sequence[Task]) -> None:
        """Open a submission and dispatch its tasks in this order."""
        self._open.append(submission)
        self.share_out(
            [QueuedTask(submission, self._quarantine.with_fault(task)) for task in order]
        )
        self._close_if_done(submission)

    def close(self, submission: Submission, error: BaseException | None = None) -> None:
        """End a submission: no more of its groups come, and workers stop answering its tasks."""
        if submission not in self._open:
            return
        self._open.remove(submission)
        submission.ended = time.monotonic()
        submission.events.put(SubmissionEnded(error))
        self._unshared = [entry for entry in self._unshared if entry.submission is not submission]
        for slot in self.slots:
            unanswered = slot.forget_submission(submission)
            if unanswered:
                slot.worker.cancel(unanswered)
        self.fill()

    def close_all(self, error: BaseException) -> None:
        """End every submission with an error, which is raised where groups are waited for."""
        for submission in list(self._open):
            self.close(submission, error)

    def cancel(self, group_ids: Collection[str]) -> None:
        """Stop sampling these groups, and don't sample them again if their worker dies."""
        self.acknowledge(group_ids)
        for submission in list(self._open):
            cancelled = (
                (submission.group_ids & set(group_ids)) - submission.arrived - submission.cancelled
            )
            if not cancelled:
                continue
            submission.cancelled |= cancelled
            removed = {(submission, group_id) for group_id in cancelled}
            self._unshared = [
                entry
                for entry in self._unshared
                if (entry.submission, entry.task.group_id) not in removed
            ]
            for slot in self.slots:
                slot.queue = deque(
                    entry
                    for entry in slot.queue
                    if (entry.submission, entry.task.group_id) not in removed
                )
                unanswered = [
                    group_id for group_id in cancelled if slot.forget_group(submission, group_id)
                ]
                if unanswered:
                    slot.worker.cancel(unanswered)
            self._close_if_done(submission)
        self.fill()

    def acknowledge(self, group_ids: Iterable[str]) -> None:
        """Note that these groups were fetched: if their worker dies, they are not sampled again."""
        for group_id in group_ids:
            if slot := self._holders.get(group_id):
                # A group of use clears its slot of suspicion: earlier deaths were chance.
                slot.deaths = 0
                for submission in [s for s in slot.sent_tasks if group_id in s.arrived]:
                    slot.forget_group(submission, group_id)

    def release(self, group_ids: Collection[str] | None) -> None:
        """Free the memory of these groups (None: of all)."""
        if group_ids is None:
            self.acknowledge(list(self._holders))
            self._holders = {}
            for slot in self.slots:
                slot.stored = set()
                if slot.live:
                    slot.worker.release(None)
            return
        self.acknowledge(group_ids)
        by_slot: dict[Slot[W], list[str]] = {}
        for group_id in group_ids:
            if slot := self._holders.pop(group_id, None):
                slot.stored.discard(group_id)
                by_slot.setdefault(slot, []).append(group_id)
        for slot, stored_ids in by_slot.items():
            slot.worker.release(stored_ids)

    # --- slots ------------------------------------------------------------------------------------

    def add(self, slot: Slot[W]) -> None:
        """Give a live slot a share of the work from now on."""
        self.slots = [*self.slots, slot]
        waiting, self._unshared = self._unshared, []
        self.share_out(waiting)

    def remove(self, slot: Slot[W]) -> None:
        """Distribute the work of a slot that leaves among the others."""
        self.slots = [remaining for remaining in self.slots if remaining is not slot]
        work, slot.queue = list(slot.queue), deque()
        self.share_out(work)

    def requeue(self, slot: Slot[W]) -> int:
        """Queue the tasks of a lost worker in its slot again, and return their number.

        This includes tasks whose groups had arrived; a `GroupsResent` event says that these come
        again.
        """
        n_lost = sum(map(len, slot.sent_tasks.values()))
        self._quarantine.count_death(slot.answering.values())
        for submission, tasks in slot.sent_tasks.items():
            resent = submission.arrived & tasks.keys()
            if resent:
                submission.events.put(GroupsResent(frozenset(resent)))
            submission.arrived -= resent
            # `extendleft` reverses, so the tasks come first in the queue and in their old order.
            queue_entries = (
                QueuedTask(submission, self._quarantine.with_fault(task))
                for task in reversed(tasks.values())
            )
            slot.queue.extendleft(queue_entries)
        self._queues_empty = False
        self._holders = {
            name: holder for name, holder in self._holders.items() if holder is not slot
        }
        slot.forget_all()
        return n_lost

    def share_out(self, work: Sequence[QueuedTask]) -> None:
        """Distribute work among the slots, in order; without slots it waits for one to join."""
        share = -(-len(work) // max(1, len(self.slots)))  # rounded up
        for i, slot in enumerate(list(self.slots)):
            slot.queue += work[i * share : (i + 1) * share]
            self._revive(slot)
        if not self.slots:
            self._unshared += work
        self._queues_empty = False
        self.fill()

    def fill(self, *slots: Slot[W]) -> None:
        """Send live workers as many tasks as they may have.

        Each gets its own share first, and then the tasks of the slot with the longest queue.

        Args:
            slots: those that may have room now; none means all.
        """
        live = [slot for slot in slots or self.slots if slot.live]
        for slot in live:
            self._send(slot, slot.queue)
        if self._max_running is None:
            # Which worker answers a task must not depend on time then (see `Supervisor`).
            return
        for slot in live:
            if not slot.queue and not self._queues_empty:
                queues = (candidate.queue for candidate in self.slots)
                longest = max(queues, key=len, default=deque())
                self._queues_empty = not longest
                self._send(slot, longest)

    # --- streams ----------------------------------------------------------------------------------

    def _send(self, slot: Slot[W], queue: deque[QueuedTask]) -> None:
        """Send a worker the first tasks of a queue, those of each submission as one batch."""
        if not queue or (self._max_running is None and slot.streams):
            return
        # Twice what the engine runs at once, so that it always has a next request.
        max_samples = None if self._max_running is None else 2 * self._max_running
        unanswered = list(slot.answering.values())
        while queue and (max_samples is not None or not slot.streams):
            submission, batch = self._quarantine.next_batch(queue, unanswered, max_samples)
            if not batch:
                return
            slot.note_sent(submission, batch)
            slot.streams[asyncio.ensure_future(self._stream(slot, submission, batch))] = submission
            unanswered += batch

    async def _stream(self, slot: Slot[W], submission: Submission, tasks: list[Task]) -> None:
        """Send tasks to a worker, and receive their groups as they come."""
        worker = slot.worker
        # Tasks may have been cancelled between `_send` and the start of this coroutine.
        tasks = [task for task in tasks if (submission, task.group_id) in slot.answering]
        try:
            if tasks:
                async for summary, group in worker.generate(tasks):
                    self._receive(slot, submission, GroupArrived(summary, group))
            if any((submission, task.group_id) in slot.answering for task in tasks):
                raise WorkerDied("it ended a stream before it had answered all of it")
        except WorkerDied as death:
            self._lose(slot, worker, "", str(death))
        except Exception as error:
            self.close(submission, error)
        slot.streams = {
            s: owner for s, owner in slot.streams.items() if s is not asyncio.current_task()
        }
        # The worker has room now; if it is lost, others may do its work.
        self.fill(*([slot] if slot.worker is worker and slot.live else self.slots))
        self._close_if_done(submission)

    def _receive(self, slot: Slot[W], submission: Submission, event: GroupArrived) -> None:
        """Pass a group on to its submission."""
        group_id = event.summary.id
        assert group_id not in submission.arrived, f"group {group_id} came twice"
        task = slot.sent_tasks.get(submission, {}).get(group_id)
        if task is None:  # cancelled while its group was on its way
            slot.worker.release([group_id])
            return
        submission.arrived.add(group_id)
        self._quarantine.clear(task)
        submission.events.put(event)
        if task.summary_only:  # the worker has stored nothing, so there is nothing to lose
            slot.forget_group(submission, group_id)
            slot.deaths = 0
        else:
            slot.stored.add(group_id)
            self._holders[group_id] = slot
            slot.answering.pop((submission, group_id), None)
        self.fill(slot)

    def _close_if_done(self, submission: Submission) -> None:
        """End a submission whose groups have all arrived or were cancelled."""
        if submission in self._open and submission.done:
            for slot in self.slots:
                if submission in slot.sent_tasks:
                    slot.deaths = 0
            self.close(submission)
