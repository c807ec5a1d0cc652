"""The actor ranks as one: what the controller calls.

A rank that dies or hangs takes the others with it: they wait for it in a collective. Every call here therefore watches all
ranks while it waits, and raises `ActorsLost`; the group is then of no use but to be killed.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from rlinf_vl.actor.batches import RankMiniBatch
from rlinf_vl.actor.worker import ActorWorker
from rlinf_vl.config.schema import Config
from rlinf_vl.observe.metrics import MetricSums
from rlinf_vl.runtime.ray_process import HEARTBEAT_PERIOD_S, Heartbeat, cause_of, entry, find_dead, kill
from rlinf_vl.types import Prices


class ActorsLost(RuntimeError):
    """An actor rank has died or hangs."""


class ActorGroup:
    """All ranks of the learner. `options[rank]` are the Ray options that place each."""

    def __init__(self, config: Config, model_path: str, device: str, options: Sequence[dict[str, Any]]) -> None:
        self.world_size = len(options)
        self.prices = Prices()  # `start` sets them
        self.ranks = [
            ActorWorker.options(**option).remote(config, model_path, device, rank, self.world_size)
            for rank, option in enumerate(options)
        ]
        self._processes = [rank.process.remote() for rank in self.ranks]
        self._hearts = [Heartbeat(rank.heartbeat.remote, config.runner.heartbeat_timeout) for rank in self.ranks]

    def start(self, total_steps: int) -> Prices:
        """Join the ranks and load the model, for a run of so many steps; what things cost in it."""
        self.wait(self._processes, beating=False)  # a process that still imports answers no heartbeat
        (host, port), *_ = self.wait([self.ranks[0].address.remote()])
        self.prices = self.wait([rank.start.remote(host, port, total_steps) for rank in self.ranks])[0]
        return self.prices

    def entries(self, restarts: int) -> list[dict[str, object]]:
        """A line on each rank, for `StatusFile`, after so many restarts of all of them."""
        return [entry(f"actor {rank}", process, restarts) for rank, process in enumerate(self._processes)]

    def wait(self, pending: Sequence[ray.ObjectRef], beating: bool = True) -> list[Any]:
        """What these calls of ranks return.

        Raises:
            ActorsLost: a rank died, or (`beating`) did not answer its heartbeat in time.
            Exception: what a call raised, if all ranks live.
        """
        for heart in self._hearts:
            heart.restart()
        waiting = list(pending)
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=1, timeout=HEARTBEAT_PERIOD_S / 5)
            for reference in done:
                try:
                    ray.get(reference)
                except RayActorError as error:
                    raise ActorsLost(self._named(error)) from error
                except RayTaskError as error:
                    if (dead := find_dead(self.ranks)) is not None:  # it may have failed because of that one
                        raise ActorsLost(self._named(dead)) from error
                    raise
            for rank, heart in enumerate(self._hearts if beating else ()):
                if reason := heart.failure():
                    raise ActorsLost(f"actor rank {rank}: {reason}")
        return ray.get(list(pending))

    def _named(self, error: RayActorError) -> str:
        rank = next((i for i, r in enumerate(self.ranks) if r._actor_id.hex() == error.actor_id), None)
        return f"actor rank {'?' if rank is None else rank} died: {cause_of(error)}"

    def kill(self) -> None:
        """End every rank's process, whatever it does."""
        for rank, process in zip(self.ranks, self._processes, strict=True):
            kill(rank, process)

    def fetch_groups(
        self, minibatches: Sequence[Sequence[RankMiniBatch]], groups: Sequence[ray.ObjectRef]
    ) -> list[int]:
        """Let each rank fetch the groups that `minibatches[m][rank]` name, and no others. Returns the lost groups."""
        pending = []
        for rank, actor in enumerate(self.ranks):
            named = _groups_of(mini[rank] for mini in minibatches)
            pending.append(actor.fetch_groups.remote({g: groups[g] for g in named}))
        return sorted({group for lost in self.wait(pending) for group in lost})

    def update(
        self,
        step: int,
        minibatches: Sequence[Sequence[RankMiniBatch]],
        advantages: Sequence[tuple[float, ...]],
        recorded: Collection[int] = (),
    ) -> dict[str, float]:
        """Train step `step` (its name in traces); `minibatches[m][rank]`, whose groups the ranks have fetched. The ranks
        keep the logprobs of the groups `recorded` for `recorded_logprobs`.

        Returns the step's metrics, exact over all response tokens of all ranks.
        """
        pending = []
        for rank, actor in enumerate(self.ranks):
            mine = [mini[rank] for mini in minibatches]
            groups = _groups_of(mine)
            named = frozenset(recorded) & frozenset(groups)
            pending.append(actor.update.remote(step, mine, {g: advantages[g] for g in groups}, named))
        sums = MetricSums()
        for state in self.wait(pending):
            sums.merge(MetricSums.from_state(state))
        metrics = sums.compute()
        if "actor/tis_square" in metrics:
            square = metrics.pop("actor/tis_square")
            # Kish's effective sample size as a share of the tokens: (Σw)² / (n Σw²)
            metrics["actor/tis_ess"] = metrics["actor/tis_mean"] ** 2 / square if square > 0 else 0.0
        return metrics

    def recorded_logprobs(self) -> list[ray.ObjectRef]:
        """References to each rank's `ActorRank.recorded_logprobs`."""
        return [rank.recorded_logprobs.remote() for rank in self.ranks]

    def score(self, minibatch: Sequence[RankMiniBatch]) -> list[tuple[int, int, float, float]]:
        """`ActorRank.score` of every trajectory that `minibatch[rank]` names."""
        pending = [actor.score.remote(mine) for actor, mine in zip(self.ranks, minibatch, strict=True)]
        return [row for rows in self.wait(pending) for row in rows]

    def set_weight_sync(self, way: str, bucket_bytes: int) -> None:
        """How the weights will be sent: a value that `rlinf_vl.transport.resolve_weight_sync` returns, and how much at once."""
        self.wait([rank.set_weight_sync.remote(way, bucket_bytes) for rank in self.ranks])

    def offer_weights(self, check: bool) -> list[Any]:
        """Labels of the buckets of the trainable weights, with fingerprints if `check`: for the rollout workers to take."""
        offers = self.wait([rank.offer_weights.remote(check) for rank in self.ranks])
        return [label for offer in offers for label in offer]

    def deliver_weights(self) -> list[ray.ObjectRef]:
        """Send what was offered, while the workers take it; references to wait for."""
        return [rank.deliver_weights.remote() for rank in self.ranks]

    def release_weights(self) -> None:
        """Every worker has taken what was offered."""
        self.wait([rank.release_weights.remote() for rank in self.ranks])

    def spare_weights(self) -> list[ray.ObjectRef]:
        """The weights sent last, as buckets in the object store."""
        return self.wait([self.ranks[0].spare_weights.remote()])[0]

    def release_memory(self, parts: Sequence[str]) -> None:
        """Every rank moves these parts (`rlinf_vl.actor.offload`) to host memory, and gives back what its device has cached."""
        self.wait([rank.release_memory.remote(parts) for rank in self.ranks])

    def restore_memory(self) -> None:
        """Every rank takes back what it has moved away."""
        self.wait([rank.restore_memory.remote() for rank in self.ranks])

    def save(self, folder: str) -> None:
        """Have the ranks write a checkpoint into `folder` together; OSError where one could not."""
        try:
            self.wait([rank.save.remote(folder) for rank in self.ranks])
        except RayTaskError as error:
            raise OSError(str(error)) from error

    def load(self, folder: str, step: int) -> None:
        """Have the ranks read the checkpoint of `step`, written by any number of them."""
        self.wait([rank.load.remote(folder, step) for rank in self.ranks])

    def stop(self) -> None:
        """Leave the process group in order."""
        self.wait([rank.stop.remote() for rank in self.ranks])


def _groups_of(minibatches: Iterable[RankMiniBatch]) -> list[int]:
    """The groups that one rank's mini-batches name."""
    return sorted({item.group for mini in minibatches for items in mini.micro_batches for item in items})
