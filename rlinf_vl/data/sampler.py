"""The order of training rows, which depends on seed and weights only."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


class EpochSampler:
    """An endless stream of row numbers.

    Without weights, an epoch has every row once, except those at its end that don't fill a batch of
    `batch_size`. With weights, source k has the share weights[k] of the rows, to within a row or
    two at any time, whatever its size. Each source then has its own epochs, and an epoch of the run
    is the number of batches that all rows fill.
    """

    def __init__(
        self,
        indices: Sequence[int],
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        levels: Mapping[int, float] | None = None,
        sources: Mapping[int, int] | None = None,
        weights: Sequence[float] = (),
    ) -> None:
        """Create the sampler.

        Args:
            indices: the rows.
            batch_size: rows of a training step.
            shuffle: whether an epoch is shuffled.
            seed: seed of the shuffling.
            levels: row → its level; an epoch is sorted by level, and only rows of one level are
                shuffled among each other.
            sources: row → its source, an index into `weights`.
            weights: share of each source, in any unit; empty for no weights.

        Raises:
            ValueError: there are too few rows, or a source has none.
        """
        if batch_size < 1:
            raise ValueError(f"data.rollout_batch_size: {batch_size} is not positive")
        if len(indices) < batch_size:
            raise ValueError(
                f"data.rollout_batch_size: {batch_size} problems a step, but only {len(indices)} "
                "usable training rows"
            )
        self.indices = np.asarray(indices, np.int64)
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.batches_per_epoch = len(indices) // batch_size
        self._levels = levels
        self._n_returned = 0  # rows returned since the start, over all epochs
        self._weights = np.asarray(weights, float) / np.sum(weights) if weights else np.ones(0)
        source_of_row = np.array([(sources or {}).get(row, 0) for row in self.indices.tolist()])
        self._rows_by_source = [self.indices[source_of_row == k] for k in range(len(weights))]
        # Rows returned of each source.
        self._n_returned_by_source = np.zeros(len(weights), np.int64)
        #: Source (-1 without weights) → its newest epoch, and the order of that epoch.
        self._orders: dict[int, tuple[int, np.ndarray]] = {}
        for k, source_rows in enumerate(self._rows_by_source):
            if not len(source_rows):
                raise ValueError(
                    f"data.weights: {weights[k]:g} for source {k + 1} of data.train_data_paths, of "
                    "which no row can be used"
                )

    @property
    def _rows_per_epoch(self) -> int:
        """The number of rows in an epoch of the run."""
        return self.batches_per_epoch * self.batch_size

    def next_rows(self, n: int) -> tuple[int, list[int]]:
        """Return the current epoch, counted from 0, and the next `n` rows.

        The rows may reach into the following epochs.
        """
        epoch = self._n_returned // self._rows_per_epoch
        return epoch, [self._next() for _ in range(n)]

    def _next(self) -> int:
        """Return the next row; with weights, it is of the source furthest behind its share."""
        source, rows, stream = -1, self.indices, []
        epoch, position = divmod(self._n_returned, self._rows_per_epoch)
        if self._rows_by_source:
            counts = self._n_returned_by_source
            source = int(np.argmax(self._weights * (counts.sum() + 1) - counts))
            rows, stream = self._rows_by_source[source], [source]
            epoch, position = divmod(int(counts[source]), len(rows))
            counts[source] += 1
        # A new epoch has a new order; a resumed run computes the same one from the seed.
        if self._orders.get(source, (-1,))[0] != epoch:
            self._orders[source] = epoch, self._order(rows, [self.seed, epoch, *stream])
        self._n_returned += 1
        return int(self._orders[source][1][position])

    def _order(self, rows: np.ndarray, stream: list[int]) -> np.ndarray:
        """Return the rows in the order of one epoch, shuffled with the seed `stream`."""
        if self.shuffle:
            rows = np.random.default_rng(stream).permutation(rows)
        if self._levels is not None:
            # A stable sort keeps the shuffled order within a level.
            rows = rows[np.argsort([self._levels[row] for row in rows.tolist()], kind="stable")]
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the stream.

        It has the epoch and the number of its rows that were returned; with weights, also the
        number of rows of each source that were returned since the start.
        """
        epoch, rows = divmod(self._n_returned, self._rows_per_epoch)
        source_counts = (
            {"drawn": self._n_returned_by_source.tolist()} if len(self._rows_by_source) else {}
        )
        return {"epoch": epoch, "rows": rows, **source_counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict()`; the batch size may have changed.

        If the number of sources has changed, each source counts as having had its share so far.
        """
        self._n_returned = state["epoch"] * self._rows_per_epoch + min(
            state["rows"], self._rows_per_epoch
        )
        source_counts = state.get("drawn", ())
        if len(source_counts) != len(self._rows_by_source):
            source_counts = np.floor(self._weights * self._n_returned)
        self._n_returned_by_source = np.asarray(source_counts, np.int64)
