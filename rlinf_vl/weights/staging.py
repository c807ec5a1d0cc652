"""Pass all weights through two buffers, from a sender to readers in other processes of its node.

    sender    fills buffer 0 with bucket 1, buffer 1 with bucket 2, waits until everyone has read
              bucket 1, fills buffer 0 with bucket 3, …
    reader    waits for bucket n, copies it, and notes n beside its process id

Buckets are numbered through all syncs. The sender's last number and each reader's stand on a board
in node memory, so a bucket takes no message. A sync does not hang:
- The sender looks whether the process of a reader lives, and does not wait for a dead one. It waits
  for one that hangs no longer than `TIMEOUT`; that one finds its bucket overwritten, and fails.
- A reader that fails notes its last number, and the sender goes on.
"""

import logging
import os
import pickle
import re
import time
import uuid
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from rlinf_vl.weights.buckets import Label, flatten
from rlinf_vl.weights.node_memory import NodeMemory, forget_others, mapped

log = logging.getLogger(__name__)

BUFFERS = 2
#: Environment variables with settings of PyTorch's CUDA allocator.
ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
#: Seconds that a reader waits for the next bucket, and the sender for a reader.
TIMEOUT = 600
#: Seconds between two checks that the processes that a sender waits for live.
LOOK_S = 1.0
#: Place of the device's number among the arguments of PyTorch's `rebuild_cuda_tensor`.
REBUILD_DEVICE = 6
#: Linux' largest process id. Pages of the board that nobody writes take no memory.
MAX_PID = 2**22


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedBucket(Label):
    """The label of a bucket that will pass through a buffer at `place`.

    Attributes:
        number: of the bucket; `last`: of the sync's last one.
        board: name and path of the node memory with the numbers.
        buffer: a function and its arguments, which open the bucket's buffer.
    """

    place: str
    number: int
    last: int
    board: tuple[str, str] = field(repr=False)
    buffer: tuple[Any, tuple[Any, ...]] = field(repr=False)


class Staging:
    """The sender's side: it has buffers from `announce` to `release`.

    Attributes:
        staged_bytes: bytes of the buffers that exist now.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._number = 0  # of the bucket filled last
        self._last_sync_number = 0  # of the last bucket of the sync before
        # At 0 the sender's number, at 8 · pid that of a reader.
        self._board = NodeMemory(size=8 * (MAX_PID + 1))
        self._name = uuid.uuid4().hex
        self._buffers: list[torch.Tensor] = []
        self._memories: list[NodeMemory] = []  # of the buffers; on the CPU only

    @property
    def staged_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def announce(self, labels: Sequence[Label], place: str) -> list[StagedBucket]:
        """Make the buffers for a sync's buckets, and return labels of these for the readers."""
        assert not self._buffers, "announced again before the last sync's buffers were released"
        size = max((label.nbytes for label in labels), default=0)
        openers = []
        for _ in range(min(BUFFERS, len(labels))):
            if self._device == "cuda":
                with expandable_segments_off():
                    buffer = torch.empty(size, dtype=torch.uint8, device="cuda")
                openers.append(reduce_tensor(buffer))
            else:
                memory = NodeMemory(size=size)
                buffer = memory.flat
                openers.append((_open_on_node, (memory.path,)))
                self._memories.append(memory)
            self._buffers.append(buffer)
        self._last_sync_number = self._number
        last_number = self._number + len(labels)
        return [
            StagedBucket(
                entries=label.entries,
                fingerprint=label.fingerprint,
                place=place,
                number=number,
                last=last_number,
                board=(self._name, self._board.path),
                buffer=openers[number % len(openers)],
            )
            for number, label in enumerate(labels, self._number + 1)
        ]

    def fill(self, bucket: Sequence[tuple[str, torch.Tensor]], readers: set[int]) -> torch.Tensor:
        """Put the next bucket into its buffer, and return the filled bytes.

        It waits until the bucket before it in this buffer has been read. `readers` are process ids;
        those that have died or are not waited for any longer are removed.
        """
        self._number += 1
        earlier_number = self._number - len(self._buffers)
        # Buckets of the sync before have been read, but not by a reader that is new.
        if earlier_number > self._last_sync_number:
            self._wait(readers, earlier_number)
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
        deadline_s = time.monotonic() + TIMEOUT
        next_check_s = time.monotonic() + LOOK_S
        while waiting := [pid for pid in readers if self._board.number_at(8 * pid) < number]:
            time_s = time.monotonic()
            if time_s > next_check_s:
                readers.difference_update(pid for pid in waiting if not _lives(pid))
                next_check_s = time_s + LOOK_S
            if time_s > deadline_s:
                log.warning(
                    "processes %s have not read weights for %s s: they are not waited for",
                    waiting,
                    TIMEOUT,
                )
                readers.difference_update(waiting)
            time.sleep(1e-4)


@contextmanager
def expandable_segments_off() -> Iterator[None]:
    """Let PyTorch allocate whole segments in the block, as CUDA IPC needs them.

    It changes nothing unless the environment asks for expandable segments.
    """
    settings = (os.environ.get(name, "") for name in ALLOCATOR_SETTINGS)
    if not any(
        re.search(r"expandable_segments\s*:\s*true", value, re.IGNORECASE) for value in settings
    ):
        yield
        return
    _set_allocator("expandable_segments:False")
    try:
        yield
    finally:
        _set_allocator("expandable_segments:True")


