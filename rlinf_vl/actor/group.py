"""The actor ranks as one: what the controller calls."""

from collections.abc import Sequence
from typing import Any

import ray

from rlinf_vl.actor.worker import ActorWorker, RankMiniBatch
from rlinf_vl.config.schema import Config
from rlinf_vl.observe.metrics import MetricSums


class ActorGroup:
    """All ranks of the learner. `options[rank]` are the Ray options that place each."""

    def __init__(self, config: Config, model_path: str, device: str, options: Sequence[dict[str, Any]]) -> None:
        self.world_size = len(options)
        self.ranks = [
            ActorWorker.options(**option).remote(config, model_path, device, rank, self.world_size)
            for rank, option in enumerate(options)
        ]

    def start(self, total_steps: int) -> list[ray.ObjectRef]:
        """Join the ranks and load the model, for a run of so many steps; returns references to wait for."""
        host, port = ray.get(self.ranks[0].address.remote())
        return [rank.start.remote(host, port, total_steps) for rank in self.ranks]

    def update(
        self,
        minibatches: Sequence[Sequence[RankMiniBatch]],
        groups: Sequence[ray.ObjectRef],
        advantages: Sequence[tuple[float, ...]],
    ) -> dict[str, float]:
        """Train one step; `minibatches[m][rank]`. Each rank gets references to the groups it trains on only.

        Returns the step's metrics, exact over all response tokens of all ranks.
        """
        pending = []
        for rank, actor in enumerate(self.ranks):
            mine = [mini[rank] for mini in minibatches]
            named = sorted({item.group for mini in mine for items in mini.micro_batches for item in items})
            pending.append(actor.update.remote(mine, {g: groups[g] for g in named}, {g: advantages[g] for g in named}))
        sums = MetricSums()
        for state in ray.get(pending):
            sums.merge(MetricSums.from_state(state))
        metrics = sums.compute()
        if "actor/tis_square" in metrics:
            square = metrics.pop("actor/tis_square")
            # Kish's effective sample size as a share of the tokens: (Σw)² / (n Σw²)
            metrics["actor/tis_ess"] = metrics["actor/tis_mean"] ** 2 / square if square > 0 else 0.0
        return metrics

    def score(
        self, minibatch: Sequence[RankMiniBatch], groups: Sequence[ray.ObjectRef]
    ) -> list[tuple[int, int, float, float]]:
        """`ActorRank.score` of every trajectory that `minibatch[rank]` names."""
        pending = []
        for actor, mine in zip(self.ranks, minibatch, strict=True):
            named = sorted({item.group for items in mine.micro_batches for item in items})
            pending.append(actor.score.remote(mine, {g: groups[g] for g in named}))
        return [row for rows in ray.get(pending) for row in rows]

    def publish_weights(self) -> list[ray.ObjectRef]:
        """References to buckets of the trainable weights, in the engine's dtype."""
        return ray.get([rank.publish_weights.remote() for rank in self.ranks])[0]

    def offload(self) -> None:
        ray.get([rank.offload.remote() for rank in self.ranks])

    def onload(self) -> None:
        ray.get([rank.onload.remote() for rank in self.ranks])

    def save(self, folder: str) -> None:
        ray.get([rank.save.remote(folder) for rank in self.ranks])

    def load(self, folder: str) -> None:
        ray.get([rank.load.remote(folder) for rank in self.ranks])

    def stop(self) -> None:
        """Leave the process group in order."""
        ray.get([rank.stop.remote() for rank in self.ranks])
