"""The group of all actor ranks, which the controller calls as one.

A rank that dies or hangs takes the others with it: they wait for it in a collective. Every call
here therefore watches all ranks while it waits, and raises `ActorsLost`; the group is then of no
use but to be killed.
"""

import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from typing import Any

import ray
from ray.exceptions import RayTaskError

from rlinf_vl.actor.batch_types import RankMiniBatch, TurnKl
from rlinf_vl.actor.rank import group_numbers, step_metrics
from rlinf_vl.actor.worker import ActorWorker
from rlinf_vl.config.schema import Config
from rlinf_vl.errors import RunError, reason_of
from rlinf_vl.runtime.ray_process import ActorsLost, entry, kill, wait_for_all
from rlinf_vl.types import Prices, TurnAdvantages

log = logging.getLogger(__name__)

#: Seconds for a rank's process to begin, on a node that has its place: it imports torch and Ray.
IMPORT_TIMEOUT_S = 300.0


class ActorGroup:
    """The actor ranks of a run; `start` sets the attributes.

    Attributes:
        prices: cost of training in this model, for the packing of micro-batches.
        data_size: number of shares that a step's trajectories are divided into.
        _shares: number of each rank's share; ranks that share trajectories have the same.
    """

    prices: Prices
    data_size: int
    _shares: list[int]

    def __init__(
        self, config: Config, model_path: str, device: str, options: Sequence[dict[str, Any]]
    ) -> None:
        """Start the processes of the ranks; `options[rank]` are the Ray options that place each."""
        self.ranks = [
            ActorWorker.options(**option).remote(config, model_path, device, rank)
            for rank, option in enumerate(options)
        ]
        self._device = device
        self._strategy = config.actor.fsdp_config.strategy
        self._experts = config.actor.fsdp_config.expert_parallel_size
        self.heartbeat_timeout = config.runner.heartbeat_timeout
        self._processes = [rank.process.remote() for rank in self.ranks]
        # Beside the start of the rollout workers; an error comes again in `start`.
        for rank in self.ranks:
            rank.import_packages.remote()

    def placed(self, interrupted: Callable[[], bool]) -> bool:
        """Wait until the processes of all ranks have begun, or one has died.

        Return False if `interrupted` returned True before.

        Raises:
            ActorsLost: a process has not begun within `IMPORT_TIMEOUT_S`.
        """
        waiting = list(self._processes)
        deadline = time.monotonic() + IMPORT_TIMEOUT_S
        while waiting:
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=1)
            if waiting and interrupted():
                return False
            if waiting and time.monotonic() > deadline:
                rank = self._processes.index(waiting[0])
                raise ActorsLost(
                    f"actor rank {rank}: it did not begin within {IMPORT_TIMEOUT_S:g} s"
                )
        return True

    def start(self, total_steps: int) -> None:
        """Join the ranks and load the model, for a run of `total_steps`."""
        # A process that has not begun answers no heartbeat, and may have been stopped there.
        self.placed(lambda: False)
        processes = self.wait(self._processes, beating=False)
        (address,) = self.wait([self.ranks[0].listen.remote()])
        size = len(self.ranks)
        shard = (
            size if self._strategy == "fsdp2" else ranks_per_node([node for node, _ in processes])
        )
        if shard % self._experts:
            raise RunError(
                f"actor.fsdp_config.expert_parallel_size: {self._experts} does not divide the "
                f"{shard} ranks of a node, among which hsdp shares the weights; set fsdp2, or a "
                "size that does"
            )
        started = self.wait(
            [rank.start.remote(address, size, shard, total_steps) for rank in self.ranks]
        )
        self._shares = [share for share, *_ in started]
        self.data_size = 1 + max(self._shares)
        self.prices = started[0][1]
        log.info("what is trained:\n%s", started[0][2])

    def entries(self, restarts: int) -> list[dict[str, object]]:
        """Return an entry for each rank, for `StatusFile`; `restarts` counts those of all."""
        return [
            entry(f"actor {rank}", process, restarts)
            for rank, process in enumerate(self._processes)
        ]

    def wait(self, pending: Sequence[ray.ObjectRef], beating: bool = True) -> list[Any]:
        """Return the results of these calls, and watch the heartbeats of all ranks if `beating`."""
        ranks = {f"actor rank {rank}": actor for rank, actor in enumerate(self.ranks)}
        return wait_for_all(
            pending, ranks, heartbeat_timeout=self.heartbeat_timeout if beating else math.inf
        )

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method in each rank, and return the results by rank; see `ActorRank.call`."""
        return self.wait([rank.call.remote(method, *arguments) for rank in self.ranks])

    def kill(self) -> None:
        """Kill every rank's process, whatever it is doing."""
        for rank, process in zip(self.ranks, self._processes, strict=True):
            kill(rank, process)

    def fetch_groups(
        self, minibatches: Sequence[Sequence[RankMiniBatch]], groups: Sequence[ray.ObjectRef]
    ) -> list[int]:
        """Let each rank fetch the groups that it will train on or score, and no others.

        Args:
            minibatches: `minibatches[m][share]`: the trajectories that the ranks with that share
                train on in optimizer step m.
            groups: references to all groups of the step.

        Returns:
            Numbers of the groups that are lost.
        """
        pending = []
        for rank, share in zip(self.ranks, self._shares, strict=True):
            used_groups = group_numbers([mini[share] for mini in minibatches])
            pending.append(
                rank.fetch_groups.remote({group: groups[group] for group in used_groups})
            )
        return sorted(set().union(*self.wait(pending)))

    def update(
        self,
        step: int,
        minibatches: Sequence[Sequence[RankMiniBatch]],
        advantages: Sequence[Sequence[TurnAdvantages]],
        recorded: Collection[int] = (),
        kl_scale: float = 0.0,
        then: Callable[[], None] = lambda: None,
    ) -> tuple[dict[str, float], list[ray.ObjectRef]]:
        """Train `step` on the fetched groups.

        Args:
            minibatches: those of `fetch_groups`.
            recorded: numbers of the groups whose logprobs are returned.
            kl_scale: see `Trainer.update`.
            then: called once all ranks have been sent their update, before this waits for
                them; calls that it makes run after the update.

        Returns:
            The step's metrics, exact over all response tokens of all ranks; each rank's `Logprobs`.
        """
        pending = []
        for rank, share in zip(self.ranks, self._shares, strict=True):
            rank_minibatches = [mini[share] for mini in minibatches]
            # Two objects: logprobs stay in the object store, for whoever writes the trajectories.
            update = rank.update.options(num_returns=2)
            used_groups = set(group_numbers(rank_minibatches))
            # A step's advantages go to the ranks that train on them, not to all.
            used_advantages = {group: advantages[group] for group in used_groups}
            pending.append(
                update.remote(
                    step, rank_minibatches, used_advantages, used_groups & set(recorded), kl_scale
                )
            )
        then()
        metrics = step_metrics(self.wait([state for state, _ in pending]))
        return metrics, [logprobs for _, logprobs in pending]

    def replay_weights(self) -> ray.ObjectRef:
        """Let the ranks gather a small model's weights, and return rank 0's reference to them,
        without waiting: see `Trainer.replay_weights`."""
        return [rank.call.remote("trainer.replay_weights") for rank in self.ranks][0]

    def reference_kl(self, minibatches: Sequence[Sequence[RankMiniBatch]]) -> TurnKl:
        """Return the reference KL of all trajectories that the ranks are about to train on.

        `minibatches` are those of `fetch_groups`; see `Trainer.reference_kl`.
        """
        pending = []
        for rank, share in zip(self.ranks, self._shares, strict=True):
            pending.append(rank.reference_kl.remote([mini[share] for mini in minibatches]))
        merged: TurnKl = {}
        for rank_kl in self.wait(pending):
            merged |= rank_kl
        return merged

    def score(self, minibatch: Sequence[RankMiniBatch]) -> list[tuple[int, int, float, float]]:
        """Score every trajectory that `minibatch[share]` names, as `Trainer.score` does.

        Its groups are fetched already.
        """
        shares = zip(self.ranks, self._shares, strict=True)
        return sum(self.wait([rank.score.remote(minibatch[share]) for rank, share in shares]), [])

    def total_loss(self, minibatch: Sequence[RankMiniBatch]) -> tuple[float, int]:
        """Return Σ -logprob and the number of tokens of the trajectories in `minibatch[share]`.

        Their groups are fetched already; see `Trainer.total_loss`.
        """
        shares = zip(self.ranks, self._shares, strict=True)
        totals = self.wait([rank.total_loss.remote(minibatch[share]) for rank, share in shares])
        return sum(total for total, _ in totals), sum(n for _, n in totals)

    def release_memory(self, parts: Sequence[str]) -> None:
        """Let every rank move these parts to host memory, and free its device's cached memory.

        `parts`: of `rlinf_vl.actor.offload`. On a CPU without parts there is nothing to do.
        """
        if parts or self._device == "cuda":
            self.call("trainer.memory.release", parts)

    def restore_memory(self) -> None:
        self.call("trainer.memory.restore")

    def stage(self) -> None:
        """Let every rank copy its part of a checkpoint to host memory; then the weights may change.

        Raises:
            OSError: a rank could not.
        """
        try:
            self.call("trainer.stage")
        except RayTaskError as error:
            raise OSError(f"the state was not copied to host memory: {reason_of(error)}") from error

    def write(self, folder: str) -> dict[str, str]:
        """Let the ranks write the staged checkpoint into one folder or URL, also while they train.

        Returns:
            The SHA-256 of every file by its name in the folder.

        Raises:
            OSError: a rank could not write.
        """
        try:
            digests_by_rank = self.wait([rank.write.remote(folder) for rank in self.ranks])
        except RayTaskError as error:
            raise OSError(str(error)) from error
        merged: dict[str, str] = {}
        for digests in digests_by_rank:
            merged |= digests
        return merged

    def load(self, folder: str, step: int) -> None:
        """Let the ranks read the checkpoint of `step`, written by any number of them."""
        self.call("trainer.load", folder, step)

    def stop(self) -> None:
        """Leave the process group in order."""
        self.wait([rank.stop.remote() for rank in self.ranks])


def ranks_per_node(nodes: Sequence[str]) -> int:
    """Return how many ranks each node has, for `hsdp`; `nodes[rank]` is a node's id.

    Ranks with neighbouring numbers share the weights, so those of a node must be neighbours.

    Raises:
        RunError: a node has more ranks than another, or ranks that are not neighbours.
    """
    sizes = [len(list(ranks)) for _, ranks in groupby(nodes)]
    if len(set(sizes)) > 1 or len(sizes) > len(set(nodes)):
        raise RunError(
            "actor.fsdp_config.strategy: hsdp needs equally many actor ranks on every node, next "
            f"to each other; they are in runs of {', '.join(map(str, sizes))} on {len(set(nodes))} "
            "nodes. Set fsdp2, or give actor whole nodes in cluster.component_placement"
        )
    return sizes[0]