def _set_allocator(settings: str) -> None:
    """Change settings of PyTorch's CUDA allocator while it works."""
    # The name in the second line is the one before torch 2.10 or so.
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (change or torch.cuda.memory._set_allocator_settings)(settings)


def at(place: str, buckets: Sequence[StagedBucket]) -> list[StagedBucket]:
    """Return the buckets that can be opened at `place`.

    Raises:
        ValueError: none can.
    """
    buckets_here = [bucket for bucket in buckets if bucket.place == place]
    if not buckets_here:
        sender_places = ", ".join(sorted({bucket.place for bucket in buckets}))
        raise ValueError(
            "rollout.weight_sync: shared_memory, but no actor rank is at the place of this "
            f"rollout worker, {place} (actor ranks: {sender_places}); set broadcast or object_store"
        )
    return buckets_here


def opened(buckets: Sequence[StagedBucket]) -> Generator[dict[str, torch.Tensor]]:
    """Yield the weights of each bucket, as views of the sender's memory.

    Copy them before asking for the next.

    Raises:
        TimeoutError: weights that were offered do not come.
        WeightsDiffer: the weights have another fingerprint than their bucket's label.
    """
    forget_others({bucket.board[0] for bucket in buckets})
    yield from read_staged(buckets, os.getpid())


def arrivals_at_places(
    buckets_by_place: Sequence[Sequence[StagedBucket]],
) -> Iterator[tuple[StagedBucket, ...]]:
    """Yield each bucket of a sync, as at each place, when it can be read at all of them.

    It is for a process whose children read; all of them have read when it asks for the next. While
    one place is awaited, the next places are acknowledged one bucket late. The senders, who gather
    each bucket together, have a second buffer for that.

    Raises:
        TimeoutError: as `staged_arrivals`.
    """
    streams = [staged_arrivals(buckets, os.getpid()) for buckets in buckets_by_place]
    try:
        yield from zip(*streams, strict=True)
    finally:
        for stream in streams:
            stream.close()  # acknowledges what no one will read


def staged_arrivals(buckets: Sequence[StagedBucket], pid: int) -> Generator[StagedBucket]:
    """Yield each bucket when it is in its buffer; acknowledge it when the next is asked for.

    `pid`: of this process, which copies the bucket, or whose children do.

    Raises:
        TimeoutError: weights that were offered do not come, or were overwritten before they were
            copied.
    """
    if not buckets:
        return
    board = mapped(*buckets[0].board)
    n_buffers = min(BUFFERS, len(buckets))
    try:
        for bucket in buckets:
            deadline_s = time.monotonic() + TIMEOUT
            while board.number_at(0) < bucket.number:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"weights that were offered did not come in {TIMEOUT} s")
                time.sleep(1e-4)
            yield bucket
            if board.number_at(0) >= bucket.number + n_buffers:
                raise TimeoutError(
                    f"weights were overwritten: this process took more than {TIMEOUT} s to copy "
                    "them"
                )
            board.set_number(8 * pid, bucket.number)
    finally:  # the sender does not wait for a reader that failed
        board.set_number(8 * pid, buckets[-1].last)


def read_staged(buckets: Sequence[StagedBucket], pid: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the weights of each bucket as views of its buffer.

    Copy them before asking for the next. `pid`: of this process.

    Raises:
        TimeoutError: as `staged_arrivals`.
        WeightsDiffer: the weights have another fingerprint than their label.
    """
    buffers = StagedBuffers()
    with closing(staged_arrivals(buckets, pid)) as arrived:
        for bucket in arrived:
            flat = buffers.bytes_of(bucket)
            weights = bucket.views(flat)
            bucket.verify(weights, "as received")
            yield weights
            if flat.is_cuda:
                torch.cuda.synchronize()  # copied before the sender writes again


class StagedBuffers:
    """The buffers of a sender that this process has opened.

    CUDA counts how often a buffer is opened, so it is opened once in a sync.
    """

    def __init__(self) -> None:
        self._opened: dict[Any, torch.Tensor] = {}

    def bytes_of(self, bucket: StagedBucket) -> torch.Tensor:
        """Return the bytes of a bucket that is in its buffer, uint8 [nbytes], on this process's own
        GPU."""
        rebuild, arguments = bucket.buffer
        key = pickle.dumps(arguments)
        if key not in self._opened:
            if torch.cuda.is_available() and len(arguments) > REBUILD_DEVICE:
                # The sender has the GPU under another number, where either sees several.
                leading_arguments, trailing_arguments = (
                    arguments[:REBUILD_DEVICE],
                    arguments[REBUILD_DEVICE + 1 :],
                )
                arguments = (*leading_arguments, torch.cuda.current_device(), *trailing_arguments)
            self._opened[key] = rebuild(*arguments)
        return self._opened[key][: bucket.nbytes]

    def close(self) -> None:
        """Drop the buffers, so that the sender can free them."""
        self._opened = {}
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()


def _open_on_node(path: str) -> torch.Tensor:
    """Open a buffer in node memory; a reader calls it by `StagedBucket.buffer`."""
    return NodeMemory(path).flat


def _lives(pid: int) -> bool:
    """Return whether a process of this node runs: it exists, and is no zombie."""
    try:
        # The state follows the command, which is in parentheses and may contain some itself.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
