"""Matrix products on a CPU, in float32 by the faster library, in bfloat16 without rounded results.

PyTorch's float32 products go to MKL, which keeps to AVX2 on AMD's CPUs. oneDNN, which PyTorch
brings too, uses AVX-512 on every CPU that has it, and multiplies there about twice as fast.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

#: Multiply-adds (some milliseconds) from which oneDNN is used: it compiles a kernel for each new
#: shape, which costs about one, and in decoding every step may have another shape.
ONEDNN_FROM = 2**28


def has_bfloat16_units() -> bool:
    """Return whether this CPU multiplies bfloat16 matrices (Intel AMX): several times faster."""
    return torch.cpu._is_amx_tile_supported()


@cache
def onednn_is_faster() -> bool:
    """Return whether this is an AMD CPU with AVX-512, and this PyTorch has MKL and oneDNN."""
    try:
        is_amd = "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    has_libraries = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    has_onednn_linear = hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return (
        is_amd
        and has_libraries
        and has_onednn_linear
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
    )


@contextmanager
def bfloat16_products(like: torch.Tensor) -> Iterator[None]:
    """On a CPU, multiply float32 copies of bfloat16 numbers with bfloat16 units.

    It does so if `like` is bfloat16. Products are exact, sums and results float32. Products of
    bfloat16 tensors there round their results to bfloat16, too coarse for logits.
    """
    if like.is_cuda or like.dtype != torch.bfloat16:
        yield
        return
    matmul = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]  # made at import
    old_precision = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = old_precision


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a · b for a [M, K] and b [K, N] of any strides, dtype and device.

    For use where autograd does not record.
    """
    if _by_onednn(a, b):
        return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return a @ b


def add_matmul(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add a · b to out: out [M, N], a [M, K] and b [K, N]."""
    if _by_onednn(a, b):
        out.add_(matmul(a, b))
    else:
        out.addmm_(a, b)


def _by_onednn(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether oneDNN multiplies these: large float32 factors on a CPU where it is faster."""
    large = (
        a.device.type == "cpu"
        and a.dtype == torch.float32
        and a.shape[0] * b.numel() >= ONEDNN_FROM
    )
    if not large or not onednn_is_faster():
        return False
    # Within `bfloat16_products` PyTorch's own products must be used: their precision is set.
    return torch.backends.mkldnn.matmul.fp32_precision != "bf16"  # pyright: ignore[reportAttributeAccessIssue]
