"""Rows that may be to blame for the deaths of the workers that answer them."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rlinf_vl.rollout.submission import Submission, Task


class Quarantine:
    """Counts, for each row, the workers that died while they answered it, one after the other.

    At one below `tries` the row is answered by a worker that has nothing else to do. When that one dies as well, the row is
    quarantined: its groups are made without answers.
    """

    def __init__(self, tries: int) -> None:
        self._tries = tries
        self._deaths: Counter[tuple[str, int]] = Counter()

    def accuse(self, tasks: Iterable[Task]) -> None:
        """Count a worker's death against the tasks that it had not answered."""
        self._deaths.update({(task.split, task.row) for task in tasks})

    def clear(self, task: Task) -> None:
        """Forget the deaths of a task that was answered."""
        if not task.fault:
            self._deaths.pop((task.split, task.row), None)

    def alone(self, task: Task) -> bool:
        """Return whether its worker may have nothing else to do."""
        return self._deaths[task.split, task.row] == self._tries - 1

    def next_batch(
        self, queue: deque[tuple[Submission, Task]], unanswered: Sequence[Task], max_samples: int | None
    ) -> tuple[Submission, list[Task]]:
        """Take off a queue the first tasks, all of one submission, that a worker may have beside those it is answering.

        Together they have no more than `max_samples` samples, unless it is a single task, and nothing stands beside a suspect.
        """
        submission, batch = queue[0][0], list[Task]()
        running = sum(len(task.seeds) for task in unanswered)
        while queue and queue[0][0] is submission:
            task, others = queue[0][1], batch[:1] or unanswered
            running += len(task.seeds)
            if others and self._deaths and any(map(self.alone, [*others, task])):
                break
            if max_samples is not None and running > max(max_samples, len(task.seeds)):
                break
            batch.append(queue.popleft()[1])
        return submission, batch

    def judged(self, task: Task) -> Task:
        """Return the task; without an answer to be given if its row is quarantined."""
        if task.fault or self._deaths[task.split, task.row] < self._tries:
            return task
        fault = f"{self._tries} workers died while they answered it, the last one with nothing else to do"
        return replace(task, fault=f"{fault} (data.max_row_faults)")
