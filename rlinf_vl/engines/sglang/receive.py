"""Receives weights in SGLang's schedulers: a custom weight loader that reads what labels name.

The worker passes on the labels of a sync, one bucket a message, and to each scheduler those of its
own place. The scheduler opens a rank's memory on its own GPU, or unpacks changes there, and the
model takes its slices of the weights. So no bucket is copied on the way, the worker needs no memory
of any GPU, and an engine of several GPUs is written on all of them at once.
"""

import base64
import pickle
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rlinf_vl.engines.sglang.masked import load_masked
from rlinf_vl.weights.buckets import fingerprint
from rlinf_vl.weights.delta import Delta, patches
from rlinf_vl.weights.node_memory import NodeMemory, forget_others, mapped
from rlinf_vl.weights.staging import StagedBucket, StagedBuffers

#: The path by which SGLang finds `load` (its server argument custom_weight_loader).
LOADER = f"{__name__}.load"
#: (name, weight) in transformers → the names and weights that SGLang loads, as `Family` has it.
EngineNames = Callable[[str, torch.Tensor], Iterable[tuple[str, torch.Tensor]]]

_buffers = StagedBuffers()  # of the sync that runs


@dataclass(frozen=True, slots=True)
class BucketMessage:
    """A bucket in a rank's memory.

    Attributes:
        answer: name and path of the memory in which each scheduler notes the fingerprint of what
            it reads, if the handle has one.
        number: of this scheduler.
        is_last: whether it is the sync's last bucket.
    """

    bucket: StagedBucket
    answer: tuple[str, str]
    number: int
    is_last: bool

    def read(self, data: torch.Tensor, model: torch.nn.Module) -> None:
        bucket = self.bucket
        weights = bucket.views(_buffers.bytes_of(bucket))
        if bucket.fingerprint is not None:
            forget_others({self.answer[0]})
            actual = fingerprint(weights[name] for name in bucket.names)
            mapped(*self.answer).set_number(8 * self.number, actual)
        model.load_weights(list(weights.items()))  # pyright: ignore[reportCallIssue]  # SGLang's
        if data.is_cuda:
            torch.cuda.synchronize()  # copied before the sender writes again
        if self.is_last:
            _buffers.close()


@dataclass(frozen=True, slots=True)
class DeltaMessage:
    """All ranks' changes of the weights of one bucket.

    Attributes:
        deltas: with no arrays.
        sizes: bytes of each array, three a delta, end to end in the message's data.
        engine_names: as in `Family`.
    """

    deltas: Sequence[Delta]
    sizes: Sequence[int]
    engine_names: EngineNames

    def read(self, data: torch.Tensor, model: torch.nn.Module) -> None:
        arrays = iter(np.split(data.cpu().numpy(), np.cumsum(self.sizes)[:-1]))
        deltas = [
            replace(
                delta,
                **{
                    name: next(arrays).view(getattr(delta, name).dtype)
                    for name in ("counts", "positions", "values")
                },
            )
            for delta in self.deltas
        ]
        device = str(data.device)
        for bucket in patches(deltas, device):
            # One weight at a time: whole, it is as large as in the model.
            for name, patch in bucket.items():
                load_masked(model, list(self.engine_names(name, patch.masked(device))))


@dataclass(frozen=True, slots=True)
class ForgetMessage:
    """All weights are void until others come."""

    def read(self, data: torch.Tensor, model: torch.nn.Module) -> None:
        for parameter in model.parameters():
            parameter.fill_(torch.nan)


def encode(
    message: BucketMessage | DeltaMessage | ForgetMessage, data: torch.Tensor
) -> list[tuple[str, Any]]:
    """Return what SGLang passes on to `load`: names and tensors, so the message is a name."""
    import cloudpickle  # names and functions of users' files travel by value

    return [(base64.b64encode(cloudpickle.dumps(message)).decode(), data)]


def load(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Load what a message names into the model."""
    ((encoded, data),) = named_tensors
    message = pickle.loads(base64.b64decode(encoded))
    with torch.no_grad():
        message.read(data, model)


class Answers:
    """The fingerprints that schedulers note, of one bucket at a time."""

    def __init__(self, n_schedulers: int) -> None:
        self._memory = NodeMemory(size=8 * n_schedulers)
        # A path may return, as numbers of closed files do.
        self.where = (uuid.uuid4().hex, self._memory.path)

    def check(self, buckets: Sequence[StagedBucket]) -> None:
        """Raise `WeightsDiffer` if a scheduler has read other weights than its bucket's label says."""
        for number, bucket in enumerate(buckets):
            bucket.compare(self._memory.number_at(8 * number), "as received")


def emptied(deltas: Sequence[Delta]) -> tuple[list[Delta], list[int], torch.Tensor]:
    """Return deltas without their arrays, the bytes of each array, and the arrays end to end."""
    arrays = [array for d in deltas for array in (d.counts, d.positions, d.values)]
    raw = [np.ascontiguousarray(array).view(np.uint8).reshape(-1) for array in arrays]
    empty = [
        replace(d, counts=d.counts[:0], positions=d.positions[:0], values=d.values[:0])
        for d in deltas
    ]
    return empty, [piece.nbytes for piece in raw], torch.from_numpy(np.concatenate(raw))
