"""Weights in memory that the ranks share with processes at the same place; only handles travel.

A place is a GPU (CUDA IPC), on the CPU a node (anonymous shared memory, opened through /proc, which no crash leaves behind).
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

from rlinf_vl.transport.buckets import Label, flatten
from rlinf_vl.transport.sender import Sender

#: Seconds that a worker waits for the next bucket.
TIMEOUT = 600
#: On the CPU, bytes after which workers may read on: little enough to be in a cache still.
SHARED_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle(Label):
    """The label of a bucket that is at `place`. On the CPU, `where` is (name and path of the memory, offset), and the bucket is
    written when the number behind it has reached `sync`."""

    place: str
    where: Any = field(repr=False)
    sync: int = 0


class NodeMemory:
    """Memory that other processes of this node map, and that goes with the last of them."""

    def __init__(self, path: str | None = None, size: int = 0) -> None:
        """Map the memory at `path`, which another process made; without a path, make `size` bytes."""
        descriptor = os.memfd_create("rlinf_vl-weights") if path is None else os.open(path, os.O_RDWR)
        self._file = os.fdopen(descriptor, "r+b", buffering=0)
        if path is None:
            self._file.truncate(size)
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
        """What opens it in other processes."""
        whole = os.fstat(descriptor).st_size
        self.flat = torch.from_file(self.path, shared=True, size=whole, dtype=torch.uint8)

    def number_at(self, offset: int) -> int:
        """A number seen no sooner than what was written before it: system calls read and write it."""
        return int.from_bytes(os.pread(self._file.fileno(), 8, offset), "little")

    def set_number(self, offset: int, number: int) -> None:
        os.pwrite(self._file.fileno(), number.to_bytes(8, "little"), offset)


#: What this process has mapped, by name: the memory of one sender, which offers the same every time.
_mapped: dict[str, NodeMemory] = {}


def place_of(device: str) -> str:
    """What this process must have in common with one whose memory it opens. `device`: cpu or cuda."""
    if device == "cuda":
        return f"GPU {torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    return f"node {ray.get_runtime_context().get_node_id()}"


def at(place: str, handles: Sequence[Handle]) -> list[Handle]:
    """Those of `handles` that can be opened at `place`; ValueError if none can."""
    mine = [handle for handle in handles if handle.place == place]
    if not mine:
        there = ", ".join(sorted({handle.place for handle in handles}))
        raise ValueError(
            f"rollout.weight_sync: shared_memory, but no actor rank is at the place of this rollout worker, {place} (actor"
            f" ranks: {there}); set broadcast or object_store"
        )
    return mine


def opened(handles: Sequence[Handle]) -> Iterator[dict[str, torch.Tensor]]:
    """The weights of each handle, as views of the sender's memory: copy them before the sender is told to release.

    Raises:
        TimeoutError: weights that were offered do not come.
    """
    for gone in _mapped.keys() - {handle.where[0] for handle in handles if handle.sync}:
        del _mapped[gone]
    for handle in handles:
        yield handle.views(_open(handle))


def _open(handle: Handle) -> torch.Tensor:
    if not handle.sync:
        rebuild, arguments = handle.where
        return rebuild(*arguments)
    name, path, offset = handle.where
    size, until = handle.nbytes, time.monotonic() + TIMEOUT
    if name not in _mapped:
        _mapped[name] = NodeMemory(path)
    while _mapped[name].number_at(offset + size) < handle.sync:
        if time.monotonic() > until:
            raise TimeoutError(f"weights that were offered did not come in {TIMEOUT} s")
        time.sleep(1e-4)
    return _mapped[name].flat[offset : offset + size]


@dataclass
class SharedMemorySender(Sender):
    """One rank at each place offers: the first. On a GPU rank 0 copies what it sends to host memory as well, for workers that
    replace dead ones; on the CPU the shared memory serves them."""

    def __post_init__(self) -> None:
        self._place = place_of(self.device)
        self._syncs = 0
        self._memory: NodeMemory | None = None
        self._handles: list[Handle] = []
        self._on_gpu: list[torch.Tensor] = []  # from offer to release
        if self.device == "cpu":
            self.bucket_bytes = min(self.bucket_bytes, SHARED_BYTES)
        places: list[str] = [""] * self.world_size
        dist.all_gather_object(places, self._place)
        self._offers = self._place not in places[: self.rank]

    def make_labels(self, check: bool) -> list[Handle]:
        assert not self._on_gpu, "offered again before the receivers had the last"
        labels = super().make_labels(check)
        self._syncs += 1
        if self.device == "cuda":
            self._fill_gpu(labels)
        elif self._offers:
            if self._memory is None:
                self._memory = self._share(labels)
            pairs = zip(self._handles, labels, strict=True)
            self._handles = [replace(h, fingerprint=new.fingerprint, sync=self._syncs) for h, new in pairs]
        return self._handles

    def deliver(self) -> None:
        if self.device == "cuda":
            return
        for i, label, bucket in self.buckets():
            if self._memory is not None:
                handle = self._handles[i]
                assert handle.entries == label.entries, "other weights than in the sync before"
                flatten(bucket, self.sent[i][1])
                self._memory.set_number(handle.where[2] + label.nbytes, self._syncs)
        self.snapshot_version = self.offered

    def release(self) -> None:
        self._on_gpu = []

    def _share(self, labels: Sequence[Label]) -> NodeMemory:
        starts = [0]
        for label in labels:
            starts.append(-(-(starts[-1] + label.nbytes + 8) // 64) * 64)  # a number lies behind each bucket
        memory, name = NodeMemory(size=starts[-1]), uuid.uuid4().hex
        for label, start in zip(labels, starts, strict=False):
            where = (name, memory.path, start)
            self._handles.append(Handle(entries=label.entries, place=self._place, where=where))
            self.sent.append((label, memory.flat[start : start + label.nbytes]))
        return memory

    def _fill_gpu(self, labels: Sequence[Label]) -> None:
        self._handles = []
        for i, label, bucket in self.buckets():
            if self._offers:
                flat = flatten(bucket)
                self._on_gpu.append(flat)
                mark, where = labels[i].fingerprint, reduce_tensor(flat)
                self._handles.append(Handle(entries=label.entries, fingerprint=mark, place=self._place, where=where))
                if self.rank == 0:
                    self.copy_of(i, label).copy_(flat, non_blocking=True)
        torch.cuda.synchronize()  # written before anyone reads
        self.snapshot_version = self.offered
