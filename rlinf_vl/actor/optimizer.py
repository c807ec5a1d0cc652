"""AdamW over the trained parameters, its learning rates, and a table of them."""

import math
from itertools import product

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rlinf_vl.actor.mesh import Mesh
from rlinf_vl.config.schema import ActorConfig, OptimConfig
from rlinf_vl.models.loading import PARTS, part_of
from rlinf_vl.models.lora import is_adapter
from rlinf_vl.models.nf4 import is_quantized, shape_of
from rlinf_vl.models.policy import PolicyModel


def learning_rates(optim: OptimConfig) -> dict[str, float]:
    """Return the peak learning rate of each of `PARTS`."""
    tower_lr = optim.vision_tower_lr or optim.lr
    return {part: tower_lr if part == "vision_tower" else optim.lr for part in PARTS}


def make_optimizer(policy: PolicyModel, optim: OptimConfig) -> torch.optim.Optimizer:
    """Make AdamW over the trainable parameters, each part at its learning rate.

    Weight decay spares vectors (norms and biases).
    """
    # One fused call takes weights that are sharded over the same ranks, or whole ones
    # (`Family.float32_weights`).
    groups: dict[tuple[str, bool, DeviceMesh | None], list[nn.Parameter]] = {}
    meshes: dict[DeviceMesh | None, None] = {}
    for name, param in policy.model.named_parameters():
        if param.requires_grad:
            mesh = param.device_mesh if isinstance(param, DTensor) else None
            meshes[mesh] = None
            key = part_of(name, policy.family), param.ndim > 1, mesh
            groups.setdefault(key, []).append(param)
    rates = learning_rates(optim)
    return torch.optim.AdamW(
        [
            {
                "params": groups[key],
                "lr": rates[key[0]],
                "weight_decay": optim.weight_decay if key[1] else 0.0,
            }
            for key in product(PARTS, (True, False), meshes)
            if key in groups
        ],
        lr=optim.lr,
        betas=(optim.adam_beta1, optim.adam_beta2),
        eps=optim.adam_eps,
        fused=True,
    )


def make_scheduler(
    optimizer: torch.optim.Optimizer, optim: OptimConfig, *, total: int, done: int = 0
) -> torch.optim.lr_scheduler.LRScheduler:
    """Make the schedule of the learning rate per optimizer step, of which `done` were taken before.

    Linear warm-up, then `optim.lr_scheduler` down to `optim.min_lr_ratio` at step `total`, and at
    most the line of `optim.lr_cooldown_steps` down to it. A second scheduler of an optimizer starts
    from the first one's peak.
    """

    def scheduled(step: int) -> float:
        if step < optim.lr_warmup_steps:
            return (step + 1) / (optim.lr_warmup_steps + 1)
        progress = min(1.0, (step - optim.lr_warmup_steps) / max(1, total - optim.lr_warmup_steps))
        if optim.lr_scheduler == "linear":
            return 1 - (1 - optim.min_lr_ratio) * progress
        if optim.lr_scheduler == "cosine":
            return optim.min_lr_ratio + (1 - optim.min_lr_ratio) * 0.5 * (
                1 + math.cos(math.pi * progress)
            )
        return 1.0

    def factor(step: int) -> float:
        if not optim.lr_cooldown_steps:
            return scheduled(step)
        steps_left = (total - step) / optim.lr_cooldown_steps
        return min(scheduled(step), optim.min_lr_ratio + (1 - optim.min_lr_ratio) * steps_left)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor, last_epoch=done - 1)


def parts_table(policy: PolicyModel, mesh: Mesh, actor: ActorConfig) -> str:
    """Return a table of the model's parts, for the log.

    A part has a line for its plain weights, one for its quantized weights and one for its adapters,
    each with parameters, dtypes, over how many ranks they are sharded (1: each rank has all), and
    learning rate.
    """
    rates = learning_rates(actor.optim)
    lines = [
        f"{'part':<23}{'parameters':>14}{'trained':>14}  weights, compute  ranks  learning rate"
    ]
    for part in PARTS:
        part_weights = [
            (n, p) for n, p in policy.model.named_parameters() if part_of(n, policy.family) == part
        ]
        for kind in ("", " in nf4", " adapters"):
            weights = [p for name, p in part_weights if _kind(name, p) == kind]
            if not weights:
                continue
            trained = sum(p.numel() for p in weights if p.requires_grad)
            stored_dtype = (
                "nf4" if kind == " in nf4" else str(weights[0].dtype).removeprefix("torch.")
            )
            dtypes = f"{stored_dtype}, {actor.fsdp_config.mixed_precision.param_dtype}"
            rate = f"{rates[part]:g}" if trained else "frozen"
            total = sum(shape_of(p).numel() for p in weights)
            # Quantized weights stay whole on every rank (`Mesh.shard`).
            shards = 1 if stored_dtype == "nf4" else mesh.sharding.size()
            lines.append(
                f"{part + kind:<23}{total:>14,}{trained:>14,}  {dtypes:<16}  {shards:>5}  "
                f"{rate:>13}"
            )
    return "\n".join(lines)


def _kind(name: str, weight: torch.Tensor) -> str:
    """Return which line of its part in `parts_table` a weight belongs to, as the line's suffix."""
    return " adapters" if is_adapter(name) else " in nf4" if is_quantized(weight) else ""
