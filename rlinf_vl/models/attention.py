"""Attention for packed rows.

Every layer (`layers.attention_forward`, `layers.vision_attention_forward`) hands its rotated
queries, keys and values to the `context` of the running forward: `SegmentAttention` here (images
and training), or the torch engine's prefill (`engines.torch.prefill`) or decode step
(`engines.torch.decode`).

A packed row is a sequence of segments, end to end. They form a forest in depth-first order: a
segment may continue an earlier one, as a response continues its group's prompt, which stands in the
row once. A token sees the tokens before it in its segment, and all segments that its segment
continues.

A segment itself and each level of its prefixes are attended separately and merged by their
log-sum-exps, so neither a [T, T] mask nor a second copy of a prefix's keys is made. A class of
`kernels.attention.KERNELS` computes one such part.
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
    """The attention and the gated delta nets of one forward.

    Shapes: q [1|B, H, T, D], k and v [1|B, H_kv, T, D].
    """

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Return the layer's attention of `q` over the keys that each token may see: [B, T, H, D].

        `scaling` multiplies the scores.
        """
        ...

    def mix(
        self, layer: int, mixer: Mixer, qkv: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        """Run convolution and recurrence of a gated delta net (`kernels.delta`).

        qkv [1|B, T, C], g and beta float32 [1|B, T, Hv] → [1|B, T, Hv, dv] in qkv's dtype.
        """
        ...


class SegmentAttention:
    """Attention and delta nets of one packed row of T tokens; its segments may continue others."""

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
        """Choose a kernel and lay out its calls, for all layers of the forward.

        Args:
            cu_seqlens: int [S + 1], segment boundaries, 0 … T.
            prefix: int [S], the earlier segment that each segment continues, -1 for none; None if
                no segment continues another. Segments are in depth-first order, so a segment's
                descendants follow it directly.
            causal: whether a token sees only itself and what is before it in its segment; False:
                the whole segment.
            dtype: dtype of the queries; with `device` it chooses the kernel, unless `kernel` names
                one.
        """
        self._delta = partial(DeltaLayout, cu_seqlens, prefix, device)
        kernel_class = kernel_for(torch.device(device), dtype, kernel)
        self.segment_kernel: Kernel = kernel_class(cu_seqlens, cu_seqlens, causal, device)
        #: (queries whose segments continue prefixes, keys of the prefixes, the kernel for both)
        self.shared: list[tuple[torch.Tensor | slice, torch.Tensor | slice, Kernel]] = []
        for prefixes, subtree_ends in _levels(cu_seqlens, prefix) if prefix is not None else ():
            prefixes_per_call = len(prefixes) if kernel_class.batches_sequences else 1
            for i in range(0, len(prefixes), prefixes_per_call):
                batch = prefixes[i : i + prefixes_per_call]
                # A prefix's descendants lie between its own end and the end of its subtree.
                key_starts, key_ends = cu_seqlens[batch], cu_seqlens[batch + 1]
                query_ends = cu_seqlens[subtree_ends[i : i + prefixes_per_call]]
                n_keys, n_queries = key_ends - key_starts, query_ends - key_ends
                kernel_between = kernel_class(
                    np.cumsum([0, *n_queries]), np.cumsum([0, *n_keys]), False, device
                )
                queries = _token_index(key_ends, n_queries, device)
                keys = _token_index(key_starts, n_keys, device)
                self.shared.append((queries, keys, kernel_between))

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        assert q.shape[0] == 1, f"packed rows have batch size 1, not {q.shape[0]}"
        q_THD, k_THD, v_THD = (x[0].transpose(0, 1) for x in (q, k, v))
        return _Attention.apply(q_THD, k_THD, v_THD, self, scaling).unsqueeze(0)

    @cached_property
    def delta(self) -> DeltaLayout:
        """The layout for the row's delta nets, made on first use: most families have none."""
        return self._delta()

    def mix(
        self, layer: int, mixer: Mixer, qkv: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        return delta_rule(qkv[0], g[0], beta[0], mixer, self.delta)[0].unsqueeze(0)


class _Attention(torch.autograd.Function):
    """Attention over a segment and its prefixes, merged exactly, with its gradient.

    The softmax over [prefix; segment] is the two softmaxes, each weighed by exp(its lse - the joint
    lse). Further prefixes are merged in the same manner.

    Given the merged output and log-sum-exp, each part's own backward is exact for its keys: p =
    exp(s - lse) and dS = p · (dP - Δ) with Δ = rowsum(dO · O) need nothing of the other part (Dao
    2023, "FlashAttention-2", section 3.1).
    """

    @staticmethod
    def forward(ctx, q, k, v, plan: SegmentAttention, scale: float):
        out, lse = plan.segment_kernel.forward(q, k, v, scale)
        if plan.shared:
            # In float32: bfloat16 would round after every merge, an error that grows with the
            # tree's depth.
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
        dq, dk, dv = plan.segment_kernel.backward(grad, q, k, v, out, lse, scale)
        for rows, keys, kernel in plan.shared:
            prefix_grads = kernel.backward(
                grad[rows], q[rows], k[keys], v[keys], out[rows], lse[rows], scale=scale
            )
            for grad_sum, tokens, prefix_grad in zip(
                (dq, dk, dv), (rows, keys, keys), prefix_grads, strict=True
            ):
                grad_sum[tokens] += prefix_grad  # an index names no token twice, so += loses none
        return dq, dk, dv, None, None


def merge(
    out: torch.Tensor,
    lse: torch.Tensor,
    rows: torch.Tensor | slice,
    added_out: torch.Tensor,
    added_lse: torch.Tensor,
) -> None:
    """Merge attention over further keys into that of some rows, in place.

    Args:
        out: [T, H, D]; its dtype may be wider than the one a kernel returns.
        lse: [T, H].
        rows: the tokens whose attention grows.
        added_out: output over the further keys, for these rows.
        added_lse: log-sum-exp over the further keys, for these rows.
    """
    old_out, old_lse = out[rows], lse[rows]
    added_share = torch.sigmoid(added_lse - old_lse).unsqueeze(-1)  # exp(added_lse - the joint lse)
    out[rows] = torch.lerp(old_out, added_out.to(out.dtype), added_share.to(out.dtype))
    lse[rows] = torch.logaddexp(old_lse, added_lse)


def _levels(cu_seqlens: np.ndarray, prefix: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Group the segments that others continue by their depth in the tree.

    Returns, per depth, the segments, and for each the first later segment that is no descendant.
    """
    # `path` holds the ancestors of the segment at hand; a segment that leaves it ends its subtree.
    ends = np.full(len(prefix), len(prefix))
    depths = np.zeros(len(prefix), int)
    path: list[int] = []
    for segment, parent in enumerate(prefix.tolist()):
        while path and path[-1] != parent:
            ends[path.pop()] = segment
        assert parent == (path[-1] if path else -1), "segments must lie in depth-first order"
        depths[segment] = len(path)
        path.append(segment)
    # Empty prefixes, and prefixes whose descendants are all empty, need no call.
    shared = np.flatnonzero(
        (cu_seqlens[:-1] < cu_seqlens[1:]) & (cu_seqlens[1:] < cu_seqlens[ends])
    )
    levels = (shared[depths[shared] == depth] for depth in range(depths.max(initial=-1) + 1))
    return [(level, ends[level]) for level in levels if len(level)]


def _token_index(starts: np.ndarray, lengths: np.ndarray, device) -> torch.Tensor | slice:
    """Return the tokens of these ranges: a slice if they are contiguous, else int64 indices."""
    if (starts[1:] == starts[:-1] + lengths[:-1]).all():
        return slice(int(starts[0]), int(starts[-1] + lengths[-1]))
    offsets = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return on_device(np.repeat(starts, lengths) + offsets, device)
