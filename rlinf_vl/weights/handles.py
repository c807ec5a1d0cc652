"""Weights by handle: the ranks keep them in memory that processes at the same place open; only handles travel.

A place is a GPU (CUDA IPC), on the CPU a node (anonymous shared memory, opened through /proc, that no crash leaves behind).
One rank at each place offers. It keeps the memory until `release`, when every worker has copied; CUDA's own rules ask for
the same.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import reduce_tensor

from rlinf_vl.weights.buckets import (
    BUCKET_BYTES,
    Bucket,
    Entry,
    entries_of,
    fingerprint,
    flatten,
    group_by_size,
    nbytes,
    views,
)
from rlinf_vl.weights.strategy import Gather


@dataclass(frozen=True, slots=True)
class Handle:
    """The label of a bucket that lies at `place`."""

    entries: tuple[Entry, ...]
    place: str
    where: Any = field(repr=False)
    fingerprint: int | None = None


def place_of(device: str) -> str:
    """What this process must have in common with one whose memory it opens. `device`: cpu or cuda."""
    if device == "cuda":
        return f"GPU {torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    return f"node {ray.get_runtime_context().get_node_id()}"


def opened(handles: Sequence[Handle]) -> Iterator[dict[str, torch.Tensor]]:
    """The weights of each handle, as views of the sender's memory: to be copied before the sender is told to release."""
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
            f"rollout.weight_sync: cuda_ipc, but no actor rank is at the place of this rollout worker, {place} (actor"
            f" ranks: {there}); set nccl or object_store"
        )
    return mine


class HandleSender:
    """Keeps the weights from `offer` to `release`, and a copy in host memory for workers that take the place of dead ones."""

    def __init__(
        self, gather: Gather, rank: int, world_size: int, device: str, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        """Collective."""
        self._gather, self._rank, self._device, self._place = gather, rank, device, place_of(device)
        self._bucket_bytes = bucket_bytes
        places: list[str] = [""] * world_size
        dist.all_gather_object(places, self._place)
        self._offers = self._place not in places[:rank]  # one rank at each place
        self._kept: list[tuple[torch.Tensor, int | None]] = []  # memory, and its file where it has one
        self._sent: list[Bucket] = []

    def offer(self, check: bool) -> list[Handle]:
        assert not self._kept, "offered again before the receivers had the last"
        handles, sent = [], []
        for bucket in group_by_size(self._gather(self._device), self._bucket_bytes):
            if not self._offers:
                continue
            entries = entries_of(bucket)
            flat, file, where = self._share(entries)
            flatten(bucket, flat)
            self._kept.append((flat, file))
            mark = fingerprint(value for _, value in bucket) if check else None
            handles.append(Handle(entries, self._place, where, mark))
            if self._rank == 0:
                sent.append(Bucket(entries, flat.to("cpu", copy=True).numpy()))
        if self._device == "cuda":
            torch.cuda.synchronize()  # written before anyone reads
        self._sent = sent
        return handles

    def _share(self, entries: tuple[Entry, ...]) -> tuple[torch.Tensor, int | None, Any]:
        """Memory of that size to fill, its file if it has one, and what opens it elsewhere."""
        size = nbytes(entries)
        if self._device == "cuda":
            flat = torch.empty(size, dtype=torch.uint8, device="cuda")
            return flat, None, reduce_tensor(flat)
        file = os.memfd_create("rlinf_vl-weights")
        os.ftruncate(file, size)
        path = f"/proc/{os.getpid()}/fd/{file}"
        return torch.from_file(path, shared=True, size=size, dtype=torch.uint8), file, path

    def deliver(self) -> None:
        """It lies there already."""

    def release(self) -> None:
        for _, file in self._kept:
            if file is not None:
                os.close(file)
        self._kept = []

    def spare(self) -> list[ray.ObjectRef]:
        return [ray.put(bucket) for bucket in self._sent]


def _open(handle: Handle) -> torch.Tensor:
    if isinstance(handle.where, str):
        return torch.from_file(handle.where, shared=True, size=nbytes(handle.entries), dtype=torch.uint8)
    rebuild, arguments = handle.where
    return rebuild(*arguments)
