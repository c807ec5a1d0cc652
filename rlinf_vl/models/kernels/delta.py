"""Gated delta nets over a packed row (Yang et al. 2024, "Gated Delta Networks"): a short causal convolution with silu, then a
recurrence over the queries, keys and values that come out of it. Neither crosses segment boundaries, unless a segment continues
another: then it starts from the last inputs (the tail) and the final state of that.

    S_t = e^g_t · S_{t-1} + k_t ⊗ β_t (v_t - k_t · (e^g_t · S_{t-1})),   o_t = q_t · S_t

Segments are cut into chunks. With G the running sum of g in a chunk, and A_ij = β_i (k_i · k_j) e^(G_i - G_j) for i > j, what the
chunk adds to its state S is K̃ᵀ V (Yang et al. 2024, "Parallelizing linear transformers with the delta rule", section 3):

    V = U - W S,   [U | W] = (1 + A)⁻¹ [β v | β e^G k],   S' = e^(G_C) S + K̃ᵀ V,   K̃ = e^(G_C - G) k
    O = Q̃ S + P V,   Q̃ = e^G q,   P_ij = (q_i · k_j) e^(G_i - G_j) for i ≥ j

Only V and S' of one chunk need those of the chunk before. The rest is computed for all chunks of the row at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch.nn import functional as F

from rlinf_vl.models.kernels.delta_layout import Chunks, DeltaLayout, Edges


@dataclass(frozen=True, slots=True)
class Mixer:
    """The convolution of one layer, weight [C, W], and its heads. Its C inputs are those of all queries, keys and values; each key
    head serves value_heads / key_heads consecutive value heads."""

    weight: torch.Tensor
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int


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
        initial: (tails [S, W - 1, C], states float32 [S, Hv, dk, dv]) before each segment that continues none; None: zeros.

    Returns:
        (outputs [T, Hv, dv] in qkv's dtype, tails [S, W - 1, C] in qkv's dtype and states float32 [S, Hv, dk, dv] behind each
        segment). Gradients flow through the outputs, and not to `initial`.
    """
    tails, states = initial or (None, None)
    edges = layout.edges(mixer.weight.shape[1])
    mixed = _Convolution.apply(qkv, mixer.weight, tails, edges)
    keys = mixer.key_heads * mixer.key_dim
    q, k, v = mixed.split([keys, keys, mixer.value_heads * mixer.value_dim], 1)
    q, k = (x.unflatten(1, (mixer.key_heads, -1)) for x in (q, k))
    inputs = q, k, v.unflatten(1, (mixer.value_heads, -1)), g, beta
    if (rule := _rule_for(qkv.device.type)) is not None:
        out, states = _by_level(rule, *inputs, layout, states)
    else:
        out, states = _by_chunk(*inputs, layout, states)
    return out, edges.tails.take(qkv.detach(), tails), states


@cache
def _rule_for(device: str) -> Callable | None:
    """flash-linear-attention's kernel on CUDA, where that is installed; None elsewhere."""
    if device != "cuda":
        return None
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    return chunk_gated_delta_rule


class _Convolution(torch.autograd.Function):
    """silu(Σ_i w_i · x_{t-i}): shifted products over the whole row, and anew for the first tokens of each segment."""

    @staticmethod
    def forward(ctx, x, weight, tails, edges: Edges):
        taps = weight.float().t().contiguous()  # [W, C]; the last is a token's own
        back, exact = len(taps) - 1, x.float()
        before = edges.before.take(exact, tails)
        out = exact * taps[back]
        near = out[edges.first]
        for i in range(back):
            near.addcmul_(before[:, i], taps[i])
            out[i + 1 :].addcmul_(exact[: -i - 1], taps[back - i - 1])
        out[edges.first] = near
        ctx.save_for_backward(x, weight, out, before)
        ctx.edges = edges
        return F.silu(out).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]  # torch leaves the number open
        x, weight, out, before = ctx.saved_tensors
        edges: Edges = ctx.edges
        taps, exact = weight.float().t().contiguous(), x.float()
        back = len(taps) - 1
        grad = torch.ops.aten.silu_backward(grad.float(), out)
        dweight = torch.empty_like(taps)
        dx = grad * taps[back]
        dweight[back] = (grad * exact).sum(0)
        near = grad[edges.first]
        grad[edges.first] = 0
        for i in range(1, back + 1):
            dx[:-i].addcmul_(grad[i:], taps[back - i])
            dweight[back - i] = (grad[i:] * exact[:-i]).sum(0) + (near * before[:, back - i]).sum(0)
        older = (near.unsqueeze(1) * taps[:back]).flatten(0, 1)
        dx.index_add_(0, edges.before.rows, older[edges.before.slots])
        return dx.to(x.dtype), dweight.t().to(weight.dtype), None, None


