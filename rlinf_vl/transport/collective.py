"""Weights by broadcast: actor rank 0 and every engine in a process group of their own, beside the ranks' default group.

The group is made again whenever a member was replaced. A broadcast that nobody answers ends in an error after
`TIMEOUT`. SGLang's engines join through SGLang's own calls, which is why the group is made the way theirs is.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import ray
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from rlinf_vl.transport.buckets import (
    BUCKET_BYTES,
    Entry,
    SentWeights,
    WeightsDiffer,
    entries_of,
    fingerprint,
    flatten,
    group_by_size,
    nbytes,
    verify,
    views,
)
from rlinf_vl.transport.strategy import Gather

#: How long a member waits for the others.
TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """A group to be joined: `rank` 0 is the sender, who listens at host:port. `name`: never used before."""

    host: str
    port: int
    name: str
    backend: str
    world_size: int
    rank: int


@dataclass(frozen=True, slots=True)
class Notice:
    """The label of a bucket that will be broadcast."""

    entries: tuple[Entry, ...]
    fingerprint: int | None = None


def join(group: WeightGroup) -> dist.ProcessGroup:
    """Join; returns when all members have. The process may have a default group or none."""
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]  # documented, but not in __all__
        group.host, group.port, group.world_size, is_master=group.rank == 0, timeout=TIMEOUT, wait_for_workers=False
    )
    made, _ = c10d._new_process_group_helper(  # torch has no public way to a group that is no part of the default one
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
    """End this process's part in the group; the others need not leave at the same time, and may be dead: NCCL's orderly end
    would wait for them."""
    if dist.get_backend(group) == "nccl":
        c10d._abort_process_group(group)
    else:
        dist.destroy_process_group(group)


def receive(
    group: dist.ProcessGroup, notices: Sequence[Notice], device: torch.device
) -> Iterator[dict[str, torch.Tensor]]:
    """Take part in the broadcasts of these buckets, in order, one at a time.

    Raises:
        WeightsDiffer: what came has another fingerprint. Behind the last bucket, so that the sender is not left waiting.
    """
    wrong: WeightsDiffer | None = None
    for notice in notices:
        flat = torch.empty(nbytes(notice.entries), dtype=torch.uint8, device=device)
        dist.broadcast(flat, src=0, group=group)
        weights = views(notice.entries, flat)
        try:
            verify(notice, weights, "as received")
        except WeightsDiffer as e:
            wrong = wrong or e
        yield weights
    if wrong:
        raise wrong


class CollectiveSender:
    """Rank 0 broadcasts; it keeps a copy of what it sent in host memory, for workers that take the place of dead ones."""

    def __init__(
        self,
        gather: Gather,
        shapes: Callable[[], Iterator[tuple[str, torch.Tensor]]],
        rank: int,
        device: str,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """`shapes`: the same names, dtypes and shapes as `gather` yields, as tensors on the meta device."""
        self._gather, self._shapes, self._rank, self._device = gather, shapes, rank, device
        self._bucket_bytes = bucket_bytes
        self._group: dist.ProcessGroup | None = None
        self._sent = SentWeights(device)

    def join(self, group: WeightGroup) -> None:
        """Rank 0 only. In place of the group joined before, if there is one."""
        if self._group is not None:
            leave(self._group)
        self._group = join(group)

    def offer(self, check: bool) -> list[Notice]:
        if check:  # the weights are gathered twice this once
            weights = self._gather(self._device)
            notices = [
                Notice(entries_of(b), fingerprint(v for _, v in b)) for b in group_by_size(weights, self._bucket_bytes)
            ]
        else:
            notices = [Notice(entries_of(b)) for b in group_by_size(self._shapes(), self._bucket_bytes)]
        return notices if self._rank == 0 else []

    def deliver(self) -> None:
        for place, bucket in enumerate(group_by_size(self._gather(self._device), self._bucket_bytes)):
            if self._rank == 0:
                kept = self._sent.room(place, entries_of(bucket))
                flat = flatten(bucket, kept if self._device == "cpu" else None)
                dist.broadcast(flat, src=0, group=self._group)
                if self._device == "cuda":
                    kept.copy_(flat, non_blocking=True)
        if self._device == "cuda":
            torch.cuda.synchronize()  # kept, before anyone asks for it

    def release(self) -> None:
        """Each member has its own copy."""

    def spare(self) -> list[ray.ObjectRef]:
        return [ray.put(bucket) for bucket in self._sent.buckets(self._bucket_bytes)]
