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

In a layer with a sliding window of W tokens, a token sees itself and the W - 1 tokens before it on
its path from the root. Each segment is then attended with copies of the last W - 1 keys before it.

In some models the tokens of one image see each other, whatever the window. The later tokens of an
image are one more part that is merged.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

import numpy as np
import torch

from rlinf_vl.models.kernels.attention import Kernel, kernel_for
from rlinf_vl.models.kernels.delta import Mixer, delta_rule
from rlinf_vl.models.kernels.delta_layout import DeltaLayout
from rlinf_vl.models.recompute import kept
from rlinf_vl.models.transfer import on_device


class AttentionContext(Protocol):
    """The attention and the gated delta nets of one forward.

    Shapes: q [1|B, H, T, D], k and v [1|B, H_kv, T, D].
    """

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scaling: float,
        window: int | None = None,
    ) -> torch.Tensor:
        """Return the layer's attention of `q` over the keys that each token may see: [B, T, H, D].

        Args:
            scaling: multiplies the scores.
            window: the layer's sliding window: the last tokens that a token sees, itself among
                them. None for all.
        """
        ...

    def mix(
        self, layer: int, mixer: Mixer, qkv: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        """Run convolution and recurrence of a gated delta net (`kernels.delta`).

        qkv [1|B, T, C], g and beta float32 [1|B, T, Hv] → [1|B, T, Hv, dv] in qkv's dtype.
        """
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """Attention of some tokens over some keys, in one call of a kernel."""

    rows: torch.Tensor | slice
    keys: torch.Tensor | slice
    kernel: Kernel


@dataclass(frozen=True, slots=True)
class Layout:
    """The calls of one attention: all tokens over some keys, then some of them over further keys.

    Attributes:
        keys: the keys of the first call; a key may be there several times.
        kernel: of that call.
        further: parts with further keys, which name no token twice.
    """

    keys: torch.Tensor | slice
    kernel: Kernel
    further: Sequence[Part]

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out [T, H, D] in q's dtype, log-sum-exp float32 [T, H])."""
        out, lse = self.kernel.forward(q, k[self.keys], v[self.keys], scale)
        if not self.further:
            return out, lse
        # In float32: bfloat16 would round after every merge, an error that grows with the tree's
        # depth.
        merged = out.float()
        for part in self.further:
            added = part.kernel.forward(q[part.rows], k[part.keys], v[part.keys], scale)
            merge(merged, lse, part.rows, *added)
        return merged.to(out.dtype), lse

    def backward(
        self, grad, q, k, v, out, lse, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (dq, dk, dv)."""
        dq, *key_grads = self.kernel.backward(grad, q, k[self.keys], v[self.keys], out, lse, scale)
        if not isinstance(self.keys, slice):
            key_grads = [_gathered_gradient(x, self.keys, k) for x in key_grads]
        dk, dv = key_grads
        for part in self.further:
            rows, keys = part.rows, part.keys
            part_grads = part.kernel.backward(
                grad[rows], q[rows], k[keys], v[keys], out[rows], lse[rows], scale
            )
            for grad_sum, tokens, part_grad in zip(
                (dq, dk, dv), (rows, keys, keys), part_grads, strict=True
            ):
                grad_sum[tokens] += part_grad  # an index names no token twice, so += loses none
        return dq, dk, dv


def _gathered_gradient(grad: torch.Tensor, keys: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a tensor `of` whose rows `keys` were gathered, added up in float32."""
    total = torch.zeros_like(of, dtype=torch.float32)
    return total.index_add_(0, keys, grad.float()).to(of.dtype)


def image_part(
    runs: np.ndarray, kernel: type[Kernel], device: torch.device | str, keys_before: int = 0
) -> list[Part]:
    """Return the part in which image tokens see the later tokens of their image, if there are any.

    Backwards, the tokens after the first see what the tokens before the last may see of them:
    causal attention of the reversed image.

    Args:
        runs: int64 [n, 2], first token of an image and the one behind its last.
        keys_before: the number of keys before that of the first token.
    """
    runs = runs[runs[:, 1] - runs[:, 0] > 1]
    if not len(runs):
        return []
    pairs = runs[:, 1] - runs[:, 0] - 1
    bounds = np.cumsum([0, *pairs])
    steps = np.arange(bounds[-1]) - np.repeat(bounds[:-1], pairs)
    keys = np.repeat(runs[:, 1] - 1, pairs) - steps
    rows = on_device(keys - 1, device)
    layout = kernel(bounds, bounds, True, device)
    return [Part(rows, on_device(keys + keys_before, device), layout)]


class SegmentAttention:
    """Attention and delta nets of one packed row of T tokens; its segments may continue others."""

    def __init__(
        self,
        cu_seqlens: np.ndarray,
        prefix: np.ndarray | None = None,
        causal: bool = True,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        kernel: str | None = None,
        image_runs: np.ndarray | None = None,
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
            image_runs: int [n, 2], first token of an image and the one behind its last, for models
                whose image tokens see each other. An image lies in one segment.
        """
        self._delta = partial(DeltaLayout, cu_seqlens, prefix, device)
        self._bounds, self._prefix, self._device = cu_seqlens, prefix, device
        self._kernel = kernel_for(torch.device(device), dtype, kernel)
        self._image_part: list[Part] = []
        if image_runs is not None:
            _assert_whole(image_runs, cu_seqlens, prefix)
            self._image_part = image_part(image_runs, self._kernel, device)
        #: The layout of layers without a window.
        self.full = Layout(
            slice(None),
            self._kernel(cu_seqlens, cu_seqlens, causal, device),
            self._prefix_parts() + self._image_part,
        )
        self._windowed: dict[int, Layout] = {}

    def _prefix_parts(self) -> list[Part]:
        """Return the parts over prefixes, level by level."""
        bounds, device, parts = self._bounds, self._device, []
        for prefixes, subtree_ends in (
            _levels(bounds, self._prefix) if self._prefix is not None else ()
        ):
            prefixes_per_call = len(prefixes) if self._kernel.batches_sequences else 1
            for i in range(0, len(prefixes), prefixes_per_call):
                batch = prefixes[i : i + prefixes_per_call]
                # A prefix's descendants lie between its own end and the end of its subtree.
                key_starts, key_ends = bounds[batch], bounds[batch + 1]
                query_ends = bounds[subtree_ends[i : i + prefixes_per_call]]
                n_keys, n_queries = key_ends - key_starts, query_ends - key_ends
                kernel_between = self._kernel(
                    np.cumsum([0, *n_queries]), np.cumsum([0, *n_keys]), False, device
                )
                queries = token_index(key_ends, n_queries, device)
                keys = token_index(key_starts, n_keys, device)
                parts.append(Part(queries, keys, kernel_between))
        return parts

    def layout(self, window: int | None) -> Layout:
        """Return the layout of layers with this window, made when a layer first asks for it."""
        if window is None or window >= self._longest:
            return self.full
        if window not in self._windowed:
            starts, lengths, keys_of_segment = _keys_in_windows(self._bounds, self._prefix, window)
            kernel = self._kernel(
                self._bounds, np.cumsum([0, *keys_of_segment]), True, self._device, window
            )
            keys = token_index(starts, lengths, self._device)
            self._windowed[window] = Layout(keys, kernel, self._image_part)
        return self._windowed[window]

    @cached_property
    def _longest(self) -> int:
        """The number of tokens of the longest path."""
        lengths = np.diff(self._bounds).tolist()
        for segment, parent in enumerate(() if self._prefix is None else self._prefix.tolist()):
            if parent >= 0:
                lengths[segment] += lengths[parent]
        return max(lengths, default=0)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scaling: float,
        window: int | None = None,
    ) -> torch.Tensor:
        assert q.shape[0] == 1, f"packed rows have batch size 1, not {q.shape[0]}"
        q_THD, k_THD, v_THD = (x[0].transpose(0, 1) for x in (q, k, v))
        return _Attention.apply(q_THD, k_THD, v_THD, self.layout(window), scaling).unsqueeze(0)

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
    def forward(ctx, q, k, v, layout: Layout, scale: float):
        out, lse = kept(lambda: layout.forward(q, k, v, scale))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]  # torch leaves the number open
        return *ctx.layout.backward(grad, *ctx.saved_tensors, ctx.scale), None, None


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


def token_index(starts: np.ndarray, lengths: np.ndarray, device) -> torch.Tensor | slice:
    """Return the tokens of these ranges: a slice if they are contiguous, else int64 indices."""
    if (starts[1:] == starts[:-1] + lengths[:-1]).all():
        return slice(int(starts[0]), int(starts[-1] + lengths[-1]))
    offsets = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return on_device(np.repeat(starts, lengths) + offsets, device)


def _keys_in_windows(
    cu_seqlens: np.ndarray, prefix: np.ndarray | None, window: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the keys of each segment: the last `window - 1` before it on its path, and its own.

    Returns (starts, lengths: the ranges of keys, end to end, keys of each segment), int64.
    """
    starts: list[int] = []
    lengths: list[int] = []
    keys_of_segment: list[int] = []
    bounds = cu_seqlens.tolist()
    parents = [-1] * (len(bounds) - 1) if prefix is None else prefix.tolist()
    for segment, parent in enumerate(parents):
        start, end = bounds[segment], bounds[segment + 1]
        ranges, missing = [(start, end)], window - 1 if end > start else 0
        while parent >= 0 and missing:
            n = min(missing, bounds[parent + 1] - bounds[parent])
            ranges.insert(0, (bounds[parent + 1] - n, bounds[parent + 1]))
            parent, missing = parents[parent], missing - n
        starts += [first for first, _ in ranges]
        lengths += [last - first for first, last in ranges]
        keys_of_segment.append(sum(last - first for first, last in ranges))
    return np.array(starts), np.array(lengths), np.array(keys_of_segment)


def _assert_whole(runs: np.ndarray, cu_seqlens: np.ndarray, prefix: np.ndarray | None) -> None:
    """Assert that no image lies across the bound of two segments, one of which continues the other.

    Its tokens in the first would have to see those in the second, which other segments lack.
    """
    segments = np.searchsorted(cu_seqlens, runs[:, 0], "right") - 1
    across = runs[:, 1] > cu_seqlens[segments + 1]
    assert not across.any(), f"an image lies across the end of its segment: {runs[across][:1]}"
    if prefix is None:
        return
    ends_with_image = np.isin(cu_seqlens[1:], runs[:, 1])
    begins_with_image = np.isin(cu_seqlens[:-1], runs[:, 0]) & (np.diff(cu_seqlens) > 0)
    split = begins_with_image & (prefix >= 0) & ends_with_image[prefix]
    assert not split.any(), f"segment {np.flatnonzero(split)[:1]} begins within an image"
