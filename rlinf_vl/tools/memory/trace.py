"""Trace a pass of the real model code on tensors of the meta device.

A trace has the operations that run, those that wait for the GPU, and the bytes that are
alive at once. Nothing is computed, so a model of 2B takes about a second.
"""

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel

from rlinf_vl.models import attention
from rlinf_vl.models.family import Family, VisionFeatures
from rlinf_vl.models.image_tokens import runs_of_images
from rlinf_vl.models.kernels.attention import Varlen
from rlinf_vl.models.loading import output_weight
from rlinf_vl.models.logprobs import CHUNK_BYTES
from rlinf_vl.models.policy import PolicyModel, image_encoder, trains_images
from rlinf_vl.types import MicroBatch

_aten = torch.ops.aten
_AUTOCAST = torch.autocast
#: Operations whose result's shape or value the CPU needs: it waits until the GPU has computed them.
_SYNCHRONISING = {
    _aten._local_scalar_dense.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
}


class LiveBytes(TorchDispatchMode):
    """A mode that counts operations, and the bytes of living storages.

    Attributes:
        operations: number of operations.
        synchronising: of them, those that wait for the GPU, by name.
        current: bytes of living storages but those of `ignored`; `peak`: the most so far.
    """

    def __init__(self, ignored: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self.operations = 0
        self.synchronising: Counter[str] = Counter()
        self.current = 0
        self.peak = 0
        self._live: dict[int, int] = {}
        # The reference keeps the storage, so that no other one gets its address.
        storages = [tensor.untyped_storage() for tensor in ignored]
        self._ignored = {storage._cdata: storage for storage in storages}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.operations += 1
        self.synchronising[str(operation)] += operation in _SYNCHRONISING
        on_meta = any(
            isinstance(x, torch.Tensor) and x.is_meta for x in tree_leaves((args, kwargs))
        )
        # Small tables are made on the CPU; on a GPU they would have been copied to it.
        if on_meta and operation is not _aten._to_copy.default:
            args = tree_map_only(
                torch.Tensor, lambda x: x if x.is_meta or not x.ndim else x.to("meta"), args
            )
        result = operation(*args, **kwargs)
        for storage in (
            x.untyped_storage() for x in tree_leaves(result) if isinstance(x, torch.Tensor)
        ):
            key = storage._cdata
            if key not in self._live and key not in self._ignored:
                self._live[key] = storage.nbytes()
                self.current += self._live[key]
                self.peak = max(self.peak, self.current)
                weakref.finalize(storage, self._free, key)
        return result

    def _free(self, key: int) -> None:
        """Subtract a storage that has been freed."""
        self.current -= self._live.pop(key)


class _FusedNorm(torch.autograd.Function):
    """An RMSNorm with the memory of CUDA's fused one; PyTorch has none on the meta device."""

    @staticmethod
    def forward(ctx, x, weight):
        # CUDA's kernel saves one float32 for each row: the inverse of its root mean square.
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _autocast(device_type: str, *arguments: Any, **options: Any) -> AbstractContextManager[Any]:
    """Return `torch.autocast`, or nothing on the meta device, which it does not know.

    It is only ever disabled for it (by peft, around stacked experts).
    """
    return nullcontext() if device_type == "meta" else _AUTOCAST(device_type, *arguments, **options)


@contextmanager
def pretend_cuda() -> Iterator[None]:
    """Let the model code take its CUDA branches in the block.

    This holds for the whole process: use it before threads start.
    """
    with (
        mock.patch.object(torch.Tensor, "is_cuda", property(lambda _: True)),
        mock.patch.object(attention, "kernel_for", lambda *_: Varlen),
        mock.patch.object(
            torch.nn.functional, "rms_norm", lambda x, _, weight, eps: _FusedNorm.apply(x, weight)
        ),
        mock.patch.object(torch, "autocast", _autocast),
        mock.patch.dict(CHUNK_BYTES, {"meta": CHUNK_BYTES["cuda"]}),
    ):
        yield


@dataclass(frozen=True, slots=True)
class Trace:
    """The trace of one pass.

    Attributes:
        operations: number of operations; `synchronising`: of those that wait for the GPU, by name.
        saved: bytes that forward leaves for backward.
        peak: the most bytes alive beside parameters and their gradients.
    """

    operations: int
    synchronising: dict[str, int]
    saved: int
    peak: int


def interpolated(first: Trace, second: Trace, low: int, high: int, size: int) -> Trace:
    """Return the trace for `size` on the line through those for `low` and `high`.

    They are numbers of tokens, or of equal layers.
    """
    share = (size - low) / (high - low)

    def between(a: int, b: int) -> int:
        return max(0, round(a + share * (b - a)))

    return Trace(
        between(first.operations, second.operations),
        first.synchronising,
        between(first.saved, second.saved),
        between(first.peak, second.peak),
    )


def trace_step(
    model: PreTrainedModel, family: Family, tokens: int, *, longest: int, chunk: int | None = None
) -> Trace:
    """Trace forward, head and backward of one micro-batch of `tokens`, in sequences of `longest`.

    An upper bound of a row of that length: each token but the first of a sequence is an image's, if
    the family has images, and each is predicted. A trained tower runs in it; features of a frozen
    one come from the cache.

    Args:
        model: on any device; `pretend_cuda` lets a meta model count as a GPU's.
        chunk: positions per chunk of the head; None: those of a run.
    """
    device = next(model.parameters()).device
    images = (
        np.setdiff1d(np.arange(tokens), np.arange(0, tokens, longest))
        if family.vision_tower
        else np.arange(0)
    )
    policy = PolicyModel(model, family, np.zeros(8, bool), temperature=1.0, chunk=chunk).to(device)
    hooks = [
        p.register_post_accumulate_grad_hook(_drop_gradient)
        for p in model.parameters()
        if p.requires_grad
    ]
    live = LiveBytes([*model.parameters(), *policy.buffers()])
    with live:
        if not family.vision_tower:
            features = None
        elif trains_images(model, family):
            features = _encode(model, family, len(images), longest)
        else:
            features = _features(model, family, len(images), device)
        logprobs, entropy = policy(_row(tokens, longest, images), features)
        saved = live.current
        (logprobs.sum() + entropy.sum()).backward()
    for hook in hooks:
        hook.remove()
    return Trace(live.operations, +live.synchronising, saved, live.peak)


def _drop_gradient(parameter: torch.Tensor) -> None:
    """Free a gradient at once: the ledger counts gradients by FSDP2's sharding."""
    parameter.grad = None


def trace_images(model: PreTrainedModel, family: Family, tokens: int, longest: int) -> Trace:
    """Trace the tower alone, without gradients, on images of `tokens` in all.

    An image has at most `longest` tokens.
    """
    live = LiveBytes(list(model.parameters()))
    with live, torch.no_grad():
        features = _encode(model, family, tokens, longest)
        saved = live.current
    del features
    return Trace(live.operations, +live.synchronising, saved, live.peak)


def _encode(model: PreTrainedModel, family: Family, tokens: int, longest: int) -> VisionFeatures:
    """Run the tower on blank images of `tokens` in all, each of about `longest` at most."""
    tower = model.get_submodule(family.vision_tower or "")
    weight = next(tower.parameters())
    blank, grid = family.blank_image(model.config)
    sizes = [min(longest, tokens - start) for start in range(0, tokens, longest)]
    # An image of n times the blank one's tokens is n times as wide.
    grids = np.concatenate([grid * (1, 1, -(-size // family.blank_tokens)) for size in sizes])
    patches = torch.zeros(int(grids.prod(axis=1).sum()), blank.shape[1], device=weight.device)
    features = family.encode_images(image_encoder(model, family), patches, grids, weight.dtype)
    # Whole tiles may have more tokens than the row has places.
    return features.select(slice(tokens)) if len(features.tokens) > tokens else features


def _features(
    model: PreTrainedModel, family: Family, tokens: int, device: torch.device
) -> VisionFeatures:
    """Return features as the cache gives them: views of one tensor for all layers."""
    weight = output_weight(model)
    stack = torch.zeros(
        family.feature_layers(model.config),
        tokens,
        weight.shape[1],
        dtype=weight.dtype,
        device=device,
    )
    return VisionFeatures(stack[0], tuple(stack[1:]))


def _row(tokens: int, longest: int, images: np.ndarray) -> MicroBatch:
    """Make a packed row of `tokens`, with image tokens at the positions `images`."""
    indices, starts, zeros = (
        np.arange(tokens),
        np.arange(0, tokens, longest),
        np.zeros(tokens, np.int64),
    )
    return MicroBatch(
        ids=zeros,
        positions=np.tile(indices % longest, (4, 1)),
        cu_seqlens=np.append(starts, tokens),
        prefix=np.full(len(starts), -1),
        copies=np.ones(len(starts), np.int64),
        row_columns={},
        predict=indices,
        targets=zeros,
        trajectories=indices // longest,
        turns=np.zeros(tokens, np.int64),
        advantages=np.zeros(tokens, np.float32),
        rollout_logprobs=None,
        versions=np.zeros(tokens, np.int32),
        columns={},
        images=(),
        pixel_values=None,
        grids=np.zeros((0, 3), np.int64),
        image_positions=images,
        image_features=np.arange(len(images)),
        image_runs=runs_of_images(np.isin(indices, images), np.append(starts, tokens)),
    )
