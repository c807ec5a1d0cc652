"""The actor ranks as one: what the controller calls.

A rank that dies or hangs takes the others with it: they wait for it in a collective. Every call here therefore watches all
ranks while it waits, and raises `ActorsLost`; the group is then of no use but to be killed.
"""

from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from rlinf_vl.actor.batches import RankMiniBatch
from rlinf_vl.actor.worker import ActorWorker
from rlinf_vl.config.schema import Config
from rlinf_vl.errors import RunError
from rlinf_vl.observe.metrics import MetricSums
from rlinf_vl.runtime.ray_process import HEARTBEAT_PERIOD_S, Heartbeat, cause_of, entry, find_dead, kill
from rlinf_vl.types import Prices


class ActorsLost(RuntimeError):
    """An actor rank has died or hangs."""


class ActorGroup:
    def __init__(self, config: Config, model_path: str, device: str, options: Sequence[dict[str, Any]]) -> None:
        """`options[rank]` are the Ray options that place each rank."""
        self.prices = Prices()  # what things cost in the model, once `start` knows
        self.data_size = 0  # shares that a step's trajectories are divided into, once `start` knows
        self.ranks = [
            ActorWorker.options(**option).remote(config, model_path, device, rank)
            for rank, option in enumerate(options)
        ]
        self._data_ranks: list[int] = []  # of each rank
        self._recorded: list[ray.ObjectRef] = []
        self._strategy = config.actor.fsdp_config.strategy
        self._processes = [rank.process.remote() for rank in self.ranks]
        self._hearts = [Heartbeat(rank.heartbeat.remote, config.runner.heartbeat_timeout) for rank in self.ranks]

    def start(self, total_steps: int) -> None:
        """Join the ranks and load the model, for a run of so many steps."""
        processes = self.wait(self._processes, beating=False)  # a process that still imports answers no heartbeat
        (address,) = self.wait([self.ranks[0].address.remote()])
        size = len(self.ranks)
        shard = size if self._strategy == "fsdp2" else ranks_per_node([node for node, _ in processes])
        started = self.wait([rank.start.remote(address, size, shard, total_steps) for rank in self.ranks])
        self._data_ranks = [data_rank for data_rank, _ in started]
        self.data_size = 1 + max(self._data_ranks)
        self.prices = started[0][1]

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
        """Let each rank fetch the groups that it will train on or score, and no others. Returns the lost groups.

        `minibatches[m][data_rank]`: what the ranks with that share of the trajectories train in optimizer step m.
        """
        pending = []
        for rank, share in zip(self.ranks, self._data_ranks, strict=True):
            items = (item for mini in minibatches for items in mini[share].micro_batches for item in items)
            pending.append(rank.fetch_groups.remote({item.group: groups[item.group] for item in items}))
        return sorted({group for lost in self.wait(pending) for group in lost})

    def update(
        self,
        step: int,
        minibatches: Sequence[Sequence[RankMiniBatch]],
        advantages: Sequence[tuple[float, ...]],
        recorded: Collection[int] = (),
    ) -> dict[str, float]:
        """Train `step` on the fetched groups; `minibatches` are those of `fetch_groups`. Returns the step's metrics, exact over
        all response tokens of all ranks. Of the groups `recorded` there are `recorded_logprobs` then."""
        pending = []
        for rank, share in zip(self.ranks, self._data_ranks, strict=True):
            mine = [mini[share] for mini in minibatches]
            update = rank.update.options(num_returns=2)
            pending.append(update.remote(step, mine, advantages, frozenset(recorded)))
        self._recorded = [logprobs for _, logprobs in pending]
        metrics = MetricSums.merged(self.wait([state for state, _ in pending])).compute()
        if "actor/tis_square" in metrics:
            square = metrics.pop("actor/tis_square")
            # Kish's effective sample size as a share of the tokens: (Σw)² / (n Σw²)
            metrics["actor/tis_ess"] = metrics["actor/tis_mean"] ** 2 / square if square > 0 else 0.0
        return metrics

    def recorded_logprobs(self) -> list[ray.ObjectRef]:
        """References to each rank's `Logprobs`, of the last `update`."""
        return self._recorded

    def score(self, minibatch: Sequence[RankMiniBatch]) -> list[tuple[int, int, float, float]]:
        """`Trainer.score` of every trajectory that `minibatch[data_rank]` names; its groups are fetched."""
        shares = zip(self.ranks, self._data_ranks, strict=True)
        found = self.wait([rank.score.remote(minibatch[share]) for rank, share in shares])
        return [row for rows in found for row in rows]

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        """What `method` of each rank's parts returns: see `ActorRank.call`."""
        return self.wait([rank.call.remote(method, *arguments) for rank in self.ranks])

    def set_weight_sync(self, strategy: str, bucket_bytes: int) -> None:
        """How the weights will be sent: a value that `rlinf_vl.transport.resolve_weight_sync` returns, and how much at once."""
        self.wait([rank.set_weight_sync.remote(strategy, bucket_bytes) for rank in self.ranks])

    def offer_weights(self, check: bool) -> list[Any]:
        """Labels of the buckets of the trainable weights, with fingerprints if `check`: for the rollout workers to take."""
        return [label for offer in self._call("sender.offer", check) for label in offer]

    def deliver_weights(self) -> list[ray.ObjectRef]:
        """Send what was offered, while the workers take it; references to wait for."""
        return [rank.call.remote("sender.deliver") for rank in self.ranks]

    def release_weights(self) -> None:
        """Every worker has taken what was offered."""
        self._call("sender.release")

    def spare_weights(self) -> list[ray.ObjectRef]:
        """The weights sent last, as buckets in the object store."""
        return self.wait([self.ranks[0].call.remote("sender.spare")])[0]

    def release_memory(self, parts: Sequence[str]) -> None:
        """Every rank moves these parts (`rlinf_vl.actor.offload`) to host memory, and gives back what its device has cached."""
        self._call("trainer.memory.release", parts)

    def restore_memory(self) -> None:
        self._call("trainer.memory.restore")

    def save(self, folder: str) -> None:
        """Let the ranks write a checkpoint into `folder` together; OSError where one could not."""
        try:
            self._call("trainer.save", folder)
        except RayTaskError as error:
            raise OSError(str(error)) from error

    def load(self, folder: str, step: int) -> None:
        """Let the ranks read the checkpoint of `step`, written by any number of them."""
        self._call("trainer.load", folder, step)

    def stop(self) -> None:
        """Leave the process group in order."""
        self.wait([rank.stop.remote() for rank in self.ranks])


def ranks_per_node(nodes: Sequence[str]) -> int:
    """How many ranks each node has, for `hsdp`, whose neighbours by number share the weights; `nodes[rank]` is a node's id.

    Raises:
        RunError: a node has more ranks than another, or ranks that are not neighbours.
    """
    sizes = [len(list(ranks)) for _, ranks in groupby(nodes)]
    if len(set(sizes)) > 1 or len(sizes) > len(set(nodes)):
        raise RunError(
            "actor.fsdp_config.strategy: hsdp needs equally many actor ranks on every node, next to each other; they are in runs"
            f" of {', '.join(map(str, sizes))} on {len(set(nodes))} nodes. Set fsdp2, or give actor whole nodes in"
            " cluster.component_placement"
        )
    return sizes[0]
