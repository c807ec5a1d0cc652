"""Rows that may be to blame for the deaths of the workers that answer them."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from rlinf_vl.rollout.submission import Task


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

    def judged(self, task: Task) -> Task:
        """The task, without an answer to be given if its row is quarantined."""
        if task.fault or self._deaths[task.split, task.row] < self._tries:
            return task
        fault = f"{self._tries} workers died while they answered it, the last one with nothing else to do"
        return replace(task, fault=f"{fault} (data.max_row_faults)")
