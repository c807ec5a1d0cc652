"""The learner of a local run, one rank in this process, and its weight sync."""

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch

from rlinf_vl.actor.batch_types import Logprobs, RankMiniBatch, TurnKl
from rlinf_vl.actor.rank import Rank, group_numbers, step_metrics
from rlinf_vl.config.schema import Config
from rlinf_vl.engines.base import Engine
from rlinf_vl.models.loading import DTYPES
from rlinf_vl.types import Group, Prices, TurnAdvantages
from rlinf_vl.weights.buckets import BUCKET_BYTES, Label, group_by_size


class LocalLearner:
    """The `Learner` of a local run."""

    data_size = 1
    prices: Prices

    def __init__(self, config: Config, model_path: str, device: str, total_steps: int) -> None:
        """Load the model, for a run of `total_steps`."""
        self.rank = Rank(config, model_path, device, 0)
        _, self.prices, self.table = self.rank.start(None, 1, 1, total_steps)
        self._on_gpu = device == "cuda"

    def fetch_groups(
        self, minibatches: Sequence[Sequence[RankMiniBatch]], groups: Sequence[Group]
    ) -> list[int]:
        """Give the rank the groups that it will train on or score; none is lost."""
        # A mini-batch has an entry for each rank, and here is one rank.
        numbers = group_numbers([mini[0] for mini in minibatches])
        self.rank.groups = {number: groups[number] for number in numbers}
        return []

    def score(self, minibatch: Sequence[RankMiniBatch]) -> list[tuple[int, int, float, float]]:
        return self.rank.score(minibatch[0])

    def total_loss(self, minibatch: Sequence[RankMiniBatch]) -> tuple[float, int]:
        return self.rank.total_loss(minibatch[0])

    def reference_kl(self, minibatches: Sequence[Sequence[RankMiniBatch]]) -> TurnKl:
        return self.rank.reference_kl([mini[0] for mini in minibatches])

    def update(
        self,
        step: int,
        minibatches: Sequence[Sequence[RankMiniBatch]],
        advantages: Sequence[Sequence[TurnAdvantages]],
        recorded: Collection[int],
        kl_scale: float,
        on_start: Callable[[], None],
        /,
    ) -> tuple[dict[str, float], list[Logprobs]]:
        """Train `step` on the fetched groups, as `ActorGroup.update`."""
        rank_minibatches = [mini[0] for mini in minibatches]
        used = group_numbers(rank_minibatches)
        used_advantages = {group: advantages[group] for group in used}
        # A weight sync that may be queued behind the update begins here on Ray; in one process
        # there is nothing to queue it behind, and `LocalSync.begin` does nothing.
        on_start()
        state, logprobs = self.rank.update(
            step, rank_minibatches, used_advantages, set(used) & set(recorded), kl_scale
        )
        return step_metrics([state]), [logprobs]

    def replay_weights(self) -> dict[str, np.ndarray]:
        return self.rank.trainer.replay_weights()

    @torch.no_grad()
    def stage(self) -> None:
        self.rank.trainer.stage()

    @torch.no_grad()
    def write(self, folder: str) -> dict[str, str]:
        return self.rank.trainer.write(folder)

    @torch.no_grad()
    def load(self, folder: str, step: int) -> None:
        self.rank.trainer.load(folder, step)

    def release_memory(self, parts: Sequence[str]) -> None:
        # Without parts, only the device's cached memory is freed, and a CPU has none.
        if parts or self._on_gpu:
            self.rank.trainer.memory.release(parts)

    def restore_memory(self) -> None:
        self.rank.trainer.memory.restore()

    def entries(self, restarts: int) -> list[dict[str, object]]:
        """Return no entry for `StatusFile`: the pool's is that of this process."""
        return []

    def stop(self) -> None:
        """Leave the process group."""
        self.rank.stop()


class LocalSync:
    """The `Sync` of a local run: copies the learner's weights into the engine, bucket by bucket.

    The first one compares fingerprints of what the learner has and what the engine then has.
    """

    def __init__(self, config: Config, learner: LocalLearner, engine: Engine) -> None:
        self._dtype = DTYPES[config.rollout.model.precision]
        self._learner = learner
        self._engine = engine
        self._checked = False

    def begin(self, version: int) -> None:
        """Do nothing: the call does it all."""

    @torch.no_grad()
    def __call__(self, version: int) -> dict[str, float]:
        """Load the weights into the engine as this version; returns the metrics `sync/…`."""
        start = time.perf_counter()
        labels: list[Label] = []
        trainer = self._learner.rank.trainer

        def buckets() -> Any:
            weights = trainer.weights(self._dtype, trainer.mesh.device)
            for bucket in group_by_size(weights, BUCKET_BYTES):
                labels.append(Label.of(bucket, not self._checked))
                # The engine copies a bucket before it takes the next, so one exists at a time.
                yield dict(bucket)

        self._engine.load_weights(buckets(), version)
        seconds = time.perf_counter() - start
        if not self._checked:
            for label in labels:
                fingerprint = self._engine.fingerprint(label.names)
                if fingerprint is not None:
                    label.compare(fingerprint, "in the engine")
            self._checked = True
        return {
            "sync/bytes": sum(label.nbytes for label in labels),
            "sync/bytes_share": 1.0,
            "sync/offer_seconds": 0.0,
            "sync/load_seconds": seconds,
        }
