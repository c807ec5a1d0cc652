"""Send weights by broadcast, from actor rank 0 to every engine, in a `process_group` of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from rlinf_vl.transport.rendezvous import Store, listen
from rlinf_vl.types import Reference
from rlinf_vl.weights.buckets import Label, flatten
from rlinf_vl.weights.process_group import TIMEOUT, WeightGroup, join, leave
from rlinf_vl.weights.sender import Sender
from rlinf_vl.weights.strategy import LoadingEngine, Site, Strategy


@dataclass
class BroadcastSender(Sender):
    """The sender of broadcasts: rank 0."""

    group: dist.ProcessGroup | None = field(default=None, init=False)
    store: Store | None = field(default=None, init=False)

    def listen(self) -> tuple[str, int]:
        """Open the store that the next group meets in, and return its address. Rank 0 only."""
        from ray.util import get_node_ip_address

        self.store, address = listen(get_node_ip_address(), TIMEOUT)
        return address

    def join(self, group: WeightGroup) -> None:
        """Join `group` in place of the group joined before, if there is one. Rank 0 only.

        Where no engine is in it, nothing is broadcast: weights are only kept, for engines that
        start later.
        """
        if self.group is not None:
            leave(self.group)
        self.group = join(group, self.store) if group.world_size > 1 else None

    def make_labels(self, check: bool) -> Sequence[Label]:
        # All ranks gather the weights for fingerprints; rank 0 alone sends.
        labels = super().make_labels(check)
        return labels if self.rank == 0 else []

    def deliver(self, readers: Sequence[Reference] = ()) -> None:
        for _, _, bucket in self.buckets():
            if self.group is not None:
                dist.broadcast(flatten(bucket), src=0, group=self.group)
        self.keep_sent()


class BroadcastStrategy(Strategy):
    """The strategy `broadcast`."""

    name = "broadcast"
    sender = BroadcastSender
    joins_group = True
    survives_lost_ranks = True

    def obstacle(self, site: Site) -> str:
        if site.device == "cuda" and site.collocated:
            return "NCCL joins no two processes on one GPU, and actor and rollout share some"
        return ""

    def suits(self, site: Site) -> bool:
        return site.device == "cuda" and not site.collocated

    def load(
        self, engine: LoadingEngine, labels: Sequence[Label], version: int, device: str
    ) -> None:
        engine.load_broadcast(labels, version)  # a member of the group itself, or its processes are
