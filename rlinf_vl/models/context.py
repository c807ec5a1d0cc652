"""Context parallelism: C ranks share the tokens of a packed row, T / C consecutive tokens each.

Operations on single tokens (embeddings, norms, projections, MLPs, experts, the head) run on a
rank's own tokens. Attention and delta nets exchange tokens for heads before they run, and heads for
tokens afterwards (Jacobs et al. 2023, "DeepSpeed Ulysses"): in between, each rank has all tokens of
1/C of the heads. Heads are independent of each other, so a rank computes with the same kernels on
the same row as without context parallelism. Shared prompts, trees and the states of delta nets need
nothing special.

Keys and values go to every rank that has queries for them, so there may be fewer key heads than
ranks.
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
    """The group of ranks that share each row, and this rank's number in it."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def to_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Exchange this rank's tokens of all heads for all tokens of its heads; differentiable.

        [t, C, …] → [T, …].
        """
        return _ToHeads.apply(x, self)

    def to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Exchange all tokens of this rank's heads for its tokens of all heads; differentiable.

        The inverse of `to_heads`: [T, …] → [t, C, …].
        """
        return _ToTokens.apply(x, self)

    def gather_rows(self, x: torch.Tensor, row_numbers: torch.Tensor, size: int) -> torch.Tensor:
        """Gather [size, …] from all ranks; each has the rows x [r, …] at `row_numbers` int64 [r].

        In backward every rank gets the gradient of its own rows.
        """
        return _GatherRows.apply(x, row_numbers, size, self)


def _exchange(x: torch.Tensor, ranks: ContextRanks) -> torch.Tensor:
    """Send part i of x [C, …] to rank i of the group; return the parts received, in rank order."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, x.contiguous(), group=ranks.group)
    return out


class _ToHeads(torch.autograd.Function):
    """The exchange of `ContextRanks.to_heads`; its backward is the inverse exchange."""

    @staticmethod
    def forward(ctx, x, ranks: ContextRanks):
        ctx.ranks = ranks
        return _exchange(x.transpose(0, 1), ranks).flatten(0, 1)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]  # torch leaves the number open
        return _exchange(grad.unflatten(0, (ctx.ranks.size, -1)), ctx.ranks).transpose(0, 1), None


class _ToTokens(torch.autograd.Function):
    """The exchange of `ContextRanks.to_tokens`; its backward is the inverse exchange."""

    @staticmethod
    def forward(ctx, x, ranks: ContextRanks):
        ctx.ranks = ranks
        return _exchange(x.unflatten(0, (ranks.size, -1)), ranks).transpose(0, 1)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _exchange(grad.transpose(0, 1), ctx.ranks).flatten(0, 1), None


class _GatherRows(torch.autograd.Function):
    """The gathering of `ContextRanks.gather_rows`; its backward selects a rank's own rows."""

    @staticmethod
    def forward(ctx, x, row_numbers, size: int, ranks: ContextRanks):
        ctx.save_for_backward(row_numbers)
        out = x.new_zeros(size, *x.shape[1:]).index_copy_(0, row_numbers, x)
        dist.all_reduce(out, group=ranks.group)  # exact: one rank adds a number, the others zero
        return out

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        (row_numbers,) = ctx.saved_tensors
        return grad.index_select(0, row_numbers), None, None, None


class ContextAttention:
    """The `AttentionContext` of one rank's tokens of a row; `row` is the whole row's."""

    def __init__(self, row: SegmentAttention, ranks: ContextRanks) -> None:
        self.row = row
        self.ranks = ranks

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scaling: float,
        window: int | None = None,
    ) -> torch.Tensor:
        heads, kv_heads, size = q.shape[1], k.shape[1], self.ranks.size
        kv_heads_needed = _kv_heads_on(heads, kv_heads, size, str(k.device))
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # [t, heads, D]
        k, v = k.index_select(1, kv_heads_needed), v.index_select(1, kv_heads_needed)
        # Concatenated, so that one exchange serves all three.
        qkv = self.ranks.to_heads(torch.cat([x.unflatten(1, (size, -1)) for x in (q, k, v)], 2))
        counts = [x.shape[1] // size for x in (q, k, v)]
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in qkv.split(counts, 1))
        out = self.row.attend(layer, q, k, v, scaling, window)[0]
        return self.ranks.to_tokens(out).flatten(1, 2).unsqueeze(0)

    def mix(
        self, layer: int, mixer: Mixer, qkv: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        size, device = self.ranks.size, str(qkv.device)
        channels, key_heads = _channels(
            mixer.key_heads, mixer.value_heads, mixer.key_dim, mixer.value_dim, size, device
        )
        inputs = self.ranks.to_heads(
            qkv[0].index_select(1, channels.flatten()).unflatten(1, (size, -1))
        )
        gates = self.ranks.to_heads(
            torch.stack([g[0], beta[0]], 1).unflatten(2, (size, -1)).transpose(1, 2)
        )
        # Channels of the convolution are independent, too: a rank needs the weights of its own.
        weight = mixer.weight.index_select(0, channels[self.ranks.rank])
        rank_mixer = Mixer(
            weight, key_heads, mixer.value_heads // size, mixer.key_dim, mixer.value_dim
        )
        out = self.row.mix(layer, rank_mixer, inputs[None], gates[None, :, 0], gates[None, :, 1])[0]
        return self.ranks.to_tokens(out).flatten(1, 2).unsqueeze(0)


@cache
def kv_heads_by_rank(heads: int, kv_heads: int, size: int) -> tuple[int, ...]:
    """Return the key heads that each rank needs for its query heads, rank after rank.

    Each entry serves an equal number of consecutive query heads of the rank.
    """
    assert heads % size == 0, f"{size} ranks can't divide {heads} heads"
    queries_per_key = heads // kv_heads
    # The gcd is the longest run of query heads that always share both a rank and a key head.
    return tuple(
        head // queries_per_key
        for head in range(0, heads, math.gcd(heads // size, queries_per_key))
    )


@cache
def _kv_heads_on(heads: int, kv_heads: int, size: int, device: str) -> torch.Tensor:
    """Return `kv_heads_by_rank` on a device, int64: copied there once, and not for every layer."""
    return torch.tensor(kv_heads_by_rank(heads, kv_heads, size)).to(device)


@cache
def _channels(
    key_heads: int, value_heads: int, key_dim: int, value_dim: int, size: int, device: str
) -> tuple[torch.Tensor, int]:
    """Return the channels that each rank's delta net reads, and the rank's number of key heads.

    The channels are int64 [C, n]: of queries, keys and values, in this order.
    """
    keys = torch.tensor(kv_heads_by_rank(value_heads, key_heads, size)).view(size, -1, 1)
    # Channels lie in the order queries, keys, values.
    query_channels = (keys * key_dim + torch.arange(key_dim)).flatten(1)
    value_channels = torch.arange(value_heads * value_dim).view(size, -1) + 2 * key_heads * key_dim
    channels = torch.cat([query_channels, query_channels + key_heads * key_dim, value_channels], 1)
    return channels.to(device), keys.shape[1]
