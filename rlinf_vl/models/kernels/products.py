"""Float32 matrix products on a CPU, each by the library that is faster there.

PyTorch's go to MKL, which keeps to AVX2 on AMD's CPUs. oneDNN, which PyTorch brings too, uses AVX-512 on every CPU that has it,
and multiplies there about twice as fast.
"""

from functools import cache
from pathlib import Path

import torch

#: Multiply-adds (some milliseconds) from which oneDNN is asked: it compiles a kernel for each new shape, which costs about
#: one, and in decoding every step may have another shape.
ONEDNN_FROM = 2**28


@cache
def onednn_is_faster() -> bool:
    """Whether this is an AMD CPU with AVX-512, and this PyTorch has MKL and oneDNN."""
    try:
        vendor = "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return (
        vendor
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _by_onednn(a: torch.Tensor, b: torch.Tensor) -> bool:
    large = a.device.type == "cpu" and a.dtype == torch.float32 and a.shape[0] * b.numel() >= ONEDNN_FROM
    if not large or not onednn_is_faster():
        return False
    # Under `precision.bfloat16_products` PyTorch's own product is meant.
    return torch.backends.mkldnn.matmul.fp32_precision != "bf16"  # pyright: ignore[reportAttributeAccessIssue]


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a · b for a [M, K] and b [K, N] of any strides, dtype and device. For use where autograd does not record."""
    if _by_onednn(a, b):
        return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return a @ b


def add_matmul(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """out += a · b, for out [M, N], a [M, K] and b [K, N]."""
    if _by_onednn(a, b):
        out.add_(matmul(a, b))
    else:
        out.addmm_(a, b)
