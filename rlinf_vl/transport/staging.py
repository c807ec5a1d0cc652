"""Two buckets of memory that all weights pass through, from a sender to readers in other processes of its node.

    sender    fills buffer 0 with bucket 1, buffer 1 with bucket 2, waits until everyone has read bucket 1, fills buffer 0 with 3, …
    reader    waits for bucket n, copies it, and notes n beside its process id

Buckets are numbered through all syncs. The sender's last number and each reader's stand on a board in node memory, so a bucket
takes no message. What keeps a sync from standing still:
- A reader that dies is not waited for: its process is looked at. One that hangs is not waited for longer than `TIMEOUT`; it finds
  its bucket overwritten, and fails.
- A reader that fails notes its last number, and the sender goes on.
"""

import logging
import os
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from rlinf_vl.transport.buckets import Label, flatten
from rlinf_vl.transport.node_memory import NodeMemory, mapped

log = logging.getLogger(__name__)

BUFFERS = 2
#: Variables that PyTorch's CUDA allocator is set with.
ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
#: Seconds that a reader waits for the next bucket, and the sender for a reader.
TIMEOUT = 600
#: Seconds between two looks at the processes that a sender waits for.
LOOK_S = 1.0
#: Linux' largest process id. Pages of the board that nobody writes take no memory.
MAX_PID = 2**22


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedBucket(Label):
    """The label of a bucket that will pass through a buffer at `place`.

    Attributes:
        number: of the bucket; `last`: of the sync's last one.
        board: name and path of the node memory with the numbers.
        buffer: what opens its buffer (a function and its arguments).
    """

    place: str
    number: int
    last: int
    board: tuple[str, str] = field(repr=False)
    buffer: tuple[Any, tuple[Any, ...]] = field(repr=False)


class Staging:
    """The sender's side: buffers from `announce` to `release`.

    Attributes:
        staged_bytes: bytes of the buffers that there are now.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._number = 0  # of the bucket filled last
        self._board = NodeMemory(size=8 * (MAX_PID + 1))
        self._name = uuid.uuid4().hex
        self._buffers: list[torch.Tensor] = []
        self._memories: list[NodeMemory] = []  # of the buffers, on the CPU

    @property
    def staged_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def announce(self, labels: Sequence[Label], place: str) -> list[StagedBucket]:
        """Make the buffers for a sync's buckets, and what readers of these are told."""
        assert not self._buffers, "announced again before the last sync's buffers were released"
        size = max((label.nbytes for label in labels), default=0)
        opens = []
        for _ in range(min(BUFFERS, len(labels))):
            if self._device == "cuda":
                with expandable_segments_off():
                    buffer = torch.empty(size, dtype=torch.uint8, device="cuda")
                opens.append(reduce_tensor(buffer))
            else:
                memory = NodeMemory(size=size)
                buffer = memory.flat
                opens.append((_open_on_node, (memory.path,)))
                self._memories.append(memory)
            self._buffers.append(buffer)
        last = self._number + len(labels)
        return [
            StagedBucket(
                entries=label.entries,
                fingerprint=label.fingerprint,
                place=place,
                number=number,
                last=last,
                board=(self._name, self._board.path),
                buffer=opens[number % len(opens)],
            )
            for number, label in enumerate(labels, self._number + 1)
        ]

    def fill(self, bucket: Sequence[tuple[str, torch.Tensor]], readers: set[int]) -> torch.Tensor:
        """Put the next bucket into its buffer once the bucket before it there has been read, and return the filled bytes.

        `readers` are process ids; those that have died or are not waited for any longer are taken out.
        """
        self._number += 1
        self._wait(readers, self._number - len(self._buffers))
        size = sum(value.nbytes for _, value in bucket)
        flat = flatten(bucket, self._buffers[self._number % len(self._buffers)][:size])
        if self._device == "cuda":
            torch.cuda.synchronize()  # written before anyone reads
        self._board.set_number(0, self._number)
        return flat

    def finish(self, readers: set[int]) -> None:
        """Wait until all buckets have been read."""
        self._wait(readers, self._number)

    def release(self) -> None:
        """Drop the buffers."""
        self._buffers = []
        self._memories = []

    def _wait(self, readers: set[int], number: int) -> None:
        """Wait until every reader has noted this number, or a later one."""
        until = time.monotonic() + TIMEOUT
        look = time.monotonic() + LOOK_S
        while waiting := [pid for pid in readers if self._board.number_at(8 * pid) < number]:
            now = time.monotonic()
            if now > look:
                readers.difference_update(pid for pid in waiting if not _lives(pid))
                look = now + LOOK_S
            if now > until:
                log.warning("processes %s have not read weights for %s s: they are not waited for", waiting, TIMEOUT)
                readers.difference_update(waiting)
            time.sleep(1e-4)


@contextmanager
def expandable_segments_off() -> Iterator[None]:
    """Have PyTorch allocate whole segments, as CUDA IPC needs them, where the environment asks for expandable ones."""
    asked = (os.environ.get(name, "") for name in ALLOCATOR_SETTINGS)
    if not any(re.search(r"expandable_segments\s*:\s*true", value, re.IGNORECASE) for value in asked):
        yield
        return
    _set_allocator("expandable_segments:False")
    try:
        yield
    finally:
        _set_allocator("expandable_segments:True")


def _set_allocator(settings: str) -> None:
    """Change settings of PyTorch's CUDA allocator while it works."""
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # its name before torch 2.10 or so
    (change or torch.cuda.memory._set_allocator_settings)(settings)


def read_staged(buckets: Sequence[StagedBucket], pid: int) -> Iterator[dict[str, torch.Tensor]]:
    """Give the weights of each bucket as views of its buffer, to be copied before the next is asked for; `pid`: this process.

    Raises:
        TimeoutError: weights that were offered do not come, or were overwritten before they were copied.
    """
    if not buckets:
        return
    board = mapped(*buckets[0].board)
    buffers = dict[int, torch.Tensor]()
    n_buffers = min(BUFFERS, len(buckets))
    try:
        for bucket in buckets:
            until = time.monotonic() + TIMEOUT
            while board.number_at(0) < bucket.number:
                if time.monotonic() > until:
                    raise TimeoutError(f"weights that were offered did not come in {TIMEOUT} s")
                time.sleep(1e-4)
            place = bucket.number % n_buffers
            if place not in buffers:
                rebuild, arguments = bucket.buffer
                buffers[place] = rebuild(*arguments)
            flat = buffers[place][: bucket.nbytes]
            yield bucket.views(flat)
            if flat.is_cuda:
                torch.cuda.synchronize()  # copied before the sender writes again
            if board.number_at(0) >= bucket.number + n_buffers:
                raise TimeoutError(f"weights were overwritten: this process took more than {TIMEOUT} s to copy them")
            board.set_number(8 * pid, bucket.number)
    finally:  # what failed is not waited for
        board.set_number(8 * pid, buckets[-1].last)


def _open_on_node(path: str) -> torch.Tensor:
    return NodeMemory(path).flat


def _lives(pid: int) -> bool:
    """Return whether a process of this node runs: it exists, and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
