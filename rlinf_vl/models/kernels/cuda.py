"""The parts of a layer on CUDA, with the names of `kernels.cpu`: PyTorch's own operations, fused where it has them (RMSNorm in
both directions, SiLU), and autograd's backwards. The backwards of `kernels.cpu` were measured on CPUs only."""

import torch
from torch import nn
from torch.nn import functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if weight.dtype != x.dtype:  # the fused kernel has one dtype
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight, eps)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    turned, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
    first, second = turned.chunk(2, -1)
    turned = turned * cos + torch.cat((-second, first), -1) * sin
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def projections(x: torch.Tensor, *layers: nn.Module) -> tuple[torch.Tensor, ...]:
    return tuple(layer(x) for layer in layers)
