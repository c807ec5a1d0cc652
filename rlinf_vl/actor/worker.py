"""One rank of the actor group: a Ray actor that gives a `Trainer` its groups and sends its weights.

The rank's process imports transformers and FSDP when it begins. The controller, which names this
class, needs neither and would wait seconds for them.
"""

import importlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import ray
import torch
import torch.distributed as dist

from rlinf_vl.actor.messages import Advantages, Logprobs, RankMiniBatch, TurnKl
from rlinf_vl.config.schema import Config
from rlinf_vl.observe.spans import flush_spans, profiler, record_spans, span
from rlinf_vl.runtime.ray_process import freeze_loaded, own_process, quick_imports, where
from rlinf_vl.runtime.run_folder import run_folder
from rlinf_vl.transport.groups import fetch_surviving
from rlinf_vl.transport.rendezvous import Store, find, listen
from rlinf_vl.transport.sender import Sender
from rlinf_vl.transport.strategies import SENDERS
from rlinf_vl.types import Group, Prices

if TYPE_CHECKING:
    from rlinf_vl.actor.trainer import Trainer

log = logging.getLogger(__name__)


class ActorRank:
    """The Ray actor of one rank.

    Attributes:
        trainer: from `start` on.
        sender: of weights; from `set_weight_sync` on.
        groups: those fetched for the coming step, by number.
    """

    trainer: "Trainer"
    sender: Sender

    def __init__(self, config: Config, model_path: str, device: str, rank: int) -> None:
        own_process(config.cluster.cpu_threads, device)
        with quick_imports():
            importlib.import_module("rlinf_vl.actor.load")
        torch.manual_seed(config.runner.seed)
        self.config = config
        self.model_path = model_path
        self.device = device
        self.rank = rank
        self.store: Store | None = None
        self.groups: dict[int, Group] = {}
        record_spans(run_folder(config), f"actor {rank}")

    @ray.method(concurrency_group="health")
    def process(self) -> tuple[str, int]:
        """Return (node id, process id) of this rank.

        It answers while the process lives and runs, whatever it is doing: this is the heartbeat.
        """
        return where()

    def listen(self) -> tuple[str, int]:
        """Open the store that all ranks meet in, and return its address."""
        self.store, address = listen(ray.util.get_node_ip_address())
        return address

    def start(
        self, address: tuple[str, int], size: int, shard: int, total_steps: int
    ) -> tuple[int, Prices, str]:
        """Join the ranks, load the model and shard it. Collective.

        Args:
            address: of the store that the ranks meet in.
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

        join_ranks(self.device, self.rank, size, self.store or find(address))
        mesh = Mesh.make(self.device, context=self.config.actor.context_parallel_size, shard=shard)
        self.trainer = load_trainer(self.config, self.model_path, mesh, total_steps)
        policy, trained = self.trainer.policy, self.trainer.trains_vision
        precision = self.config.actor.fsdp_config.mixed_precision
        log.info("rank %d of %d ready on %s, %s", self.rank, size, self.device, precision)
        table = parts_table(policy, mesh, self.config.actor)
        freeze_loaded()
        return mesh.data_rank, policy.family.prices(policy.model.config, trained), table

    def fetch_groups(self, groups: dict[int, ray.ObjectRef]) -> list[int]:
        """Fetch these groups from the object store, for `score` and `update`. Not collective.

        A fetched group outlives the rollout worker that made it. Return the numbers of the groups
        that are lost with their worker.
        """
        self.groups = {}  # memory of the groups before is free while the new ones come
        with span("fetch groups"):
            self.groups = fetch_surviving(groups)
        return sorted(groups.keys() - self.groups.keys())

    def update(
        self,
        step: int,
        minibatches: Sequence[RankMiniBatch],
        advantages: Advantages,
        recorded: set[int],
        kl_scale: float,
    ) -> tuple[dict, Logprobs]:
        """Run `Trainer.update` on the fetched groups, and release them.

        Returns:
            The state of this rank's metrics, and logprobs of the groups `recorded`.
        """
        runner, profile = self.config.runner, self.config.runner.profile
        if runner.schedule != "sync":
            check_fresh(self.groups.values(), step - 1 - runner.max_staleness)
        # Distinct for every pair of the run's seed and a step.
        seed = 1_000_003 * runner.seed + step
        profiled = step in profile.steps and self.rank in profile.ranks
        with profiler(run_folder(self.config), step, self.rank) if profiled else nullcontext():
            sums, logprobs = self.trainer.update(
                self.groups, minibatches, advantages, recorded, kl_scale, seed, version=step - 1
            )
        self.groups = {}
        return sums.state(), logprobs

    def reference_kl(self, minibatches: Sequence[RankMiniBatch]) -> TurnKl:
        return self.trainer.reference_kl(self.groups, minibatches)

    def score(self, mini: RankMiniBatch) -> list[tuple[int, int, float, float]]:
        return self.trainer.score(self.groups, mini)

    def set_weight_sync(self, strategy: str, bucket_bytes: int) -> None:
        """Make the sender of this strategy (`rlinf_vl.transport.strategies`). Collective."""
        from rlinf_vl.models.families.family import same_name
        from rlinf_vl.models.loading import DTYPES

        rollout = self.config.rollout
        engine_names = (
            self.trainer.policy.family.engine_names
            if rollout.rollout_backend == "sglang"
            else same_name
        )

        def weights(device: str) -> Iterator[tuple[str, torch.Tensor]]:
            for name, value in self.trainer.weights(DTYPES[rollout.model.precision], device):
                yield from engine_names(name, value)

        parts = partial(self.trainer.parts, DTYPES[rollout.model.precision])
        size = dist.get_world_size()
        self.sender = SENDERS[strategy](weights, parts, self.rank, size, self.device, bucket_bytes)

    @torch.no_grad()
    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of a part of this rank, such as `trainer.stage` or `sender.offer`.

        It is collective where that method is.
        """
        with span(method):
            return attrgetter(method)(self)(*arguments)

    @ray.method(concurrency_group="checkpoint")
    @torch.no_grad()
    def write(self, folder: str) -> dict[str, str]:
        """Run `Trainer.write` in a thread of its own, while this rank trains on."""
        with span("write checkpoint"):
            return self.trainer.write(folder)

    def stop(self) -> None:
        """Leave the process group, and write out the spans."""
        if dist.is_initialized():
            dist.destroy_process_group()
        flush_spans()


def check_fresh(groups: Iterable[Group], oldest: int) -> None:
    """Assert that no sampled token is from weights before version `oldest`."""
    for group in groups:
        for sequence in group.sequences:
            versions = sequence.versions[sequence.loss_mask]
            assert not versions.size or versions.min() >= oldest, (
                f"{group.id} has tokens of version {versions.min()}; runner.max_staleness allows "
                f"{oldest} and later"
            )


#: The remote class. Its heartbeat and the writing of checkpoints have a thread each, an option that
#: Ray's overloads lack.
ActorWorker = ray.remote(concurrency_groups={"health": 1, "checkpoint": 1})(ActorRank)  # pyright: ignore[reportCallIssue]
