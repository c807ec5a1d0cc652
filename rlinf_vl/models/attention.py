"""Attention for packed rows, plugged into transformers' own layers through its `AttentionInterface`.

Every text layer calls `_attend`, which hands the rotated queries, keys and values to the `context` of the running forward:
`SegmentAttention` here (training and prefill: causal inside each packed segment, nothing across), or the engine's decode
step (`rollout.torch_decode`). No [T, T] mask is ever made.
"""

from typing import Protocol

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

ATTENTION_NAME = "rlinf_vl"


class AttentionContext(Protocol):
    """What one forward needs to attend: q [1|B, H, T, D], k and v [1|B, H_kv, T, D] → [B, T, H, D]."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor: ...


def _attend(module, query, key, value, attention_mask, *, scaling, context: AttentionContext, **_):
    return context.attend(module.layer_idx, query, key, value, scaling), None


# transformers makes no mask for a name it has no mask function for, which is what we want.
AttentionInterface.register(ATTENTION_NAME, _attend)


class SegmentAttention:
    """Causal attention inside each segment of a packed row [1, H, T, D].

    Segments of similar length are attended as one right-padded batch: under a causal mask no real query sees the padding
    behind it, so no mask is needed. Lengths within a factor `SLACK` share a batch, so the padding is bounded.
    """

    SLACK = 1.3

    def __init__(self, cu_seqlens: np.ndarray, device: torch.device | str = "cpu", capture: bool = False) -> None:
        """`cu_seqlens`: int [S + 1], 0 … T. With `capture`, `self.captured[layer]` holds (k, v) [T, H_kv, D] after the forward."""
        self.captured: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = {} if capture else None
        lengths = np.diff(cu_seqlens)
        order = np.argsort(-lengths, kind="stable")
        self.batches: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # gather index [n, L], valid [n, L]
        placed: list[np.ndarray] = []
        first = 0
        while first < len(order) and lengths[order[first]] > 0:
            longest = int(lengths[order[first]])
            last = first
            while last < len(order) and lengths[order[last]] * self.SLACK >= longest and lengths[order[last]] > 0:
                last += 1
            members = order[first:last]
            offsets = np.arange(longest)[None, :]
            valid = offsets < lengths[members][:, None]
            index = np.where(valid, cu_seqlens[members][:, None] + offsets, 0)
            placed.append(index[valid])
            self.batches.append(
                (
                    torch.from_numpy(index).to(device),
                    None if valid.all() else torch.from_numpy(valid).to(device),
                )
            )
            first = last
        where = np.concatenate(placed)
        restore = np.empty(len(where), np.int64)
        restore[where] = np.arange(len(where))
        self.restore = torch.from_numpy(restore).to(device)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
        assert q.shape[0] == 1, f"packed rows have batch size 1, not {q.shape[0]}"
        q_THD, k_THD, v_THD = (x[0].transpose(0, 1) for x in (q, k, v))
        if self.captured is not None:
            self.captured[layer] = (k_THD, v_THD)
        outputs = []
        for index, valid in self.batches:
            qb, kb, vb = (x[index].transpose(1, 2) for x in (q_THD, k_THD, v_THD))  # [n, H, L, D]
            out = scaled_dot_product_attention(qb, kb, vb, is_causal=True, scale=scaling, enable_gqa=True)
            out = out.transpose(1, 2)  # [n, L, H, D]
            outputs.append(out[valid] if valid is not None else out.flatten(0, 1))
        return torch.cat(outputs)[self.restore].unsqueeze(0)
