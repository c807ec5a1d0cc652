"""Weights by broadcast: actor rank 0 and every engine in a process group of their own, beside the ranks' default group.

The group is made again whenever a member was replaced. A broadcast that nobody answers ends in an error after
`TIMEOUT`. SGLang's engines join through SGLang's own calls, which is why the group is made as SGLang makes it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import ray
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from rlinf_vl.transport.buckets import Label, WeightsDiffer, flatten
from rlinf_vl.transport.rendezvous import Store, find, listen
from rlinf_vl.transport.sender import Sender

#: How long a member waits for the others.
TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """A group to join: `rank` 0 is the sender, whose store listens at host:port. `name` was never used before."""

    host: str
    port: int
    name: str
    backend: str
    world_size: int
    rank: int


def join(group: WeightGroup, store: Store | None = None) -> dist.ProcessGroup:
    """Join; returns when all members have. `store`: the sender's own. The process may have a default group or none."""
    store = store or find((group.host, group.port), TIMEOUT)
    made, _ = c10d._new_process_group_helper(  # torch has no public call for a group outside of the default one
        group.world_size,
        group.rank,
        [],
        dist.Backend(group.backend),
        dist.PrefixStore(group.name, store),  # pyright: ignore[reportPrivateImportUsage]
        group_name=group.name,  # pyright: ignore[reportArgumentType]  # a NewType of str, in newer versions
        timeout=TIMEOUT,
    )
    assert isinstance(made, dist.ProcessGroup)
    c10d._world.pg_group_ranks[made] = {rank: rank for rank in range(group.world_size)}
    return made


def leave(group: dist.ProcessGroup) -> None:
    """End this process's part in the group. The others need not leave at the same time, and may be dead: NCCL's orderly end
    would wait for them."""
    if dist.get_backend(group) == "nccl":
        c10d._abort_process_group(group)
    else:
        dist.destroy_process_group(group)


def receive(
    group: dist.ProcessGroup, labels: Sequence[Label], device: torch.device
) -> Iterator[dict[str, torch.Tensor]]:
    """Take part in the broadcasts of these buckets, in order, one at a time.

    Raises:
        WeightsDiffer: what came has another fingerprint. After the last bucket, so that the sender need not wait.
    """
    wrong: WeightsDiffer | None = None
    for label in labels:
        flat = torch.empty(label.nbytes, dtype=torch.uint8, device=device)
        dist.broadcast(flat, src=0, group=group)
        weights = label.views(flat)
        try:
            label.verify(weights, "as received")
        except WeightsDiffer as e:
            wrong = wrong or e
        yield weights
    if wrong:
        raise wrong


@dataclass
class BroadcastSender(Sender):
    """Rank 0 broadcasts, and copies what it sends to host memory for workers that replace dead ones."""

    group: dist.ProcessGroup | None = field(default=None, init=False)
    store: Store | None = field(default=None, init=False)

    def listen(self) -> tuple[str, int]:
        """Rank 0 only: open the store that the next group meets in, and return its address."""
        self.store, address = listen(ray.util.get_node_ip_address(), TIMEOUT)
        return address

    def join(self, group: WeightGroup) -> None:
        """Rank 0 only: join `group` in place of the group joined before, if there is one. Where no engine is in it, nothing is
        broadcast, only copied for those that come later."""
        if self.group is not None:
            leave(self.group)
        self.group = join(group, self.store) if group.world_size > 1 else None

    def make_labels(self, check: bool) -> Sequence[Label]:
        labels = super().make_labels(check)
        return labels if self.rank == 0 else []

    def deliver(self, readers: Sequence[ray.ObjectRef] = ()) -> None:
        for i, label, bucket in self.buckets():
            if self.rank == 0:
                copy = self.copy_of(i, label)
                flat = flatten(bucket, copy if self.device == "cpu" else None)
                if self.group is not None:
                    dist.broadcast(flat, src=0, group=self.group)
                if self.device == "cuda":
                    copy.copy_(flat, non_blocking=True)
        if self.device == "cuda":
            torch.cuda.synchronize()  # copied, before anyone asks for it
        self.snapshot_version = self.offered