def _by_level(rule: Callable, q, k, v, g, beta, layout: DeltaLayout, initial: torch.Tensor | None):
    """(outputs, final states) by a kernel for packed rows without shared prefixes: one call a level."""
    runs, places, rank = layout.runs()
    outs, finals = [], g.new_empty(0, v.shape[1], k.shape[2], v.shape[2])
    for run in runs:
        if run.level.parents is not None:
            states = finals[run.level.parents]
        else:
            states = None if initial is None else initial[rank.argsort()[run.level.segments]]
        out, final = rule(
            *(x.index_select(0, run.tokens).unsqueeze(0) for x in (q, k, v, g, beta)),
            initial_state=states,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=run.cu_seqlens,
            cu_seqlens_cpu=run.cu_seqlens_cpu,
        )
        outs.append(out[0])
        finals = torch.cat([finals, final])
    return torch.cat(outs)[places], finals.detach()[rank]


def _by_chunk(q, k, v, g, beta, layout: DeltaLayout, initial: torch.Tensor | None):
    """(outputs [T, Hv, dv], final states [S, Hv, dk, dv]) for q and k [T, Hk, dk], v [T, Hv, dv]."""
    (key_heads, key_dim), (heads, value_dim), dtype, size = k.shape[1:], v.shape[1:], v.dtype, layout.best_size()
    chunks, keys, values = layout.chunks(size), layout.by_head(size, key_heads), layout.by_head(size, heads)
    q, k = (_Gather.apply(x.reshape(-1, key_dim).float(), *keys, None) for x in (q, k))
    q, k = (_unit(x).view(-1, key_heads, 1, size, key_dim) for x in (q, k))
    q = q * key_dim**-0.5
    grouped = key_heads, heads // key_heads
    v = _Gather.apply(v.reshape(-1, value_dim).float(), *values, None).view(-1, *grouped, size, value_dim)
    g, beta = (_Gather.apply(x, chunks.tokens, chunks.places, None).view(-1, size, heads) for x in (g, beta))
    g, beta = (x.transpose(1, 2).masked_fill(chunks.padding, 0).unflatten(1, grouped) for x in (g, beta))
    total = g.cumsum(-1)
    mask = torch.full((size, size), -torch.inf, device=g.device).triu(1)
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2) + mask).exp()
    a = (k @ k.transpose(-1, -2)) * decay * beta.unsqueeze(-1)
    p = (q @ k.transpose(-1, -2)) * decay
    grown = total.exp().unsqueeze(-1)
    right = torch.cat([v, (k * grown)], -1) * beta.unsqueeze(-1)
    u, w = _Solve.apply(a, right).split([value_dim, key_dim], -1)
    kt = k * (total[..., -1:] - total).exp().unsqueeze(-1)
    inputs = (x.flatten(1, 2) for x in (u, w, kt, q * grown, p, total[..., -1].exp()))
    out, states = _Scan.apply(*inputs, chunks, initial)
    out = _Gather.apply(out.view(-1, value_dim), *values[::-1], chunks.padding)
    return out.view(-1, heads, value_dim).to(dtype), states


class _Gather(torch.autograd.Function):
    """Rows of x [n, d] by `index`, whose `inverse` names where its rows are that count, each once. `padding` bool [K, 1, c], for
    x [K · H · c, d]: rows that are never taken."""

    @staticmethod
    def forward(ctx, x, index, inverse, padding):
        ctx.save_for_backward(inverse, padding)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]  # torch leaves the number open
        inverse, padding = ctx.saved_tensors
        dx = grad.index_select(0, inverse)
        if padding is not None:
            size = padding.shape[2]
            dx.view(len(padding), -1, size, dx.shape[1]).masked_fill_(padding.unsqueeze(-1), 0)
        return dx, None, None, None


class _Solve(torch.autograd.Function):
    """(1 + A)⁻¹ R of a [..., c, c], of which only what is below the diagonal counts, and r [..., c, d]."""

    @staticmethod
    def forward(ctx, a, right):
        inverse = inverse_of_unit_lower(a.flatten(0, -3))
        out = inverse @ right.flatten(0, -3)
        ctx.save_for_backward(inverse, out)
        return out.view_as(right)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        inverse, out = ctx.saved_tensors
        dright = inverse.transpose(1, 2) @ grad.flatten(0, -3)
        da = torch.bmm(dright, out.transpose(1, 2)).tril_(-1).neg_()
        return da.view(*grad.shape[:-1], -1), dright.view_as(grad)


