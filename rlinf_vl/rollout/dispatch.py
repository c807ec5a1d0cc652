"""Shares the tasks of open submissions out to live workers, and knows which worker has which group. No Ray.

Everything here runs in the supervisor's event loop. Invariants:
- Each task of a submission ends with exactly one group, or is cancelled, whatever dies. A worker's groups live in its memory,
  so when it dies its tasks are sent again, also those whose groups had arrived, unless these were acknowledged.
- The cost of an answer grows neither with the tasks nor, while its worker has a share, with the workers.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Generic

from rlinf_vl.rollout.quarantine import Quarantine
from rlinf_vl.rollout.slot import Slot, W, WorkerDied
from rlinf_vl.rollout.submission import GroupArrived, GroupsResent, Submission, SubmissionEnded, Task

#: Tasks in order, each with its submission.
Work = Sequence[tuple[Submission, Task]]


class Dispatcher(Generic[W]):
    """The slots that do the work, the open submissions, and what each slot's worker has of them.

    Attributes:
        slots: those that work is shared out to; replaced as a whole, so that other threads may read it.
    """

    def __init__(
        self,
        slots: list[Slot[W]],
        *,
        max_running: int | None,
        max_row_faults: int,
        lose: Callable[[Slot[W], W, str, str], None],
        revive: Callable[[Slot[W]], None],
    ) -> None:
        """
        Args:
            max_running, max_row_faults: as for the `Supervisor`.
            lose: called with a slot, its worker, the end of a sentence ("" for the usual one) and a reason, when that worker died.
            revive: called with a slot that gets work, and may have no worker.
        """
        self.slots = slots
        self._max_running = max_running
        self._quarantine = Quarantine(max_row_faults)
        self._lose, self._revive = lose, revive
        self._open: list[Submission] = []
        self._unshared: list[tuple[Submission, Task]] = []  # work that waits for a worker to join
        self._queues_empty = False  # no slot has a task in its queue; False: some may
        self._holders: dict[str, Slot[W]] = {}  # the slot whose worker has a group in its memory

    # --- submissions ----------------------------------------------------------------------------------------------------

    def begin(self, submission: Submission, order: Sequence[Task]) -> None:
        """Have the tasks of a submission answered, shared out in this order."""
        self._open.append(submission)
        self.share_out([(submission, self._quarantine.judged(task)) for task in order])
        self._close_if_done(submission)

    def close(self, submission: Submission, error: BaseException | None = None) -> None:
        """End a submission: no more of its groups come, and workers stop answering them."""
        if submission not in self._open:
            return
        self._open.remove(submission)
        submission.ended = time.monotonic()
        submission.events.put(SubmissionEnded(error))
        self._unshared = [entry for entry in self._unshared if entry[0] is not submission]
        for slot in self.slots:
            if unanswered := slot.drop(submission):
                slot.worker.cancel(unanswered)
        self.fill()

    def close_all(self, error: BaseException) -> None:
        """End every submission with an error, which reaches whoever waits for groups."""
        for submission in list(self._open):
            self.close(submission, error)

    def cancel(self, group_ids: Collection[str]) -> None:
        """Have these groups neither sampled to their end nor, where their worker dies, sampled again."""
        self.acknowledge(group_ids)
        for submission in list(self._open):
            cancelled = (submission.group_ids & set(group_ids)) - submission.arrived - submission.cancelled
            if not cancelled:
                continue
            submission.cancelled |= cancelled
            gone = {(submission, group_id) for group_id in cancelled}
            self._unshared = [(s, task) for s, task in self._unshared if (s, task.group_id) not in gone]
            for slot in self.slots:
                slot.queue = deque((s, task) for s, task in slot.queue if (s, task.group_id) not in gone)
                unanswered = [group_id for group_id in cancelled if slot.take_back(submission, group_id)]
                if unanswered:
                    slot.worker.cancel(unanswered)
            self._close_if_done(submission)
        self.fill()

    def acknowledge(self, group_ids: Iterable[str]) -> None:
        """Note that these groups are where they are needed: those that have arrived are not sampled again."""
        for group_id in group_ids:
            if slot := self._holders.get(group_id):
                slot.deaths = 0
                for submission in [s for s in slot.given if group_id in s.arrived]:
                    slot.take_back(submission, group_id)

    def release(self, group_ids: Collection[str] | None) -> None:
        """Free the memory of these groups (None: of all), which nobody needs any more."""
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

    # --- slots ----------------------------------------------------------------------------------------------------------

    def add(self, slot: Slot[W]) -> None:
        """Have a slot that is live share in the work from now on."""
        self.slots = [*self.slots, slot]
        waiting, self._unshared = self._unshared, []
        self.share_out(waiting)

    def remove(self, slot: Slot[W]) -> None:
        """Have the others do the work of a slot that leaves."""
        self.slots = [other for other in self.slots if other is not slot]
        work, slot.queue = list(slot.queue), deque()
        self.share_out(work)

    def requeue(self, slot: Slot[W]) -> int:
        """Queue the tasks of a lost worker in its slot again; returns how many of them it had been sent.

        Those whose groups had arrived are among them: whoever waits is told that they come again.
        """
        lost_tasks = sum(map(len, slot.given.values()))
        self._quarantine.accuse(slot.answering.values())
        for submission, tasks in slot.given.items():
            if again := submission.arrived & tasks.keys():
                submission.events.put(GroupsResent(frozenset(again)))
            submission.arrived -= again
            judged = ((submission, self._quarantine.judged(task)) for task in reversed(tasks.values()))
            slot.queue.extendleft(judged)
        self._queues_empty = False
        self._holders = {name: holder for name, holder in self._holders.items() if holder is not slot}
        slot.forget()
        return lost_tasks

    def share_out(self, work: Work) -> None:
        """Share work out, in order; where there is no slot, it waits for one to join."""
        share = -(-len(work) // max(1, len(self.slots)))
        for i, slot in enumerate(list(self.slots)):
            slot.queue += work[i * share : (i + 1) * share]
            self._revive(slot)
        if not self.slots:
            self._unshared += work
        self._queues_empty = False
        self.fill()

    def fill(self, *slots: Slot[W]) -> None:
        """Send live workers (`slots`: only these, which have got room) as much as they may have: first of their share, then of
        what others have no room for."""
        live = [slot for slot in slots or self.slots if slot.live]
        for slot in live:
            self._send(slot, slot.queue)
        for slot in live if self._max_running is not None else ():
            if not slot.queue and not self._queues_empty:
                longest = max((other.queue for other in self.slots), key=len, default=deque())
                self._queues_empty = not longest
                self._send(slot, longest)

    # --- streams --------------------------------------------------------------------------------------------------------

    def _send(self, slot: Slot[W], queue: deque[tuple[Submission, Task]]) -> None:
        """Send a worker the first tasks of a queue, those of each submission as one batch."""
        if not queue or (self._max_running is None and slot.streams):
            return
        max_samples = None if self._max_running is None else 2 * self._max_running
        unanswered = list(slot.answering.values())
        while queue and (max_samples is not None or not slot.streams):
            submission, batch = self._quarantine.next_batch(queue, unanswered, max_samples)
            if not batch:
                return
            slot.give(submission, batch)
            slot.streams[asyncio.ensure_future(self._stream(slot, submission, batch))] = submission
            unanswered += batch

    async def _stream(self, slot: Slot[W], submission: Submission, tasks: list[Task]) -> None:
        """Have a worker answer tasks, and pass their groups on as they come."""
        worker = slot.worker
        # Some may have been cancelled since the worker was to get them, and before it heard of them.
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
        slot.streams = {s: owner for s, owner in slot.streams.items() if s is not asyncio.current_task()}
        self.fill(*([slot] if slot.worker is worker and slot.live else self.slots))
        self._close_if_done(submission)

    def _receive(self, slot: Slot[W], submission: Submission, arrived: GroupArrived) -> None:
        group_id = arrived.summary.id
        assert group_id not in submission.arrived, f"group {group_id} came twice"
        task = slot.given.get(submission, {}).get(group_id)
        if task is None:  # it was cancelled when it was as good as done
            slot.worker.release([group_id])
            return
        submission.arrived.add(group_id)
        self._quarantine.clear(task)
        submission.events.put(arrived)
        if task.summary_only:  # nothing of it is in the worker's memory
            slot.take_back(submission, group_id)
            slot.deaths = 0
        else:
            slot.stored.add(group_id)
            self._holders[group_id] = slot
            slot.answering.pop((submission, group_id), None)
        self.fill(slot)

    def _close_if_done(self, submission: Submission) -> None:
        if submission in self._open and submission.done:
            for slot in self.slots:
                if submission in slot.given:
                    slot.deaths = 0
            self.close(submission)
