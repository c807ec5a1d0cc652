"""One rank of the actor group: a Ray actor that gives a `Trainer` its groups and sends its weights.

The rank's process imports transformers and FSDP once it answers heartbeats. The controller, which names this
class, needs neither and would wait seconds for them.
"""

import importlib
import logging
from collections.abc import Iterator
from functools import partial
from operator import attrgetter
from typing import Any

import ray
import torch
import torch.distributed as dist

from rlinf_vl.actor.rank import Rank
from rlinf_vl.config.schema import Config
from rlinf_vl.observe.spans import flush_spans, record_spans, span
from rlinf_vl.runtime.loading import quick_imports
from rlinf_vl.runtime.ray_process import own_process, where
from rlinf_vl.runtime.run_folder import run_folder
from rlinf_vl.transport.groups import fetch_surviving
from rlinf_vl.transport.rendezvous import listen
from rlinf_vl.weights.sender import Sender
from rlinf_vl.weights.strategy import Strategy

log = logging.getLogger(__name__)


class ActorRank(Rank):
    """The Ray actor of one rank.

    Attributes:
        sender: of weights; from `set_weight_sync` on.
    """

    sender: Sender

    def __init__(self, config: Config, model_path: str, device: str, rank: int) -> None:
        own_process(device)
        super().__init__(config, model_path, device, rank)
        record_spans(run_folder(config), f"actor {rank}")

    @ray.method(concurrency_group="health")
    def process(self) -> tuple[str, int]:
        """Return (node id, process id) of this rank.

        It answers while the process lives and runs, whatever it is doing: this is the heartbeat.
        """
        return where()

    def import_packages(self) -> None:
        """Import what `start` needs, which takes many seconds. The heartbeat answers meanwhile."""
        with quick_imports():
            importlib.import_module("rlinf_vl.actor.load")

    def listen(self) -> tuple[str, int]:
        """Open the store that all ranks meet in, and return its address."""
        self.store, address = listen(ray.util.get_node_ip_address())
        return address

    def fetch_groups(self, groups: dict[int, ray.ObjectRef]) -> list[int]:
        """Fetch these groups from the object store, for `score` and `update`. Not collective.

        A fetched group outlives the rollout worker that made it. Return the numbers of the groups
        that are lost with their worker.
        """
        self.groups = {}  # memory of the groups before is free while the new ones come
        with span("fetch groups"):
            self.groups = fetch_surviving(groups)
        return sorted(groups.keys() - self.groups.keys())

    def set_weight_sync(
        self, strategy: Strategy, bucket_bytes: int, sends_frozen: bool = False
    ) -> None:
        """Make the sender of this strategy. Collective.

        `sends_frozen`: whether weights that are not trained are sent, too.
        """
        from rlinf_vl.models.family import same_name
        from rlinf_vl.models.loading import DTYPES

        rollout = self.config.rollout
        self.trainer.sends_frozen = sends_frozen
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
        self.sender = strategy.sender(weights, parts, self.rank, size, self.device, bucket_bytes)

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
        super().stop()
        flush_spans()


#: The remote class. Its heartbeat and the writing of checkpoints have a thread each, an option that
#: Ray's overloads lack.
ActorWorker = ray.remote(concurrency_groups={"health": 1, "checkpoint": 1})(ActorRank)  # pyright: ignore[reportCallIssue]
