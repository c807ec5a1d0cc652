"""The rollout pool of a local run: one `GroupSampler`, whose event loop runs while the trainer waits
for groups."""

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from queue import SimpleQueue

from rlinf_vl.config.schema import Config
from rlinf_vl.data.dataset import FilterResult
from rlinf_vl.driver.local.event_loop import CallersLoop
from rlinf_vl.driver.local.user_code import DirectExecutor, DirectFunctions
from rlinf_vl.engines.base import MEMORY_TAGS, Engine
from rlinf_vl.rollout.episode.env_makers import scorer_of
from rlinf_vl.rollout.episode.group_sampler import GroupSampler
from rlinf_vl.rollout.episode.image_order import ImageOrder
from rlinf_vl.rollout.submission import (
    CHECK_S,
    Event,
    GroupArrived,
    Submission,
    SubmissionEnded,
    Task,
)
from rlinf_vl.types import Group, GroupSummary

#: Rows that are checked between two reports of progress.
FILTER_ROWS = 256


class DirectStore:
    """Hands out a group itself as the reference to it."""

    def put(self, group: Group, *, own_images: bool) -> tuple[Group, int]:
        return group, 0


class LocalPool:
    """The `Pool` of a local run. Submissions are answered one after the other, each as one batch, as
    a rollout worker with an embedded engine answers them.

    Nothing is sampled between two waits for groups, so a run is reproducible with every schedule
    that is allowed.

    Attributes:
        restarts, turnover: 0, as nothing is replaced.
        workers: the sampler.
    """

    restarts = turnover = 0

    def __init__(
        self, config: Config, model_path: str, device: str, check: Callable[[], None]
    ) -> None:
        """`check` is called at least every `CHECK_S` seconds while groups are waited for; an error
        that it raises ends the rollout."""
        self._check = check
        self._loop = CallersLoop()
        # Whoever stands at a breakpoint has the time that it takes.
        config = replace(config, rollout=replace(config.rollout, episode_timeout=None))
        self._sampler = GroupSampler(
            config,
            model_path,
            device,
            scorer=scorer_of(config, pool_class=DirectFunctions),
            store=DirectStore(),
            executor=DirectExecutor(),
        )
        self.workers = [self._sampler]
        self._order = ImageOrder()
        #: Submissions that are not done, with the order of their tasks; the first one is answered.
        self._open: deque[tuple[Submission, list[Task]]] = deque()
        self._answering: asyncio.Task[None] | None = None
        self._arrival = asyncio.Event()  # set when an event was put into a queue

    @property
    def engine(self) -> Engine:
        return self._sampler.engine

    # --- what the loop calls ----------------------------------------------------------------------

    def start(self) -> dict[str, int]:
        """Return the number of rows of each split."""
        return {split: len(dataset) for split, dataset in self._sampler.datasets.items()}

    def open_membership(self) -> None:
        """Do nothing: no worker joins or leaves."""

    def filter_rows(
        self, split: str, rows: Sequence[int], progress: Callable[[int], None] = lambda done: None
    ) -> FilterResult:
        """Check which of these rows can be used; `progress` gets the number of rows checked."""
        results = []
        for start in range(0, len(rows), FILTER_ROWS):
            chunk = rows[start : start + FILTER_ROWS]
            result, images = self._loop.run(self._sampler.filter_rows(split, chunk))
            results.append(result)
            self._order.add_rows(split, images)
            # Checking many rows takes minutes, in which Ctrl-C should be heard.
            self._check()
            progress(start + len(chunk))
        return FilterResult.merged(results)

    def submit(self, tasks: Sequence[Task], events: SimpleQueue[Event] | None = None) -> Submission:
        """Queue tasks, which are answered while somebody waits for groups."""
        queue: SimpleQueue[Event] = SimpleQueue() if events is None else events
        submission = Submission(tasks, partial(self._run_until_event, queue), self._close, queue)
        self._open.append((submission, self._order.sorted(tasks)))
        return submission

    def cancel(self, group_ids: Collection[str]) -> None:
        """Stop sampling these groups."""
        for submission, _ in list(self._open):
            unwanted = submission.group_ids.intersection(group_ids) - submission.arrived
            submission.cancelled |= unwanted
            self._loop.run(self._sampler.cancel(unwanted))
            # Nothing of it will arrive any more, so nobody else would end it.
            if submission.done:
                self._close(submission)

    def acknowledge(self, group_ids: Collection[str]) -> None:
        """Do nothing: no group is lost in one process."""

    def release(self, summaries: Sequence[GroupSummary] | None = None) -> None:
        """Do nothing: a group is freed when nobody refers to it."""

    def release_tags(self) -> Sequence[str]:
        """Return the kinds of memory that the engine releases while the trainer needs its GPU."""
        return self._loop.run(self._sampler.release_tags())

    def release_memory(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        self._loop.run(self._sampler.release_memory(tags))

    def restore_memory(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        self._loop.run(self._sampler.restore_memory(tags))

    def entries(self) -> list[dict[str, object]]:
        """Return the entry of this process for `StatusFile`."""
        return [{"name": "local", "node": "", "pid": os.getpid(), "state": "alive", "restarts": 0}]

    def stop(self) -> None:
        """End the engine, the reward functions' threads, and what is being answered."""
        self._loop.close()
        self._sampler.close()

    # --- answering --------------------------------------------------------------------------------

    def _run_until_event(self, events: SimpleQueue[Event]) -> None:
        """Run the event loop until `events` has one."""
        self._check()
        while events.empty():
            self._loop.run(self._wait())
            self._check()

    async def _wait(self) -> None:
        """Answer the first submission until an event has arrived, or for `CHECK_S` seconds."""
        if self._answering is None or self._answering.done():
            assert self._open, "groups are waited for, and none was requested"
            submission, tasks = self._open[0]
            self._answering = asyncio.ensure_future(self._answer(submission, tasks))
        self._arrival.clear()
        arrival = asyncio.ensure_future(self._arrival.wait())
        await asyncio.wait(
            [arrival, self._answering], timeout=CHECK_S, return_when=asyncio.FIRST_COMPLETED
        )
        arrival.cancel()
        if self._answering.done() and not self._answering.cancelled():
            # Raise what a breakpoint's `q` or Ctrl-C raised there; other errors are events.
            self._answering.result()

    async def _answer(self, submission: Submission, tasks: Sequence[Task]) -> None:
        """Answer a submission's tasks as one batch."""
        try:
            remaining = [task for task in tasks if task.group_id not in submission.cancelled]
            async for groups in self._sampler.generate(remaining):
                for summary, group in groups:
                    self._receive(submission, summary, group)
        except Exception as error:
            self._close(submission, error)
        self._close(submission)

    def _receive(self, submission: Submission, summary: GroupSummary, group: Group | None) -> None:
        """Pass a group on to its submission, unless it was cancelled."""
        if summary.id not in submission.cancelled:
            submission.arrived.add(summary.id)
            submission.events.put(GroupArrived(summary, group))
            self._arrival.set()

    def _close(self, submission: Submission, error: BaseException | None = None) -> None:
        """End a submission, and stop answering it."""
        # Several ways lead here: its end, its cancellation, and whoever waits for it.
        if all(submission is not present for present, _ in self._open):
            return
        is_first = self._open[0][0] is submission
        self._open = deque(entry for entry in self._open if entry[0] is not submission)
        submission.ended = time.monotonic()
        submission.events.put(SubmissionEnded(error))
        self._arrival.set()
        if is_first and not submission.done and self._answering is not None and error is None:
            self._answering.cancel()
