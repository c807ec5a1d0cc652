"""The processes that read and render conversations to imitate: Ray actors beside the actor ranks.

They stand where rollout workers stand in a run that samples: the controller gets summaries and
references, and never sees a token or a pixel. Ray starts a reader again that dies.
"""

from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError

from rlinf_vl.config.schema import Config
from rlinf_vl.data.dataset import FilterResult
from rlinf_vl.data.unusable import BadRow
from rlinf_vl.errors import RunError
from rlinf_vl.observe.spans import flush_spans, record_spans, span
from rlinf_vl.runtime.loading import freeze_loaded, quick_imports
from rlinf_vl.runtime.ray_process import cause_of, entry, own_process, where
from rlinf_vl.runtime.run_folder import run_folder
from rlinf_vl.transport.groups import GroupStore
from rlinf_vl.types import GroupSummary, Reference

#: Times that a call is made again whose reader has died.
MAX_RETRIES = 3
#: Rows of a reader that are checked between two reports of progress.
CHECKED_ROWS = 256


class RowReader:
    """The Ray actor."""

    def __init__(self, config: Config, model_path: str, number: int) -> None:
        record_spans(run_folder(config), f"reader {number}")
        own_process("cpu")
        # It imports transformers, which the controller, where this class is named, need not.
        with quick_imports():
            from rlinf_vl.extras.sft.demonstrations import Demonstrations
        self._demonstrations = Demonstrations(config, model_path)
        self._store = GroupStore()
        freeze_loaded()

    def process(self) -> tuple[str, int]:
        return where()

    def sizes(self) -> dict[str, int]:
        """Return the number of rows of each split."""
        return {split: len(rows) for split, rows in self._demonstrations.datasets.items()}

    def check(self, split: str, rows: Sequence[int]) -> FilterResult:
        return self._demonstrations.check(split, rows)

    def read(
        self, split: str, rows: dict[str, int]
    ) -> list[tuple[GroupSummary, ray.ObjectRef] | BadRow]:
        """Put the groups of these rows, by name of the group, into the object store; for a row that
        can't be read, return its record."""
        stored: list[tuple[GroupSummary, ray.ObjectRef] | BadRow] = []
        with span("read rows", rows=len(rows)):
            for group in self._demonstrations.groups(split, rows):
                if isinstance(group, BadRow):
                    stored.append(group)
                    continue
                reference, size = self._store.put(group)
                placeholder_ids = self._demonstrations.placeholder_ids
                stored.append((GroupSummary.of(group, placeholder_ids, size), reference))
        return stored

    def release(self, group_ids: Sequence[str]) -> None:
        self._store.release(group_ids)

    def stop(self) -> None:
        flush_spans()


class RowReaders:
    """The readers of a run, used as one.

    Attributes:
        restarts: None is counted: what a reader that died has stored is read again.
    """

    restarts = turnover = 0

    def __init__(
        self, config: Config, model_path: str, n: int, check: Callable[[], None] = lambda: None
    ) -> None:
        """Start `n` readers. `check` is called while rows are checked; an error that it raises
        ends that."""
        options: Any = {"max_restarts": -1, "max_task_retries": MAX_RETRIES}
        actor: Any = ray.remote(num_cpus=0, **options)(RowReader)
        self._readers = [actor.remote(config, model_path, number) for number in range(n)]
        self._processes = [reader.process.remote() for reader in self._readers]
        self._check = check

    def start(self) -> dict[str, int]:
        """Return the number of rows of each split."""
        return ray.get(self._readers[0].sizes.remote())

    def filter_rows(
        self, split: str, rows: Sequence[int], progress: Callable[[int], None]
    ) -> FilterResult:
        """Check which of these rows can be imitated; `progress` gets the number of rows checked."""
        results: list[FilterResult] = []
        n_at_once = CHECKED_ROWS * len(self._readers)
        for start in range(0, len(rows), n_at_once):
            chunk = rows[start : start + n_at_once]
            pending = [
                reader.check.remote(split, chunk[number :: len(self._readers)])
                for number, reader in enumerate(self._readers)
            ]
            results += _results(pending)
            self._check()
            progress(start + len(chunk))
        return FilterResult.merged(results)

    def begin(self, split: str, rows: dict[str, int]) -> list[ray.ObjectRef]:
        """Begin to read these rows, by name of the group that each becomes."""
        names = list(rows)
        pending = []
        for number, reader in enumerate(self._readers):
            share = {name: rows[name] for name in names[number :: len(self._readers)]}
            pending.append(reader.read.remote(split, share))
        return pending

    def result(self, pending: list[ray.ObjectRef]) -> list[tuple[GroupSummary, Reference] | BadRow]:
        """Wait for what was begun; returns the groups in the order of the names, and in the place of
        a row that can't be read its record."""
        shares = _results(pending)
        ordered = []
        for place in range(max(map(len, shares), default=0)):
            ordered += [share[place] for share in shares if place < len(share)]
        return ordered

    def release(self, summaries: Sequence[GroupSummary]) -> None:
        group_ids = [summary.id for summary in summaries]
        for reader in self._readers:
            reader.release.remote(group_ids)

    def entries(self) -> list[dict[str, object]]:
        """Return an entry for each reader, for `StatusFile`."""
        return [
            entry(f"reader {number}", process, 0) for number, process in enumerate(self._processes)
        ]

    def stop(self) -> None:
        """Let the readers write out what they have recorded of their time."""
        ray.get([reader.stop.remote() for reader in self._readers])


def _results(pending: list[ray.ObjectRef]) -> list[Any]:
    """Return the results of readers' calls. Raises RunError if a reader dies of the same call
    again and again."""
    try:
        return ray.get(pending)
    except RayActorError as error:
        raise RunError(
            f"a reader of rows died {MAX_RETRIES + 1} times in the same call: {cause_of(error)}. A "
            "row may take more memory than there is: rlinf-vl check-data reads them one by one"
        ) from error
