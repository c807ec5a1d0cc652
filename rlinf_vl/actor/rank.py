"""One rank: gives a `Trainer` its groups. No Ray.

transformers and FSDP are imported when a rank starts: the controller, which names this class, needs
neither and would wait seconds for them.
"""

import logging
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rlinf_vl.actor.batch_types import Advantages, Logprobs, RankMiniBatch, TurnKl
from rlinf_vl.config.schema import Config
from rlinf_vl.observe.metrics import MetricSums
from rlinf_vl.observe.spans import profiler
from rlinf_vl.runtime.loading import freeze_loaded
from rlinf_vl.runtime.run_folder import run_folder
from rlinf_vl.transport.rendezvous import Store, find
from rlinf_vl.types import Group, Prices

if TYPE_CHECKING:
    from rlinf_vl.actor.batches import ReferencePass
    from rlinf_vl.actor.trainer import Trainer

log = logging.getLogger(__name__)


class Rank:
    """A rank and its trainer.

    Attributes:
        trainer: from `start` on.
        store: the one that all ranks meet in, if this rank has opened it.
        groups: those of the coming step, by number.
        reference_pass: of the coming step, with a KL in the reward.
    """

    trainer: "Trainer"

    def __init__(self, config: Config, model_path: str, device: str, rank: int) -> None:
        torch.manual_seed(config.runner.seed)
        self.config = config
        self.model_path = model_path
        self.device = device
        self.rank = rank
        self.store: Store | None = None
        self.groups: dict[int, Group] = {}
        self.reference_pass: ReferencePass | None = None

    def start(
        self, address: tuple[str, int] | None, size: int, shard: int, total_steps: int
    ) -> tuple[int, Prices, str]:
        """Join the ranks, load the model and shard it. Collective.

        Args:
            address: of the store that the ranks meet in; None for a single rank.
            size: number of ranks.
            shard: number of ranks that share the weights.
            total_steps: of the run.

        Returns:
            The number of this rank's share of a step's trajectories, the costs of training in this
            model, and a table of what is trained.
        """
        from rlinf_vl.actor.load import load_trainer
        from rlinf_vl.actor.mesh import Mesh, join_ranks
        from rlinf_vl.actor.optimizer import parts_table

        store = self.store or (find(address) if address else None)
        join_ranks(self.device, self.rank, size, store)
        actor = self.config.actor
        mesh = Mesh.make(
            self.device,
            context=actor.context_parallel_size,
            shard=shard,
            experts=actor.fsdp_config.expert_parallel_size,
        )
        self.trainer = load_trainer(self.config, self.model_path, mesh, total_steps)
        policy, trained = self.trainer.policy, self.trainer.trains_vision
        precision = self.config.actor.fsdp_config.mixed_precision
        log.info("rank %d of %d ready on %s, %s", self.rank, size, self.device, precision)
        table = parts_table(policy, mesh, self.config.actor)
        freeze_loaded()
        return mesh.data_rank, policy.family.prices(policy.model.config, trained), table

    def update(
        self,
        step: int,
        minibatches: Sequence[RankMiniBatch],
        advantages: Advantages,
        recorded: set[int],
        kl_scale: float,
    ) -> tuple[dict, Logprobs]:
        """Run `Trainer.update` on the groups, and release them.

        Returns:
            The state of this rank's metrics, and logprobs of the groups `recorded`.
        """
        runner = self.config.runner
        if runner.generates_ahead:
            check_fresh(self.groups.values(), step - 1 - runner.max_staleness)
        # Distinct for every pair of the run's seed and a step.
        seed = 1_000_003 * runner.seed + step
        profiled = self.rank == 0 and step in runner.profile.steps
        with profiler(run_folder(self.config), step, self.rank) if profiled else nullcontext():
            sums, logprobs = self.trainer.update(
                self.groups,
                minibatches,
                advantages,
                recorded,
                self.reference_pass,
                kl_scale,
                seed,
                version=step - 1,
            )
        # Freed before the next groups arrive: a step's images may fill gigabytes.
        self.groups, self.reference_pass = {}, None
        return sums.state(), logprobs

    def reference_kl(self, minibatches: Sequence[RankMiniBatch]) -> TurnKl:
        kl, self.reference_pass = self.trainer.reference_kl(self.groups, minibatches)
        return kl

    def score(self, mini: RankMiniBatch) -> list[tuple[int, int, float, float]]:
        return self.trainer.score(self.groups, mini)

    def score_at(
        self, minibatch: Sequence[RankMiniBatch], temperature: float
    ) -> list[tuple[int, int, float, float]]:
        """Score as if samples had been drawn at another temperature; `minibatch[share]`."""
        policy = self.trainer.policy
        former, policy.temperature = policy.temperature, temperature
        try:
            return self.score(minibatch[self.trainer.mesh.data_rank])
        finally:
            policy.temperature = former

    def fingerprint(self) -> int:
        """Return the fingerprint of this rank's part of the weights and of the optimizer's
        state."""
        from torch.distributed.tensor import DTensor

        from rlinf_vl.weights.buckets import fingerprint

        states = [self.trainer.optimizer.state.get(p, {}) for p in self.trainer.policy.parameters()]
        values = [value for state in states for _, value in sorted(state.items())]
        tensors = (
            x.detach() for x in (*self.trainer.policy.parameters(), *values) if torch.is_tensor(x)
        )
        return fingerprint(x.to_local() if isinstance(x, DTensor) else x for x in tensors)

    def total_loss(self, mini: RankMiniBatch) -> tuple[float, int]:
        total = self.trainer.total_loss(self.groups, mini)
        self.groups = {}
        return total

    def stop(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def check_fresh(groups: Iterable[Group], oldest: int) -> None:
    """Assert that no sampled token is from weights before version `oldest`."""
    for group in groups:
        for sequence in group.sequences:
            versions = sequence.versions[sequence.loss_mask]
            assert not versions.size or versions.min() >= oldest, (
                f"{group.id} has tokens of version {versions.min()}; runner.max_staleness allows "
                f"{oldest} and later"
            )


def group_numbers(minibatches: Iterable[RankMiniBatch]) -> list[int]:
    """Return the numbers of the groups that these mini-batches train on, in the order of use."""
    numbers: dict[int, None] = {}
    for mini in minibatches:
        for items in mini.micro_batches:
            numbers.update((item.group, None) for item in items)
    return list(numbers)


def step_metrics(states: Sequence[dict]) -> dict[str, float]:
    """Return the metrics of a step, exact over the tokens of all ranks; `states`: of their sums."""
    metrics = MetricSums.merged(states).compute()
    if "actor/tis_square" in metrics:
        square = metrics.pop("actor/tis_square")
        # Kish's effective sample size as a share of the tokens: (Σw)² / (n Σw²)
        metrics["actor/tis_ess"] = metrics["actor/tis_mean"] ** 2 / square if square > 0 else 0.0
    return metrics