def inverse_of_unit_lower(a: torch.Tensor, base: int = 16) -> torch.Tensor:
    """(1 + tril(a, -1))⁻¹ for a [n, c, c], c = base · 2^m: rows of diagonal blocks by substitution, for all blocks at once, then
    pairs of blocks by products: the block below the diagonal is -T₂₂ A₂₁ T₁₁."""
    n, size = a.shape[:2]
    blocks = a.view(n, size // base, base, size // base, base).diagonal(dim1=1, dim2=3).permute(1, 2, 0, 3).contiguous()
    done = torch.zeros_like(blocks)  # [base, base, n, c / base]: long rows
    done[0, 0] = 1
    for i in range(1, base):
        done[i, :i] = (blocks[i, :i].unsqueeze(1) * done[:i, :i]).sum(0).neg_()
        done[i, i] = 1
    out = a.new_zeros(a.shape)
    out.view(n, size // base, base, size // base, base).diagonal(dim1=1, dim2=3).copy_(done.permute(2, 0, 1, 3))
    while base < size:
        below, blocks = (
            x.view(n, size // (2 * base), 2, base, size // (2 * base), 2, base).diagonal(dim1=1, dim2=4)
            for x in (a, out)
        )  # [n, 2, base, 2, base, pairs]
        lower, first, second = (
            x.movedim(-1, 1).flatten(0, 1) for x in (below[:, 1, :, 0], blocks[:, 0, :, 0], blocks[:, 1, :, 1])
        )
        made = torch.bmm(second @ lower, first).neg_()
        blocks[:, 1, :, 0].copy_(made.unflatten(0, (n, -1)).movedim(1, -1))
        base *= 2
    return out


class _Scan(torch.autograd.Function):
    """The chunks of all segments one after another; u [K, Hv, c, dv], w, k and q [K, Hv, c, dk], p [K, Hv, c, c], e [K, Hv]."""

    @staticmethod
    def forward(ctx, u, w, k, q, p, e, chunks: Chunks, initial):
        n, (heads, _, value_dim) = len(chunks.order), u.shape[1:]
        v, final = u.clone(), u.new_empty(n, heads, k.shape[-1], value_dim)
        starts = u.new_empty(len(u), *final.shape[1:])
        for level in chunks.levels:
            if level.parents is not None:
                state = final[level.parents]
            elif initial is not None:
                state = initial.to(final.dtype)[chunks.order[level.segments]]
            else:
                state = torch.zeros_like(final[level.segments])
            rest = final[level.segments]  # of segments that are not done
            for step in level.steps:
                m = step.stop - step.start
                rest[m : len(state)] = state[m:]
                starts[step] = state = state[:m]
                flat = state.flatten(0, 1)
                added = v[step].flatten(0, 1).baddbmm_(w[step].flatten(0, 1), flat, alpha=-1)
                state = (state * e[step][..., None, None]).flatten(0, 1)
                state = state.baddbmm_(k[step].flatten(0, 1).transpose(1, 2), added).view(m, *final.shape[1:])
            rest[: len(state)] = state
        out = torch.baddbmm(p.flatten(0, 1) @ v.flatten(0, 1), q.flatten(0, 1), starts.flatten(0, 1)).view_as(u)
        ctx.save_for_backward(v, w, k, q, p, e, starts)
        ctx.chunks = chunks
        final = final[chunks.rank]
        ctx.mark_non_differentiable(final)
        return out, final

    @staticmethod
    def backward(ctx, grad, _):  # pyright: ignore[reportIncompatibleMethodOverride]
        v, w, k, q, p, e, starts = ctx.saved_tensors
        chunks: Chunks = ctx.chunks
        heads = v.shape[1]
        g, v_, w_, k_, q_, p_, s_ = (x.flatten(0, 1) for x in (grad, v, w, k, q, p, starts))
        dv = p_.transpose(1, 2) @ g
        ds = (q_.transpose(1, 2) @ g).view_as(starts)  # of each chunk's start
        ends = torch.empty_like(starts)  # gradients of the states behind each chunk
        final = starts.new_zeros(len(chunks.order), *starts.shape[1:])
        for level in reversed(chunks.levels):
            rest = final[level.segments]
            state = rest[:0]
            for step in reversed(level.steps):
                m = step.stop - step.start
                ends[step] = state = torch.cat([state, rest[len(state) : m]])
                part = slice(step.start * heads, step.stop * heads)
                flat = dv[part].baddbmm_(k_[part], state.flatten(0, 1))
                state = torch.addcmul(ds[step], state, e[step][..., None, None])
                state = state.flatten(0, 1).baddbmm_(w_[part].transpose(1, 2), flat, alpha=-1).view_as(ds[step])
            if level.parents is not None:
                final.index_add_(0, level.parents, torch.cat([state, rest[len(state) :]]))
        e_ = ends.flatten(0, 1)
        dw = torch.bmm(dv, s_.transpose(1, 2)).neg_()
        dk = v_ @ e_.transpose(1, 2)
        dq, dp = g @ s_.transpose(1, 2), g @ v_.transpose(1, 2)
        de = (starts * ends).sum((-1, -2))
        return dv.view_as(v), dw.view_as(w), dk.view_as(k), dq.view_as(q), dp.view_as(p), de, None, None


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
