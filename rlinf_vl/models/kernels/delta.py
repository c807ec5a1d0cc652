"""Gated delta nets over a packed row (Yang et al. 2024, "Gated Delta Networks"): a short causal convolution with silu, then the
recurrence over the queries, keys and values that come out of it. Both end at segment boundaries, unless a segment continues
another: then it starts from the other's last inputs (`tails`) and its final state.

    S_t = e^g_t · S_{t-1} + k_t ⊗ β_t (v_t - k_t · (e^g_t · S_{t-1})),   o_t = q_t · S_t
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from rlinf_vl.models.transfer import on_device


@dataclass(frozen=True, slots=True)
class Mixer:
    """The convolution of one layer, weight [C, W], and its heads. Its C inputs are those of all queries, keys and values; each key
    head serves value_heads / key_heads consecutive value heads."""

    weight: torch.Tensor
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int


class DeltaLayout:
    """Segments of a row of T tokens, which may continue earlier ones; made once for all layers."""

    def __init__(
        self,
        cu_seqlens: np.ndarray,
        prefix: np.ndarray | None = None,
        device: torch.device | str = "cpu",
        width: int = 4,
    ) -> None:
        """cu_seqlens int [S + 1]; prefix int [S], the earlier segment that each continues, -1 for none; `width` of the
        convolution."""
        segments = len(cu_seqlens) - 1
        self.cu_seqlens = cu_seqlens
        self.prefix = np.full(segments, -1) if prefix is None else prefix
        lengths = np.diff(cu_seqlens)
        # Tokens are numbered 0 … T-1, behind them the tokens before each segment that continues none: width - 1 for each.
        back = width - 1
        before, tails = np.empty((2, segments, back), int)
        for i, parent in enumerate(self.prefix.tolist()):
            before[i] = tails[parent] if parent >= 0 else cu_seqlens[-1] + i * back + np.arange(back)
            tails[i] = np.append(before[i], np.arange(cu_seqlens[i], cu_seqlens[i + 1]))[-back:]
        near = np.minimum(lengths, back)
        offsets = np.arange(near.sum()) - np.repeat(np.cumsum(near) - near, near)
        of = np.repeat(np.arange(segments), near)
        #: The first tokens of each segment, int64 [E], and the inputs before each, int64 [E, W - 1].
        first = cu_seqlens[of] + offsets
        taps = offsets[:, None] + np.arange(back)  # among the segment's inputs and those before it
        sources = np.where(
            taps < back,
            np.take_along_axis(before[of], np.minimum(taps, back - 1), 1),
            first[:, None] - back + np.arange(back),
        )
        self.first, self.sources, self.tails = (on_device(x, device) for x in (first, sources, tails))


def delta_rule(
    qkv: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    mixer: Mixer,
    layout: DeltaLayout,
    initial: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Convolution and recurrence of one layer.

    Args:
        qkv: [T, C], inputs of the convolution.
        g: float32 [T, Hv], log of the decay, at most 0.
        beta: float32 [T, Hv].
        initial: (tails [S, W - 1, C], states float32 [S, Hv, dk, dv]) before each segment that continues none; None: zeros. Not
            differentiated.

    Returns:
        (outputs [T, Hv, dv] in qkv's dtype, tails [S, W - 1, C] in qkv's dtype and states float32 [S, Hv, dk, dv] behind each
        segment).
    """
    back, segments = mixer.weight.shape[1] - 1, len(layout.prefix)
    if initial is None:
        initial = (
            qkv.new_zeros(segments, back, qkv.shape[1]),
            g.new_zeros(segments, mixer.value_heads, mixer.key_dim, mixer.value_dim),
        )
    extended = torch.cat([qkv, initial[0].to(qkv.dtype).flatten(0, 1)])
    out = qkv * mixer.weight[:, -1]
    for i in range(1, back + 1):
        out = out + F.pad(qkv, (0, 0, i, 0))[: len(qkv)] * mixer.weight[:, -1 - i]
    near = qkv[layout.first] * mixer.weight[:, -1]
    near = near + (extended[layout.sources] * mixer.weight[:, :-1].t()).sum(1)
    mixed = F.silu(out.index_copy(0, layout.first, near))
    keys = mixer.key_heads * mixer.key_dim
    q, k, v = mixed.float().split([keys, keys, mixer.value_heads * mixer.value_dim], 1)
    repeat = mixer.value_heads // mixer.key_heads
    q, k = (_unit(x.unflatten(1, (mixer.key_heads, -1))).repeat_interleave(repeat, 1) for x in (q, k))
    v = v.unflatten(1, (mixer.value_heads, -1))
    q = q * mixer.key_dim**-0.5
    outputs, states = [], []
    for i, parent in enumerate(layout.prefix.tolist()):
        state = states[parent] if parent >= 0 else initial[1][i]
        for t in range(int(layout.cu_seqlens[i]), int(layout.cu_seqlens[i + 1])):
            state = state * g[t].exp()[:, None, None]
            delta = (v[t] - (state * k[t].unsqueeze(-1)).sum(-2)) * beta[t].unsqueeze(-1)
            state = state + k[t].unsqueeze(-1) * delta.unsqueeze(-2)
            outputs.append((state * q[t].unsqueeze(-1)).sum(-2))
        states.append(state)
    return torch.stack(outputs).to(qkv.dtype), extended[layout.tails], torch.stack(states)


def delta_step(
    qkv: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    mixer: Mixer,
    tails: torch.Tensor,
    states: torch.Tensor,
) -> torch.Tensor:
    """`delta_rule` of one token behind each of S sequences: qkv [S, C], g and beta float32 [S, Hv] → [S, Hv, dv]. `tails`
    [S, W - 1, C] and `states` float32 [S, Hv, dk, dv] become those behind the tokens, in place."""
    window = torch.cat([tails, qkv.unsqueeze(1)], dim=1)
    tails.copy_(window[:, 1:])
    keys, heads = mixer.key_heads * mixer.key_dim, (mixer.key_heads, -1)
    mixed = F.silu((window * mixer.weight.t()).sum(1)).float()
    q, k, v = mixed.split([keys, keys, mixer.value_heads * mixer.value_dim], dim=1)
    repeat = mixer.value_heads // mixer.key_heads
    q, k = (_unit(x.unflatten(1, heads)).repeat_interleave(repeat, dim=1) for x in (q, k))
    q = q * mixer.key_dim**-0.5
    states.mul_(g.exp()[:, :, None, None])
    of_key, of_query = (torch.stack([k, q], dim=2) @ states).unbind(2)  # the state is read once for both
    change = beta.unsqueeze(-1) * (v.unflatten(1, (mixer.value_heads, -1)) - of_key)
    states.flatten(0, 1).baddbmm_(k.flatten(0, 1).unsqueeze(2), change.flatten(0, 1).unsqueeze(1))
    return (of_query + (q * k).sum(-1, keepdim=True) * change).to(qkv.dtype)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
