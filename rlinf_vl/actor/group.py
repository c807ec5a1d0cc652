"""The actor ranks as one: what the controller calls.

A rank that dies or hangs takes the others with it: they wait for it in a collective. Every call here therefore watches all
ranks while it waits, and raises `ActorsLost`; the group is then of no use but to be killed.
"""

import logging
import math
from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from typing import Any

import ray
from ray.exceptions import RayTaskError

from rlinf_vl.actor.messages import RankMiniBatch, TurnKl
from rlinf_vl.actor.worker import ActorWorker
from rlinf_vl.config.schema import Config
from rlinf_vl.errors import RunError, reason_of
from rlinf_vl.observe.metrics import MetricSums
from rlinf_vl.runtime.ray_process import entry, kill, wait_for_all
from rlinf_vl.types import Prices

log = logging.getLogger(__name__)


class ActorGroup:
    prices: Prices  #: what things cost in the model; from `start` on, as are those below
    data_size: int  #: shares that a step's trajectories are divided into
    _shares: list[int]  #: the number of each rank's share

    def __init__(self, config: Config, model_path: str, device: str, options: Sequence[dict[str, Any]]) -> None:
        """`options[rank]` are the Ray options that place each rank."""
        self.ranks = [
            ActorWorker.options(**option).remote(config, model_path, device, rank)
            for rank, option in enumerate(options)
        ]
        self._device = device
        self._strategy = config.actor.fsdp_config.strategy
        self.heartbeat_timeout = config.runner.heartbeat_timeout
        self._processes = [rank.process.remote() for rank in self.ranks]

    def placed(self, interrupted: Callable[[], bool]) -> bool:
        """Wait until the processes of all ranks have begun, or one has died; False: `interrupted` said so."""
        waiting = list(self._processes)
        while waiting:
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=1)
            if waiting and interrupted():
                return False
        return True

    def start(self, total_steps: int) -> None:
        """Join the ranks and load the model, for a run of so many steps."""
        processes = self.wait(self._processes, beating=False)  # a process that still imports answers no heartbeat
        (address,) = self.wait([self.ranks[0].listen.remote()])
        size = len(self.ranks)
        shard = size if self._strategy == "fsdp2" else ranks_per_node([node for node, _ in processes])
        started = self.wait([rank.start.remote(address, size, shard, total_steps) for rank in self.ranks])
        self._shares = [share for share, *_ in started]
        self.data_size = 1 + max(self._shares)
        self.prices = started[0][1]
        log.info("what is trained:\n%s", started[0][2])

    def entries(self, restarts: int) -> list[dict[str, object]]:
        """A line on each rank, for `StatusFile`, after so many restarts of all of them."""
        return [entry(f"actor {rank}", process, restarts) for rank, process in enumerate(self._processes)]

    def wait(self, pending: Sequence[ray.ObjectRef], beating: bool = True) -> list[Any]:
        """What these calls of ranks return: `wait_for_all`, with an eye on the heartbeats of all ranks if `beating`."""
        ranks = {f"actor rank {rank}": actor for rank, actor in enumerate(self.ranks)}
        return wait_for_all(pending, ranks, heartbeat_timeout=self.heartbeat_timeout if beating else math.inf)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """What a method returns in each rank: see `ActorRank.call`."""
        return self.wait([rank.call.remote(method, *arguments) for rank in self.ranks])

    def kill(self) -> None:
        """End every rank's process, whatever it does."""
        for rank, process in zip(self.ranks, self._processes, strict=True):
            kill(rank, process)

    def fetch_groups(
        self, minibatches: Sequence[Sequence[RankMiniBatch]], groups: Sequence[ray.ObjectRef]
    ) -> list[int]:
        """Let each rank fetch the groups that it will train on or score, and no others. Returns the lost groups.

        `minibatches[m][share]`: what the ranks with that share of the trajectories train on in optimizer step m.
        """
        pending = []
        for rank, share in zip(self.ranks, self._shares, strict=True):
            items = (item for mini in minibatches for items in mini[share].micro_batches for item in items)
            pending.append(rank.fetch_groups.remote({item.group: groups[item.group] for item in items}))
        return sorted({group for lost in self.wait(pending) for group in lost})

    def update(
        self,
        step: int,
        minibatches: Sequence[Sequence[RankMiniBatch]],
        advantages: Sequence[Sequence[Sequence[float]]],
        recorded: Collection[int] = (),
        kl_scale: float = 0.0,
        then: Callable[[], None] = lambda: None,
    ) -> tuple[dict[str, float], list[ray.ObjectRef]]:
        """Train `step` on the fetched groups; `minibatches` are those of `fetch_groups`. `then` is called when the ranks have been
        asked to: what it asks of them comes next.

        Returns the step's metrics, exact over all response tokens of all ranks, and each rank's `Logprobs` of the groups `recorded`.
        """
        pending = []
        for rank, share in zip(self.ranks, self._shares, strict=True):
            mine = [mini[share] for mini in minibatches]
            update = rank.update.options(num_returns=2)
            named = {item.group for mini in mine for items in mini.micro_batches for item in items}
            own = {group: advantages[group] for group in named}
            pending.append(update.remote(step, mine, own, named & set(recorded), kl_scale))
        then()
        metrics = MetricSums.merged(self.wait([state for state, _ in pending])).compute()
        if "actor/tis_square" in metrics:
            square = metrics.pop("actor/tis_square")
            # Kish's effective sample size as a share of the tokens: (Σw)² / (n Σw²)
            metrics["actor/tis_ess"] = metrics["actor/tis_mean"] ** 2 / square if square > 0 else 0.0
        return metrics, [logprobs for _, logprobs in pending]

    def reference_kl(self, minibatches: Sequence[Sequence[RankMiniBatch]]) -> TurnKl:
        """`Trainer.reference_kl` of all that the ranks are about to train on; `minibatches` are those of `fetch_groups`."""
        pending = []
        for rank, share in zip(self.ranks, self._shares, strict=True):
            pending.append(rank.reference_kl.remote([mini[share] for mini in minibatches]))
        return {trajectory: turns for found in self.wait(pending) for trajectory, turns in found.items()}

    def score(self, minibatch: Sequence[RankMiniBatch]) -> list[tuple[int, int, float, float]]:
        """`Trainer.score` of every trajectory that `minibatch[share]` names; its groups are fetched."""
        shares = zip(self.ranks, self._shares, strict=True)
        return sum(self.wait([rank.score.remote(minibatch[share]) for rank, share in shares]), [])

    def release_memory(self, parts: Sequence[str]) -> None:
        """Let every rank move these parts (`rlinf_vl.actor.offload`) to host memory, and give back what its device has cached: on a
        CPU nothing."""
        if parts or self._device == "cuda":
            self.call("trainer.memory.release", parts)

    def restore_memory(self) -> None:
        self.call("trainer.memory.restore")

    def stage(self) -> None:
        """Let every rank copy its part of a checkpoint to host memory; then the weights may change. OSError where a rank could
        not."""
        try:
            self.call("trainer.stage")
        except RayTaskError as error:
            raise OSError(f"the state was not copied to host memory: {reason_of(error)}") from error

    def write(self, folder: str) -> dict[str, str]:
        """Let the ranks write what they staged into a folder or URL together, also while they train on. Returns the SHA-256 of every
        file by its name there; OSError where a rank could not."""
        try:
            written = self.wait([rank.write.remote(folder) for rank in self.ranks])
        except RayTaskError as error:
            raise OSError(str(error)) from error
        return {name: digest for files in written for name, digest in files.items()}

    def load(self, folder: str, step: int) -> None:
        """Let the ranks read the checkpoint of `step`, written by any number of them."""
        self.call("trainer.load", folder, step)

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
