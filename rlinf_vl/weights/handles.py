"""Handles of weights in memory that processes at one place share, and reading what they name.

SGLang's processes import this module, too, so it imports little.
"""

import os
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch

from rlinf_vl.weights.buckets import Label
from rlinf_vl.weights.node_memory import forget_others, mapped
from rlinf_vl.weights.staging import TIMEOUT, StagedBucket, read_staged, staged_arrivals


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle(Label):
    """The label of a bucket in the memory of a node.

    Attributes:
        place: the node.
        where: name and path of the memory, and the bucket's offset in it.
        sync: number of the sync: the bucket is written when the number after it has
            reached this one.
    """

    place: str
    where: Any = field(repr=False)
    sync: int = 0


def at(place: str, handles: Sequence[Handle | StagedBucket]) -> list[Handle | StagedBucket]:
    """Return the handles that can be opened at `place`.

    Raises:
        ValueError: none can.
    """
    handles_here = [handle for handle in handles if handle.place == place]
    if not handles_here:
        sender_places = ", ".join(sorted({handle.place for handle in handles}))
        raise ValueError(
            "rollout.weight_sync: shared_memory, but no actor rank is at the place of this "
            f"rollout worker, {place} (actor ranks: {sender_places}); set broadcast or object_store"
        )
    return handles_here


def opened(handles: Sequence[Handle | StagedBucket]) -> Generator[dict[str, torch.Tensor]]:
    """Yield the weights of each handle, as views of the sender's memory.

    Copy them before asking for the next.

    Raises:
        TimeoutError: weights that were offered do not come.
        WeightsDiffer: the weights have another fingerprint than their handle.
    """
    staged = [handle for handle in handles if isinstance(handle, StagedBucket)]
    on_node = [handle for handle in handles if isinstance(handle, Handle)]
    forget_others({bucket.board[0] for bucket in staged} | {handle.where[0] for handle in on_node})
    yield from read_staged(staged, os.getpid())
    for handle in on_node:
        await_written(handle)
        weights = handle.views(bytes_of(handle))
        handle.verify(weights, "as received")
        yield weights


def arrivals(handles: Sequence[Handle | StagedBucket]) -> Generator[Handle | StagedBucket]:
    """Yield each handle of one place when its weights can be read, and acknowledge it afterwards.

    It is for a process whose children read; all of them have read when it asks for the next.

    Raises:
        TimeoutError: as `opened`.
    """
    staged = [handle for handle in handles if isinstance(handle, StagedBucket)]
    with closing(staged_arrivals(staged, os.getpid())) as staged_handles:
        yield from staged_handles
    for handle in handles:
        if isinstance(handle, Handle):
            await_written(handle)
            yield handle


def arrivals_at_places(
    handles_by_place: Sequence[Sequence[Handle | StagedBucket]],
) -> Iterator[tuple[Handle | StagedBucket, ...]]:
    """Yield the handles of each bucket, one for each place, when all of them can be read.

    While one place is awaited, the next places are acknowledged one bucket late. The senders, who
    gather each bucket together, have a second buffer for that.
    """
    streams = [arrivals(handles) for handles in handles_by_place]
    try:
        yield from zip(*streams, strict=True)
    finally:
        for stream in streams:
            stream.close()  # acknowledges what no one will read


def await_written(handle: Handle) -> None:
    """Wait until a bucket is written."""
    name, path, offset = handle.where
    until = time.monotonic() + TIMEOUT
    memory = mapped(name, path)
    while memory.number_at(offset + handle.nbytes) < handle.sync:
        if time.monotonic() > until:
            raise TimeoutError(f"weights that were offered did not come in {TIMEOUT} s")
        time.sleep(1e-4)


def bytes_of(handle: Handle) -> torch.Tensor:
    """Return the bytes of a bucket that is written, uint8 [nbytes]."""
    name, path, offset = handle.where
    return mapped(name, path).flat[offset : offset + handle.nbytes]
