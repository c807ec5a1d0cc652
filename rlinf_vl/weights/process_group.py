"""The process group of actor rank 0 and every engine.

It is beside the ranks' default group, and is made again whenever a member was replaced. A
collective that nobody answers ends in an error after `TIMEOUT`. SGLang's engines join through
SGLang's own calls, which is why the group is made as SGLang makes it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from rlinf_vl.transport.rendezvous import Store, find
from rlinf_vl.weights.buckets import Label, WeightsDiffer

#: The time that a member waits for the others.
TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """A process group to join.

    Attributes:
        host, port: address of the store of the sender.
        name: a name that no group had before.
        rank: of this member; 0 is the sender.
    """

    host: str
    port: int
    name: str
    backend: str
    world_size: int
    rank: int


def join(group: WeightGroup, store: Store | None = None) -> dist.ProcessGroup:
    """Join the group, and return when all members have joined.

    `store`: the sender's own. The process may have a default group or none.
    """
    store = store or find((group.host, group.port), TIMEOUT)
    # torch has no public call for a group outside of the default one.
    process_group, _ = c10d._new_process_group_helper(
        group.world_size,
        group.rank,
        [],
        dist.Backend(group.backend),
        dist.PrefixStore(group.name, store),  # pyright: ignore[reportPrivateImportUsage]
        # Newer versions of torch declare a NewType of str.
        group_name=group.name,  # pyright: ignore[reportArgumentType]
        timeout=TIMEOUT,
    )
    assert isinstance(process_group, dist.ProcessGroup)
    # `new_group` fills this in for its groups; collectives look up members in it.
    c10d._world.pg_group_ranks[process_group] = {rank: rank for rank in range(group.world_size)}
    return process_group


def leave(group: dist.ProcessGroup) -> None:
    """End this process's membership in the group.

    The others need not leave at the same time, and may be dead: NCCL's orderly end would wait for
    them.
    """
    if dist.get_backend(group) == "nccl":
        c10d._abort_process_group(group)
    else:
        dist.destroy_process_group(group)


def receive(
    group: dist.ProcessGroup, labels: Sequence[Label], device: torch.device
) -> Iterator[dict[str, torch.Tensor]]:
    """Take part in the broadcasts of these buckets, in order, and yield the weights of each.

    Raises:
        WeightsDiffer: the received weights have another fingerprint. It is raised after the last
            bucket, so that the sender need not wait.
    """
    first_error: WeightsDiffer | None = None
    for label in labels:
        flat = torch.empty(label.nbytes, dtype=torch.uint8, device=device)
        dist.broadcast(flat, src=0, group=group)
        weights = label.views(flat)
        try:
            label.verify(weights, "as received")
        except WeightsDiffer as e:
            first_error = first_error or e
        yield weights
    if first_error:
        raise first_error
