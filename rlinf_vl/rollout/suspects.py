"""Rows that may be to blame for the deaths of the workers that answer them."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rlinf_vl.rollout.submission import Submission, Task


class Suspects:
    """Counts, for each row, the workers that died while they answered it, one after the other. At one below `tries` it is answered
    by a worker that has nothing else to do; when that dies as well, the row is quarantined: its groups are made without answers."""

    def __init__(self, tries: int) -> None:
        self._tries = tries
        self._deaths: Counter[tuple[str, int]] = Counter()

    def accuse(self, tasks: Iterable[Task]) -> None:
        """Their worker died before it had answered any of them."""
        self._deaths.update({(task.split, task.row) for task in tasks})

    def clear(self, task: Task) -> None:
        """It was answered."""
        if not task.fault:
            self._deaths.pop((task.split, task.row), None)

    def alone(self, task: Task) -> bool:
        """Whether its worker may have nothing else to do."""
        return self._deaths[task.split, task.row] == self._tries - 1

    def next_batch(
        self, queue: deque[tuple[Submission, Task]], unanswered: Sequence[Task], most: int | None
    ) -> tuple[Submission, list[Task]]:
        """Take the first tasks of a queue off it, all of one submission, that a worker may have beside those it has not answered:
        with them no more than `most` samples, unless it is a single task, and no other beside a suspect."""
        submission, batch = queue[0][0], list[Task]()
        running = sum(len(task.seeds) for task in unanswered)
        while queue and queue[0][0] is submission:
            task, others = queue[0][1], batch[:1] or unanswered
            running += len(task.seeds)
            if others and self._deaths and any(map(self.alone, [*others, task])):
                break
            if most is not None and running > max(most, len(task.seeds)):
                break
            batch.append(queue.popleft()[1])
        return submission, batch

    def judged(self, task: Task) -> Task:
        """The task, without an answer to be given if its row is quarantined."""
        if task.fault or self._deaths[task.split, task.row] < self._tries:
            return task
        fault = f"{self._tries} workers died while they answered it, the last one with nothing else to do"
        return replace(task, fault=f"{fault} (data.max_row_faults)")
