"""AdamW over what is trained, its learning rates, and a table of them."""

import math
from itertools import product

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rlinf_vl.actor.mesh import Mesh
from rlinf_vl.config.schema import ActorConfig, OptimConfig
from rlinf_vl.models.loading import PARTS, part_of
from rlinf_vl.models.lora import is_adapter
from rlinf_vl.models.nf4 import is_quantized, shape_of
from rlinf_vl.models.policy import PolicyModel


def learning_rates(optim: OptimConfig) -> dict[str, float]:
    """Peak learning rate of each of `PARTS`."""
    own = {"projector": optim.projector_lr, "vision_tower": optim.vision_tower_lr}
    return {part: own.get(part) or optim.lr for part in PARTS}


def make_optimizer(policy: PolicyModel, optim: OptimConfig) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters, each part at its learning rate; weight decay spares vectors (norms and biases)."""
    # One fused call takes sharded weights or whole ones (`Family.float32_weights`), never both.
    groups: dict[tuple[str, bool, bool], list[nn.Parameter]] = {}
    for name, p in policy.model.named_parameters():
        if p.requires_grad:
            key = part_of(name, policy.family), p.ndim > 1, isinstance(p, DTensor)
            groups.setdefault(key, []).append(p)
    rates = learning_rates(optim)
    return torch.optim.AdamW(
        [
            {"params": groups[key], "lr": rates[key[0]], "weight_decay": optim.weight_decay if key[1] else 0.0}
            for key in product(PARTS, (True, False), (True, False))
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
    """Learning-rate factor per optimizer step of `total`, of which `done` were taken before: linear warm-up, then
    `optim.lr_scheduler` down to `optim.min_lr_ratio`. A second scheduler of an optimizer starts from the first one's peak."""

    def factor(step: int) -> float:
        if step < optim.lr_warmup_steps:
            return (step + 1) / (optim.lr_warmup_steps + 1)
        progress = min(1.0, (step - optim.lr_warmup_steps) / max(1, total - optim.lr_warmup_steps))
        if optim.lr_scheduler == "linear":
            return 1 - (1 - optim.min_lr_ratio) * progress
        if optim.lr_scheduler == "cosine":
            return optim.min_lr_ratio + (1 - optim.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
        return 1.0

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor, last_epoch=done - 1)


def parts_table(policy: PolicyModel, mesh: Mesh, actor: ActorConfig) -> str:
    """What is trained, a line a part, one for what is quantized in it and one for its adapters: parameters, dtypes, over how many
    ranks they are sharded (1: each rank has all), learning rate."""
    rates = learning_rates(actor.optim)
    lines = [f"{'part':<23}{'parameters':>14}{'trained':>14}  weights, compute  ranks  learning rate"]
    for part in PARTS:
        named = [(n, p) for n, p in policy.model.named_parameters() if part_of(n, policy.family) == part]
        for what in ("", " in nf4", " adapters"):
            own = [p for name, p in named if _kind(name, p) == what]
            if not own:
                continue
            trained = sum(p.numel() for p in own if p.requires_grad)
            stored = "nf4" if what == " in nf4" else str(own[0].dtype).removeprefix("torch.")
            dtypes = f"{stored}, {actor.fsdp_config.mixed_precision.param_dtype}"
            rate = f"{rates[part]:g}" if trained else "frozen"
            total = sum(shape_of(p).numel() for p in own)
            shards = 1 if stored == "nf4" else mesh.sharding.size()
            lines.append(f"{part + what:<23}{total:>14,}{trained:>14,}  {dtypes:<16}  {shards:>5}  {rate:>13}")
    return "\n".join(lines)


def _kind(name: str, weight: torch.Tensor) -> str:
    return " adapters" if is_adapter(name) else " in nf4" if is_quantized(weight) else ""
