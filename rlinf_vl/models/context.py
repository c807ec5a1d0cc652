"""Context parallelism: C ranks share the tokens of a packed row, T / C neighbours each.

What computes token by token (embeddings, norms, projections, MLPs, experts, the head) does so on a rank's own tokens. Attention
and delta nets exchange tokens for heads before, and heads for tokens behind (Jacobs et al. 2023, "DeepSpeed Ulysses"): in
between, each rank has all tokens of a C-th part of the heads. Heads don't see each other, so that is a part of what a rank alone
computes, with the same kernels on the same row. Shared prompts, trees and the states of delta nets need nothing of their own.

Keys and values go to each rank that has queries for them, so there may be fewer of their heads than ranks.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist

from rlinf_vl.models.attention import SegmentAttention
from rlinf_vl.models.kernels.delta import Mixer


@dataclass(frozen=True)
class ContextRanks:
    """The ranks that share each row, as one of them sees them."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def to_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Own tokens of all heads → all tokens of own heads: [t, C, …] → [T, …]; differentiable."""
        return _ToHeads.apply(x, self)

    def to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """The way back: [T, …] → [t, C, …]."""
        return _ToTokens.apply(x, self)

    def whole(self, x: torch.Tensor, own: torch.Tensor, size: int) -> torch.Tensor:
        """[size, …] of what each rank has of it, x [r, …] at `own` int64 [r]; every rank gets its own part of the gradient back."""
        return _Whole.apply(x, own, size, self)


def _exchanged(x: torch.Tensor, ranks: ContextRanks) -> torch.Tensor:
    """Part i of x [C, …] from this rank to rank i of the group; what each has sent here, in order."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, x.contiguous(), group=ranks.group)
    return out


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ranks: ContextRanks):
        ctx.ranks = ranks
        return _exchanged(x.transpose(0, 1), ranks).flatten(0, 1)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]  # torch leaves the number open
        return _exchanged(grad.unflatten(0, (ctx.ranks.size, -1)), ctx.ranks).transpose(0, 1), None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ranks: ContextRanks):
        ctx.ranks = ranks
        return _exchanged(x.unflatten(0, (ranks.size, -1)), ranks).transpose(0, 1)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _exchanged(grad.transpose(0, 1), ctx.ranks).flatten(0, 1), None


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, own, size: int, ranks: ContextRanks):
        ctx.save_for_backward(own)
        out = x.new_zeros(size, *x.shape[1:]).index_copy_(0, own, x)
        dist.all_reduce(out, group=ranks.group)  # each number with zeros: exact
        return out

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        (own,) = ctx.saved_tensors
        return grad.index_select(0, own), None, None, None


class ContextAttention:
    """`AttentionContext` of the tokens that this rank has of a row; `row` is that of the whole row."""

    def __init__(self, row: SegmentAttention, ranks: ContextRanks) -> None:
        self.row = row
        self.ranks = ranks

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
        heads, kv_heads, size = q.shape[1], k.shape[1], self.ranks.size
        serving = torch.tensor(_serving(heads, kv_heads, size), device=k.device)
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # [t, heads, D]
        parts = q, k.index_select(1, serving), v.index_select(1, serving)
        both = self.ranks.to_heads(torch.cat([x.unflatten(1, (size, -1)) for x in parts], 2))
        counts = [x.shape[1] // size for x in parts]
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in both.split(counts, 1))
        out = self.row.attend(layer, q, k, v, scaling)[0]
        return self.ranks.to_tokens(out).flatten(1, 2).unsqueeze(0)

    def mix(self, layer: int, mixer: Mixer, qkv: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        size, device = self.ranks.size, str(qkv.device)
        channels, key_heads = _channels(
            mixer.key_heads, mixer.value_heads, mixer.key_dim, mixer.value_dim, size, device
        )
        inputs = self.ranks.to_heads(qkv[0].index_select(1, channels.flatten()).unflatten(1, (size, -1)))
        gates = self.ranks.to_heads(torch.stack([g[0], beta[0]], 1).unflatten(2, (size, -1)).transpose(1, 2))
        weight = mixer.weight.index_select(0, channels[self.ranks.rank])
        own = Mixer(weight, key_heads, mixer.value_heads // size, mixer.key_dim, mixer.value_dim)
        out = self.row.mix(layer, own, inputs[None], gates[None, :, 0], gates[None, :, 1])[0]
        return self.ranks.to_tokens(out).flatten(1, 2).unsqueeze(0)


@cache
def _serving(heads: int, kv_heads: int, size: int) -> tuple[int, ...]:
    """The heads of keys and values that each rank needs for its heads of queries, rank after rank: each serves equally many of
    them, neighbours."""
    assert heads % size == 0, f"{size} ranks can't divide {heads} heads"
    group = heads // kv_heads
    return tuple(head // group for head in range(0, heads, math.gcd(heads // size, group)))


@cache
def _channels(
    key_heads: int, value_heads: int, key_dim: int, value_dim: int, size: int, device: str
) -> tuple[torch.Tensor, int]:
    """(int64 [C, n]: the channels of queries, keys and values that each rank computes with; its key heads)."""
    keys = torch.tensor(_serving(value_heads, key_heads, size)).view(size, -1, 1)
    of_keys = (keys * key_dim + torch.arange(key_dim)).flatten(1)
    of_values = torch.arange(value_heads * value_dim).view(size, -1) + 2 * key_heads * key_dim
    found = torch.cat([of_keys, of_keys + key_heads * key_dim, of_values], 1)
    return found.to(device), keys.shape[1]
