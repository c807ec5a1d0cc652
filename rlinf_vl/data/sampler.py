"""Which rows make up which training step: whole batches, in an order that depends on seed and epoch only."""

from collections.abc import Sequence

import numpy as np


class EpochSampler:
    """Endless batches of `batch_size` rows; what is left of an epoch when it can't fill a batch is dropped.

    Raises:
        ValueError: fewer rows than one batch.
    """

    def __init__(self, indices: Sequence[int], batch_size: int, *, shuffle: bool, seed: int) -> None:
        if batch_size < 1:
            raise ValueError(f"data.rollout_batch_size: {batch_size} is not positive")
        if len(indices) < batch_size:
            raise ValueError(
                f"data.rollout_batch_size: {batch_size} problems a step, but only {len(indices)} usable training rows"
            )
        self.indices = np.asarray(indices, np.int64)
        self.batch_size, self.shuffle, self.seed = batch_size, shuffle, seed
        self.batches_per_epoch = len(indices) // batch_size
        self._epoch, self._batch = 0, 0
        self._order = self._order_of(0)

    def next_batch(self) -> tuple[int, list[int]]:
        """(epoch, rows) of the next step; epochs count from 0."""
        if self._batch == self.batches_per_epoch:
            self._start(self._epoch + 1, 0)
        start = self._batch * self.batch_size
        self._batch += 1
        return self._epoch, self._order[start : start + self.batch_size].tolist()

    def state_dict(self) -> dict[str, int]:
        """Where the sampler stands: the epoch, and how many of its rows were handed out."""
        return {"epoch": self._epoch, "rows": self._batch * self.batch_size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from `state_dict()`. After a change of batch size, a batch that was begun is handed out again."""
        self._start(state["epoch"], min(state["rows"] // self.batch_size, self.batches_per_epoch))

    def _start(self, epoch: int, batch: int) -> None:
        self._epoch, self._batch, self._order = epoch, batch, self._order_of(epoch)

    def _order_of(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return self.indices
        return np.random.default_rng([self.seed, epoch]).permutation(self.indices)
