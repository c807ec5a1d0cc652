"""AdamW over a policy's trainable weights, and its learning rate."""

import math

import torch
from torch import nn

from rlinf_vl.config.schema import OptimConfig


def make_optimizer(policy: nn.Module, optim: OptimConfig) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters; weight decay spares vectors (norms and biases)."""
    trained = [p for p in policy.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": optim.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
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
