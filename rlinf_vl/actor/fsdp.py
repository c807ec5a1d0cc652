"""FSDP2: shard a policy block by block, step its optimizer with the true global gradient norm, gather whole weights."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from rlinf_vl.models.families import submodules
from rlinf_vl.models.loading import DTYPES
from rlinf_vl.models.policy import PolicyModel


def shard(
    policy: PolicyModel,
    mesh: DeviceMesh,
    *,
    param_dtype: str,
    reduce_dtype: str,
    cpu_offload: bool = False,
    reshard_after_forward: bool = True,
    gradient_checkpointing: bool = False,
    use_reentrant: bool = False,
) -> PolicyModel:
    """Shard parameters over `mesh`, one FSDP unit per vision and text block, one for the rest of the tower, one for the rest.

    Master weights stay in their dtype (float32); blocks compute in `param_dtype` and gradients are reduced in
    `reduce_dtype`. Checkpointing recomputes each text block (and each block of a trained tower) in backward. Without
    `reshard_after_forward`, and always on a single rank, gathered weights stay from the first micro-batch of an optimizer
    step to its last, and gradients are reduced after that one (see `micro_step`).
    """
    family, model = policy.family, policy.model
    if gradient_checkpointing:
        how = {"use_reentrant": use_reentrant}
        if hasattr(model, "activation_checkpointing_enable"):  # its name in newer versions of transformers
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=how)
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
    policy.keeps_gathered = not reshard_after_forward or mesh.size() == 1
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": not policy.keeps_gathered,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=DTYPES[param_dtype],
            reduce_dtype=DTYPES[reduce_dtype],
            # Every layer computes in its weights' dtype by itself. A cast here would round what is float32 on purpose, as
            # in the engine: the vision blocks' rotary tables.
            cast_forward_inputs=False,
        ),
        "offload_policy": CPUOffloadPolicy() if cpu_offload else OffloadPolicy(),
    }
    for unit in (module for path in family.fsdp_units for module in submodules(model, path)):
        fully_shard(unit, **options)
    options["reshard_after_forward"] = False  # backward starts with the root's weights
    fully_shard(policy, **options)
    register_fsdp_forward_method(policy, "encode")
    return policy


def micro_step(policy: Any, *, last: bool) -> None:
    """Say before a micro-batch whether it is the last before the optimizer step: only then must gradients be reduced and
    weights be sharded again, where `shard` was told to keep them till then."""
    if policy.keeps_gathered:  # `shard` has made it an FSDPModule
        policy.set_requires_gradient_sync(last)
        policy.set_reshard_after_backward(last)
        policy.set_is_last_backward(last)


def reshard_all(policy: nn.Module) -> None:
    """Shard again what a pass without a backward has left gathered, so that the parameters are the optimizer's."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def make_optimizer(policy: nn.Module, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float):
    """AdamW over the trainable parameters; weight decay spares vectors (norms and biases)."""
    trained = [p for p in policy.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, eps=eps, fused=True)


def make_scheduler(optimizer, kind: str, *, warmup: int, total: int, min_ratio: float, done: int = 0):
    """Learning-rate factor per optimizer step, `done` of which were taken before: linear warm-up, then `kind` (constant,
    linear, cosine) down to `min_ratio`. A second scheduler of an optimizer goes on from the first one's peak rate."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        done = min(1.0, (step - warmup) / max(1, total - warmup))
        if kind == "linear":
            return 1 - (1 - min_ratio) * done
        if kind == "cosine":
            return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * done))
        return 1.0

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor, last_epoch=done - 1)


def clip_gradients(policy: nn.Module, max_norm: float) -> float:
    """Clip to `max_norm` by the norm over all shards of all ranks; returns that norm, before clipping (float32)."""
    norm = nn.utils.clip_grad_norm_([p for p in policy.parameters() if p.requires_grad], max_norm)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def whole_weights(
    policy: PolicyModel, dtype: torch.dtype, device: str = "cpu", *, frozen: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and whole value of every trainable weight, and of `frozen` ones if asked for, in the transformers model's own
    names, cast once to `dtype`, on `device`.

    Collective: every rank must exhaust it. A tied weight appears once. Shards in host memory (`fsdp_config.cpu_offload`) are
    gathered on the device all the same.
    """
    for name, param in policy.model.named_parameters():
        if param.requires_grad or frozen:
            value = param.detach()
            if isinstance(value, DTensor):
                value = value.to(value.device_mesh.device_type, dtype)
                value = value.full_tensor() if isinstance(value, DTensor) else value
            yield name, value.to(device, dtype)


def weight_shapes(
    policy: PolicyModel, dtype: torch.dtype, *, frozen: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """What `whole_weights` would yield, as tensors on the meta device. Not collective."""
    for name, param in policy.model.named_parameters():
        if param.requires_grad or frozen:
            yield name, torch.empty(param.shape, dtype=dtype, device="meta")
