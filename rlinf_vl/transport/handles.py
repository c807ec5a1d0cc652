"""Weights by handle: the ranks keep them in memory that processes at the same place open; only handles travel.

A place is a GPU (CUDA IPC), on the CPU a node (anonymous shared memory, opened through /proc, that no crash leaves behind).
One rank at each place offers. On a GPU it keeps the memory until `release`, when every worker has copied; CUDA's own rules
ask for the same. On the CPU the memory stays, and both sides keep it mapped: fresh pages cost as much as several copies.
From the second sync on it is filled while the workers read behind.
"""

import os
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import reduce_tensor

from rlinf_vl.transport.buckets import (
    BUCKET_BYTES,
    Entry,
    SentWeights,
    entries_of,
    fingerprint,
    flatten,
    group_by_size,
    nbytes,
    pack,
    views,
)
from rlinf_vl.transport.strategy import Gather

#: Seconds that a worker waits for the next bucket.
TIMEOUT = 600
#: On the CPU, bytes after which workers may read on: little enough to be in a cache still.
SHARED_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Handle:
    """The label of a bucket that lies at `place`. On the CPU, `where` is (name and path of the memory, offset), and the bucket
    is there when the number behind it has come to `sync`."""

    entries: tuple[Entry, ...]
    place: str
    where: Any = field(repr=False)
    fingerprint: int | None = None
    sync: int = 0


