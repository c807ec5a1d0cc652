"""Softmax attention over parts of the keys, merged exactly by their log-sum-exp.

References: Juravsky et al. 2024, "Hydragen"; Dao et al. 2023, "Flash-Decoding".
"""

from typing import NamedTuple

import torch

from rlinf_vl.models.kernels.products import bfloat16_products


class Partial(NamedTuple):
    """The attention over a part of the keys, not normalised; float32."""

    out: torch.Tensor  # [.., Q, D]
    total: torch.Tensor  # sum of the weights [.., Q, 1]
    top: torch.Tensor  # highest score [.., Q, 1]


def partial(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> Partial:
    """Attend to one part of the keys.

    Args:
        q: [n, H_kv, Q, D].
        k: [n, H_kv, K, D], as v.
        mask: -inf where a key does not count, else 0; broadcast to [n, H_kv, Q, K].
        scaling: factor of the scores.
    """
    if q.dtype == torch.float32:
        scores = (q * scaling) @ k.transpose(-1, -2)
    else:  # scale the float32 scores, because a scaled bfloat16 query would be rounded
        scores = product(q, k.transpose(-1, -2)).mul_(scaling)
    if mask is not None:
        scores = scores.add_(mask)
    # Of no key that counts: a number, so that the weights are 0 and not NaN.
    top = scores.amax(-1, keepdim=True).clamp_min_(torch.finfo(torch.float32).min)
    weights = (scores - top).exp_()
    return Partial(product(weights.to(v.dtype), v), weights.sum(-1, keepdim=True), top)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a @ b for [n, H_kv, ·, ·] in float32.

    The trainer's kernels don't round scores to bfloat16, so the sampler must not either.
    """
    if a.is_cuda and a.dtype != torch.float32:
        result = torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32)
        return result.unflatten(0, a.shape[:2])
    with bfloat16_products(a):
        return a.float() @ b.float()


def merge_and_normalise(a: Partial, b: Partial) -> torch.Tensor:
    """Return the attention over both parts, normalised."""
    top = torch.maximum(a.top, b.top)
    scale_a, scale_b = (a.top - top).exp(), (b.top - top).exp()
    return (a.out * scale_a + b.out * scale_b) / (a.total * scale_a + b.total * scale_b)


def combine(parts: Partial, absent: torch.Tensor) -> Partial:
    """Combine K parts [n, K, ..] of the same queries into one [n, ..]. `absent`: bool [n, K], parts
    to leave out."""
    tops = parts.top.masked_fill(absent[:, :, None, None, None], -torch.inf)
    top = tops.amax(1)
    scale = (tops - top[:, None]).exp_()
    return Partial((parts.out * scale).sum(1), (parts.total * scale).sum(1), top)
