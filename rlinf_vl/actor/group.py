"""The actor ranks as one: what the controller calls."""

from collections.abc import Sequence
from typing import Any

import ray

from rlinf_vl.actor.batches import RankMiniBatch
from rlinf_vl.actor.worker import ActorWorker
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
        """Join the ranks and load the model, for a run of so many steps; references to each rank's `Prices`."""
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

    def set_weight_sync(self, way: str, bucket_bytes: int) -> None:
        """How the weights will be sent: a value that `rlinf_vl.weights.choose` returns, and how much at once."""
        ray.get([rank.set_weight_sync.remote(way, bucket_bytes) for rank in self.ranks])

    def offer_weights(self, check: bool) -> list[Any]:
        """Labels of the buckets of the trainable weights, with fingerprints if `check`: for the rollout workers to take."""
        offers = ray.get([rank.offer_weights.remote(check) for rank in self.ranks])
        return [label for offer in offers for label in offer]

    def deliver_weights(self) -> list[ray.ObjectRef]:
        """Send what was offered, while the workers take it; references to wait for."""
        return [rank.deliver_weights.remote() for rank in self.ranks]

    def release_weights(self) -> None:
        """Every worker has taken what was offered."""
        ray.get([rank.release_weights.remote() for rank in self.ranks])

    def spare_weights(self) -> list[ray.ObjectRef]:
        """The weights sent last, as buckets in the object store."""
        return ray.get(self.ranks[0].spare_weights.remote())

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
