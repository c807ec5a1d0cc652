"""Attention for packed rows.

Every layer (`layers.attention_forward`, `layers.vision_attention_forward`) hands its rotated queries, keys and values to the
`context` of the running forward: `SegmentAttention` here (images and training), or the torch engine's prefill
(`engines.torch.prefill`) or decode step (`engines.torch.decode`).

A row is segments end to end, a forest in depth-first order. A token sees the tokens before it in its segment, and all of the
segments that its segment continues: the prompt of its group, which stands in the row once, and what longer prefixes sequences
share. Own segment and each level of prefixes are attended apart and merged by their log-sum-exps, so neither a [T, T] mask nor
a second copy of a prefix's keys is made. A row of `KERNELS` computes one part.
"""

from functools import cached_property, partial
from typing import Protocol

import numpy as np
import torch

from rlinf_vl.models.kernels.attention import Kernel, kernel_for
from rlinf_vl.models.kernels.delta import Mixer, delta_rule
from rlinf_vl.models.kernels.delta_layout import DeltaLayout
from rlinf_vl.models.transfer import on_device


class AttentionContext(Protocol):
    """What one forward needs to attend, q [1|B, H, T, D], k and v [1|B, H_kv, T, D] → [B, T, H, D], and to compute gated delta
    nets."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
        """The layer's attention of `q` over what each token may see; `scaling` multiplies the scores."""
        ...

    def mix(self, layer: int, mixer: Mixer, qkv: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        """Convolution and recurrence of a gated delta net (`kernels.delta`): qkv [1|B, T, C], g and beta float32 [1|B, T, Hv] →
        [1|B, T, Hv, dv] in qkv's dtype."""
        ...


class SegmentAttention:
    """Attention and delta nets of one packed row of T tokens, whose segments may continue others."""

    def __init__(
        self,
        cu_seqlens: np.ndarray,
        prefix: np.ndarray | None = None,
        *,
        causal: bool = True,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        kernel: str | None = None,
    ) -> None:
        """
        Args:
            cu_seqlens: int [S + 1], segment boundaries, 0 … T.
            prefix: int [S], the earlier segment that each continues, -1 for none; None: none does. Segments lie in depth-first
                order, so those that descend from one are the neighbours behind it.
            causal: a token of a segment sees what is before it, and itself; False: the whole segment.
            dtype: of the queries; with `device` it chooses the kernel, unless `kernel` names one.
        """
        self._delta = partial(DeltaLayout, cu_seqlens, prefix, device)
        make = kernel_for(torch.device(device), dtype, kernel)
        self.own: Kernel = make(cu_seqlens, cu_seqlens, causal, device)
        #: (queries that continue prefixes, those prefixes' tokens as keys, the kernel between the two)
        self.shared: list[tuple[torch.Tensor | slice, torch.Tensor | slice, Kernel]] = []
        for prefixes, ends in _levels(cu_seqlens, prefix) if prefix is not None else ():
            at_once = len(prefixes) if make.many else 1
            for i in range(0, len(prefixes), at_once):
                chosen, end = prefixes[i : i + at_once], ends[i : i + at_once]
                bounds = cu_seqlens[chosen], cu_seqlens[chosen + 1], cu_seqlens[end]
                n_keys, n_queries = bounds[1] - bounds[0], bounds[2] - bounds[1]
                kernel_between = make(np.cumsum([0, *n_queries]), np.cumsum([0, *n_keys]), False, device)
                queries, keys = _where(bounds[1], n_queries, device), _where(bounds[0], n_keys, device)
                self.shared.append((queries, keys, kernel_between))

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
        assert q.shape[0] == 1, f"packed rows have batch size 1, not {q.shape[0]}"
        q_THD, k_THD, v_THD = (x[0].transpose(0, 1) for x in (q, k, v))
        return _Attention.apply(q_THD, k_THD, v_THD, self, scaling).unsqueeze(0)

    @cached_property
    def delta(self) -> DeltaLayout:
        """Of the row's delta nets; most families have none."""
        return self._delta()

    def mix(self, layer: int, mixer: Mixer, qkv: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        return delta_rule(qkv[0], g[0], beta[0], mixer, self.delta)[0].unsqueeze(0)


class _Attention(torch.autograd.Function):
    """softmax over [prefix; own] = the two softmaxes, weighed by exp(lse of the part - lse of both); so on, prefix by prefix.

    Given the merged output and log-sum-exp, each part's own backward is exact for its keys: p = exp(s - lse) and
    dS = p · (dP - Δ) with Δ = rowsum(dO · O) need nothing of the other part (Dao 2023, "FlashAttention-2", section 3.1).
    """

    @staticmethod
    def forward(ctx, q, k, v, plan: SegmentAttention, scale: float):
        out, lse = plan.own.forward(q, k, v, scale)
        if plan.shared:
            # Each merge would round what the merges before have made: in bfloat16 the error grows with the tree's depth.
            merged = out.float()
            for rows, keys, kernel in plan.shared:
                merge(merged, lse, rows, *kernel.forward(q[rows], k[keys], v[keys], scale=scale))
            out = merged.to(out.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]  # torch leaves the number open
        q, k, v, out, lse = ctx.saved_tensors
        plan, scale = ctx.plan, ctx.scale
        dq, dk, dv = plan.own.backward(grad, q, k, v, out, lse, scale)
        for rows, keys, kernel in plan.shared:
            parts = kernel.backward(grad[rows], q[rows], k[keys], v[keys], out[rows], lse[rows], scale=scale)
            for total, where, part in zip((dq, dk, dv), (rows, keys, keys), parts, strict=True):
                total[where] += part  # no token is named twice
        return dq, dk, dv, None, None


def merge(
    out: torch.Tensor, lse: torch.Tensor, rows: torch.Tensor | slice, theirs: torch.Tensor, their_lse: torch.Tensor
) -> None:
    """Merge attention over further keys into that of some rows, in place: `out` [T, H, D], which may be wider than what a kernel
    makes, and `lse` [T, H]."""
    ours, our_lse = out[rows], lse[rows]
    share = torch.sigmoid(their_lse - our_lse).unsqueeze(-1)  # exp(their_lse - lse of both)
    out[rows] = torch.lerp(ours, theirs.to(out.dtype), share.to(out.dtype))
    lse[rows] = torch.logaddexp(our_lse, their_lse)


def _levels(cu_seqlens: np.ndarray, prefix: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """The segments that others continue, by their depth in the tree: (segments, first one behind each that doesn't descend
    from it)."""
    ends = np.full(len(prefix), len(prefix))
    depths = np.zeros(len(prefix), int)
    path: list[int] = []
    for segment, parent in enumerate(prefix.tolist()):
        while path and path[-1] != parent:
            ends[path.pop()] = segment
        assert parent == (path[-1] if path else -1), "segments must lie in depth-first order"
        depths[segment] = len(path)
        path.append(segment)
    shared = np.flatnonzero((cu_seqlens[:-1] < cu_seqlens[1:]) & (cu_seqlens[1:] < cu_seqlens[ends]))
    levels = (shared[depths[shared] == depth] for depth in range(depths.max(initial=-1) + 1))
    return [(level, ends[level]) for level in levels if len(level)]


def _where(starts: np.ndarray, lengths: np.ndarray, device) -> torch.Tensor | slice:
    """Tokens of these ranges: a slice if each range begins where the last one ends, otherwise int64 indices."""
    if (starts[1:] == starts[:-1] + lengths[:-1]).all():
        return slice(int(starts[0]), int(starts[-1] + lengths[-1]))
    offsets = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return on_device(np.repeat(starts, lengths) + offsets, device)
