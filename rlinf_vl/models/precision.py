"""bfloat16 on a CPU: which CPUs compute with it, and products of it that are not rounded."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def has_bfloat16_units() -> bool:
    """Whether this CPU multiplies bfloat16 matrices (Intel AMX), several times faster than float32 ones."""
    return torch.cpu._is_amx_tile_supported()


@contextmanager
def bfloat16_products(like: torch.Tensor) -> Iterator[None]:
    """On a CPU and with `like` bfloat16, multiply float32 copies of bfloat16 numbers with bfloat16 units: exact products,
    float32 sums and results. (Products of bfloat16 tensors there round their results to bfloat16, too coarse for logits.)
    """
    if like.is_cuda or like.dtype != torch.bfloat16:
        yield
        return
    matmul = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]  # made at import
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before