class SharedMemory:
    """Memory that other processes of this node map, and that goes with the last of them. It can grow."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "r+b", buffering=0)
        self._flat = torch.empty(0, dtype=torch.uint8)

    @classmethod
    def new(cls) -> "SharedMemory":
        """Memory of no size yet."""
        file = os.memfd_create("rlinf_vl-weights")
        memory = cls(f"/proc/self/fd/{file}")
        os.close(file)
        return memory

    @property
    def path(self) -> str:
        """What opens it in other processes."""
        return f"/proc/{os.getpid()}/fd/{self._file.fileno()}"

    def grow(self, size: int) -> int:
        """Room for so many bytes and a number behind them; the offset, a multiple of 64."""
        offset = -(-os.fstat(self._file.fileno()).st_size // 64) * 64
        os.ftruncate(self._file.fileno(), offset + size + 8)
        return offset

    def bytes_at(self, offset: int, size: int) -> torch.Tensor:
        """uint8 [size], shared."""
        if offset + size > len(self._flat):
            whole = os.fstat(self._file.fileno()).st_size
            self._flat = torch.from_file(self.path, shared=True, size=whole, dtype=torch.uint8)
        return self._flat[offset : offset + size]

    def number_at(self, offset: int) -> int:
        """A number that is there no sooner than what was written before it: read and written by calls of the system."""
        return int.from_bytes(os.pread(self._file.fileno(), 8, offset), "little")

    def set_number(self, offset: int, number: int) -> None:
        """Write what `number_at` reads, after what was written before it."""
        os.pwrite(self._file.fileno(), number.to_bytes(8, "little"), offset)


#: What this process has mapped, by name: that of one sender, which offers the same memory every time.
_mapped: dict[str, SharedMemory] = {}


def place_of(device: str) -> str:
    """What this process must have in common with one whose memory it opens. `device`: cpu or cuda."""
    if device == "cuda":
        return f"GPU {torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    return f"node {ray.get_runtime_context().get_node_id()}"


def opened(handles: Sequence[Handle]) -> Iterator[dict[str, torch.Tensor]]:
    """The weights of each handle, as views of the sender's memory: to be copied before the sender is told to release.

    Raises:
        TimeoutError: weights that were offered do not come.
    """
    for gone in _mapped.keys() - {handle.where[0] for handle in handles if handle.sync}:
        del _mapped[gone]
    for handle in handles:
        yield views(handle.entries, _open(handle))


def at(place: str, handles: Sequence[Handle]) -> list[Handle]:
    """Those of `handles` that can be opened at `place`.

    Raises:
        ValueError: none can.
    """
    mine = [handle for handle in handles if handle.place == place]
    if not mine:
        there = ", ".join(sorted({handle.place for handle in handles}))
        raise ValueError(
            f"rollout.weight_sync: shared_memory, but no actor rank is at the place of this rollout worker, {place} (actor"
            f" ranks: {there}); set broadcast or object_store"
        )
    return mine


class HandleSender:
    """Keeps the weights sent last in host memory, for workers that take the place of dead ones; on the CPU it is the memory
    they were sent in."""

    def __init__(
        self, gather: Gather, rank: int, world_size: int, device: str, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        """Collective."""
        self._gather, self._rank, self._device, self._place = gather, rank, device, place_of(device)
        self._bucket_bytes = bucket_bytes if device == "cuda" else min(bucket_bytes, SHARED_BYTES)
        places: list[str] = [""] * world_size
        dist.all_gather_object(places, self._place)
        self._offers = self._place not in places[:rank]  # one rank at each place
        self._syncs, self._later = 0, False
        self._kept: list[torch.Tensor] = []  # on a GPU, from offer to release
        self._memory, self._name = SharedMemory.new(), uuid.uuid4().hex
        self._shared: list[Handle] = []
        self._sent = SentWeights(device)

    def offer(self, check: bool) -> list[Handle]:
        assert not self._kept, "offered again before the receivers had the last"
        self._later = self._device != "cuda" and self._syncs > 0 and not check
        self._syncs += 1
        if not self._later:
            return self._fill(check)
        return [replace(handle, sync=self._syncs) for handle in self._shared]

    def deliver(self) -> None:
        """What was only promised; otherwise it lies there already."""
        if self._later:
            self._fill(check=False)

    def release(self) -> None:
        self._kept = []

    def spare(self) -> list[ray.ObjectRef]:
        shared = (views(h.entries, self._memory.bytes_at(h.where[2], nbytes(h.entries))) for h in self._shared)
        packed = (bucket for weights in shared for bucket in pack(weights.items(), self._bucket_bytes))
        return [ray.put(bucket) for bucket in (*self._sent.buckets(self._bucket_bytes), *packed)]

    def _fill(self, check: bool) -> list[Handle]:
        handles = []
        for i, bucket in enumerate(group_by_size(self._gather(self._device), self._bucket_bytes)):
            if not self._offers:
                continue
            entries = entries_of(bucket)
            mark = fingerprint(value for _, value in bucket) if check else None
            if self._device == "cuda":
                flat = flatten(bucket)
                self._kept.append(flat)
                handles.append(Handle(entries, self._place, reduce_tensor(flat), mark))
                if self._rank == 0:
                    self._sent.room(i, entries).copy_(flat, non_blocking=True)
                continue
            size = nbytes(entries)
            if i == len(self._shared):
                where = (self._name, self._memory.path, self._memory.grow(size))
                self._shared.append(Handle(entries, self._place, where))
            handle = self._shared[i]
            assert handle.entries == entries, "other weights than in the sync before"
            offset = handle.where[2]
            flatten(bucket, self._memory.bytes_at(offset, size))
            self._memory.set_number(offset + size, self._syncs)
            handles.append(replace(handle, fingerprint=mark, sync=self._syncs))
        if self._device == "cuda":
            torch.cuda.synchronize()  # written before anyone reads
        return handles


def _open(handle: Handle) -> torch.Tensor:
    if not handle.sync:
        rebuild, arguments = handle.where
        return rebuild(*arguments)
    name, path, offset = handle.where
    size, until = nbytes(handle.entries), time.monotonic() + TIMEOUT
    if name not in _mapped:
        _mapped[name] = SharedMemory(path)
    while _mapped[name].number_at(offset + size) < handle.sync:
        if time.monotonic() > until:
            raise TimeoutError(f"weights that were offered did not come in {TIMEOUT} s")
        time.sleep(1e-4)
    return _mapped[name].bytes_at(offset, size)
