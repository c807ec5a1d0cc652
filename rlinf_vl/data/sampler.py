"""Which rows make up which training step, in an order that depends on seed and weights only."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


class EpochSampler:
    """Endless rows.

    Without weights an epoch has every row once; those left at its end that can't fill a batch of `batch_size` are dropped. With
    weights, source k has the share weights[k] of what is handed out, to within a row or two at any time and whatever its size; each
    source has epochs of its own, and an epoch of the run is as many batches as the rows would fill.
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
        """
        Args:
            levels: row → what an epoch goes up in; rows of one level are shuffled, or stay in their order.
            sources: row → its source, an index into `weights`.

        Raises:
            ValueError: too few rows, or none of a source.
        """
        if batch_size < 1:
            raise ValueError(f"data.rollout_batch_size: {batch_size} is not positive")
        if len(indices) < batch_size:
            raise ValueError(
                f"data.rollout_batch_size: {batch_size} problems a step, but only {len(indices)} usable training rows"
            )
        self.indices = np.asarray(indices, np.int64)
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.batches_per_epoch = len(indices) // batch_size
        self._levels = levels
        self._taken = 0  # rows handed out since the start, over all epochs
        self._weights = np.asarray(weights, float) / np.sum(weights) if weights else np.ones(0)
        of = np.array([(sources or {}).get(row, 0) for row in self.indices.tolist()])
        self._parts = [self.indices[of == k] for k in range(len(weights))]
        self._drawn = np.zeros(len(weights), np.int64)  # rows handed out of each source
        #: Source, or -1 without weights → its newest epoch, and that one's order.
        self._orders: dict[int, tuple[int, np.ndarray]] = {}
        for k, part in enumerate(self._parts):
            if not len(part):
                raise ValueError(
                    f"data.weights: {weights[k]:g} for source {k + 1} of data.train_data_paths, of which no row can be used"
                )

    @property
    def _epoch(self) -> int:
        """Rows of an epoch of the run."""
        return self.batches_per_epoch * self.batch_size

    def next_rows(self, n: int) -> tuple[int, list[int]]:
        """The epoch that they begin in, counted from 0, and the next `n` rows, beyond that epoch's end if need be."""
        epoch = self._taken // self._epoch
        return epoch, [self._next() for _ in range(n)]

    def _next(self) -> int:
        """The next row; with weights, of the source that is furthest behind its share."""
        k, rows, (epoch, place), stream = -1, self.indices, divmod(self._taken, self._epoch), []
        if self._parts:
            k = int(np.argmax(self._weights * (self._drawn.sum() + 1) - self._drawn))
            rows, stream = self._parts[k], [k]
            epoch, place = divmod(int(self._drawn[k]), len(rows))
            self._drawn[k] += 1
        if self._orders.get(k, (-1,))[0] != epoch:
            self._orders[k] = epoch, self._order(rows, [self.seed, epoch, *stream])
        self._taken += 1
        return int(self._orders[k][1][place])

    def _order(self, rows: np.ndarray, stream: list[int]) -> np.ndarray:
        if self.shuffle:
            rows = np.random.default_rng(stream).permutation(rows)
        if self._levels is not None:
            rows = rows[np.argsort([self._levels[row] for row in rows.tolist()], kind="stable")]
        return rows

    def state_dict(self) -> dict[str, Any]:
        """The epoch, how many of its rows were handed out, and with weights how many of each source since the start."""
        epoch, rows = divmod(self._taken, self._epoch)
        drawn = {"drawn": self._drawn.tolist()} if len(self._parts) else {}
        return {"epoch": epoch, "rows": rows, **drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`, with another batch size, too. After a change of the number of sources, each goes on as if it
        had had its share so far."""
        self._taken = state["epoch"] * self._epoch + min(state["rows"], self._epoch)
        drawn = state.get("drawn", ())
        if len(drawn) != len(self._parts):
            drawn = np.floor(self._weights * self._taken)
        self._drawn = np.asarray(drawn, np.int64)
