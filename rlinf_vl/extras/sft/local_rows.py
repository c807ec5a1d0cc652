"""Reads conversations to imitate in the run's own process, in a thread beside the training."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from rlinf_vl.config.schema import Config
from rlinf_vl.data.dataset import FilterResult
from rlinf_vl.data.unusable import BadRow
from rlinf_vl.extras.sft.demonstrations import Demonstrations
from rlinf_vl.types import Group, GroupSummary

#: A group with its summary, or the record of a row that can't be read.
Read = tuple[GroupSummary, Group] | BadRow
#: Rows that are checked between two reports of progress.
CHECKED_ROWS = 256


class LocalRowReader:
    """The `Readers` of a local run."""

    restarts = turnover = 0

    def __init__(self, config: Config, model_path: str, check: Callable[[], None]) -> None:
        """`check` is called while rows are checked; an error that it raises ends that."""
        self._demonstrations = Demonstrations(config, model_path)
        self._check = check
        self._thread = ThreadPoolExecutor(1)

    def start(self) -> dict[str, int]:
        """Return the number of rows of each split."""
        return {split: len(rows) for split, rows in self._demonstrations.datasets.items()}

    def filter_rows(
        self, split: str, rows: Sequence[int], progress: Callable[[int], None]
    ) -> FilterResult:
        """Check which of these rows can be imitated; `progress` gets the number of rows checked."""
        results = []
        for start in range(0, len(rows), CHECKED_ROWS):
            chunk = rows[start : start + CHECKED_ROWS]
            results.append(self._demonstrations.check(split, chunk))
            self._check()
            progress(start + len(chunk))
        return FilterResult.merged(results)

    def begin(self, split: str, rows: dict[str, int]) -> Future[list[Read]]:
        """Begin to read these rows, by name of the group that each becomes."""

        def read() -> list[Read]:
            results: list[Read] = []
            for group in self._demonstrations.groups(split, rows):
                if isinstance(group, BadRow):
                    results.append(group)
                else:
                    summary = GroupSummary.of(group, self._demonstrations.placeholder_ids)
                    results.append((summary, group))
            return results

        return self._thread.submit(read)

    def result(self, pending: Future[list[Read]]) -> list[Read]:
        """Wait for what was begun; returns the groups in the order of the names, and in the place of
        a row that can't be read its record."""
        return pending.result()

    def release(self, summaries: Sequence[GroupSummary]) -> None:
        """Do nothing: a group is freed when nobody refers to it."""

    def entries(self) -> list[dict[str, object]]:
        """Return the entry of this process for `StatusFile`."""
        return [{"name": "local", "node": "", "pid": os.getpid(), "state": "alive", "restarts": 0}]

    def stop(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)
