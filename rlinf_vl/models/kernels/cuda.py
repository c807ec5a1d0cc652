"""The parts of a layer on CUDA, with the names of `kernels.cpu`.

Rotation and SwiGLU are those of `kernels.fused`, RMSNorm is PyTorch's fused kernel in both
directions. Without Triton, and on `meta`, PyTorch's operations and autograd's backwards are used.
"""

import torch
from torch import nn
from torch.nn import functional as F

from rlinf_vl.models.kernels import fused


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `kernels.cpu.rms_norm` by PyTorch's fused kernel."""
    if weight.dtype != x.dtype:  # the fused kernel has one dtype
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight, eps)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return `kernels.cpu.rotate`."""
    if fused.serves(x):
        return fused.rotate(x, cos, sin)
    turned, copied = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
    first, second = turned.chunk(2, -1)
    turned = turned * cos + torch.cat((-second, first), -1) * sin
    return torch.cat((turned, copied), -1) if copied.shape[-1] else turned


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) · up."""
    if fused.serves(gate):
        return fused.swiglu(gate, up)
    return F.silu(gate) * up


def projections(x: torch.Tensor, *layers: nn.Module) -> tuple[torch.Tensor, ...]:
    """Return each linear layer applied to x [..., H]."""
    return tuple(layer(x) for layer in layers)
