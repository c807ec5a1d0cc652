"""Which rows make up which training step: whole batches, in an order that depends on seed and epoch only."""

from collections.abc import Sequence

import numpy as np


class EpochSampler:
    """Endless batches of `batch_size` rows; rows left at an epoch's end that can't fill a batch are dropped."""

    def __init__(self, indices: Sequence[int], batch_size: int, *, shuffle: bool, seed: int) -> None:
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
        self._batch = 0  # batches handed out since the start, over all epochs

    def next_batch(self) -> tuple[int, list[int]]:
        """(epoch, rows) of the next step; epochs count from 0."""
        epoch, batch = divmod(self._batch, self.batches_per_epoch)
        self._batch += 1
        order = self.indices
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(order)
        return epoch, order[batch * self.batch_size :][: self.batch_size].tolist()

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how many of its rows were handed out."""
        epoch, batch = divmod(self._batch, self.batches_per_epoch)
        return {"epoch": epoch, "rows": batch * self.batch_size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from `state_dict()`. After a change of batch size, rows of a batch that was begun are handed out again."""
        batches = min(state["rows"] // self.batch_size, self.batches_per_epoch)
        self._batch = state["epoch"] * self.batches_per_epoch + batches
