"""Quarantines rows whose workers keep dying while they answer them."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rlinf_vl.rollout.submission import QueuedTask, Submission, Task

#: Workers, one after the other, that may die or hang while they answer a row.
MAX_ROW_DEATHS = 3


class Quarantine:
    """The number of successive worker deaths of each row that they happened on.

    A row with `MAX_ROW_DEATHS` - 1 of them is answered by a worker that has nothing else to do. If
    that one dies as well, the row is to blame and quarantined: its groups are made without answers.
    """

    def __init__(self) -> None:
        self._deaths: Counter[tuple[str, int]] = Counter()

    def count_death(self, tasks: Iterable[Task]) -> None:
        """Count a worker's death for the rows of the tasks that it had not answered."""
        self._deaths.update({(task.split, task.row) for task in tasks})

    def clear(self, task: Task) -> None:
        """Reset the count of a row that was answered."""
        if not task.fault:  # a quarantined row stays so: its group has no answers
            self._deaths.pop((task.split, task.row), None)

    def must_be_alone(self, task: Task) -> bool:
        """Return whether the task must be its worker's only one."""
        return self._deaths[task.split, task.row] == MAX_ROW_DEATHS - 1

    def next_batch(
        self,
        queue: deque[QueuedTask],
        unanswered: Sequence[Task],
        max_samples: int | None,
    ) -> tuple[Submission, list[Task]]:
        """Remove the first tasks of a queue, all of one submission, that a worker may take on.

        Args:
            unanswered: the worker's present tasks.
            max_samples: limit on the samples of its tasks; a single task may have more. None for no
                limit.

        Returns:
            (the submission, its tasks). A task that must be alone is never with another.
        """
        submission, batch = queue[0].submission, list[Task]()
        n_samples = sum(len(task.seeds) for task in unanswered)
        while queue and queue[0].submission is submission:
            # One task of the batch stands for all: if that one must be alone, it is the only one.
            task, worker_tasks = queue[0].task, batch[:1] or unanswered
            n_samples += len(task.seeds)
            if (
                worker_tasks
                and self._deaths
                and any(map(self.must_be_alone, [*worker_tasks, task]))
            ):
                break
            if max_samples is not None and n_samples > max(max_samples, len(task.seeds)):
                break
            batch.append(queue.popleft().task)
        return submission, batch

    def with_fault(self, task: Task) -> Task:
        """Return the task; if its row is quarantined, with the fault that prevents answers."""
        if task.fault or self._deaths[task.split, task.row] < MAX_ROW_DEATHS:
            return task
        fault = f"{MAX_ROW_DEATHS} workers died while they answered it, the last one with nothing else to do"
        return replace(task, fault=fault)
