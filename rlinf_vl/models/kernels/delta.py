"""Gated delta nets over a packed row (Yang et al. 2024, "Gated Delta Networks").

A short causal convolution with silu is followed by a recurrence over the queries, keys and values
that come out of it. Neither crosses segment boundaries, unless a segment continues another: then it
starts from the last inputs (the tail) and the final state of that one.

    S_t = e^g_t · S_{t-1} + k_t ⊗ β_t (v_t - k_t · (e^g_t · S_{t-1})),   o_t = q_t · S_t

Segments are cut into chunks. With G the running sum of g in a chunk, and A_ij = β_i (k_i · k_j)
e^(G_i - G_j) for i > j, a chunk adds K̃ᵀ V to its state S (Yang et al. 2024, "Parallelizing linear
transformers with the delta rule", section 3):

    V = U - W S,   [U | W] = (1 + A)⁻¹ [β v | β e^G k],   S' = e^(G_C) S + K̃ᵀ V,   K̃ = e^(G_C - G) k
    O = Q̃ S + P V,   Q̃ = e^G q,   P_ij = (q_i · k_j) e^(G_i - G_j) for i ≥ j

Only V and S' of one chunk need those of the chunk before. All other terms are computed for all
chunks of the row at once.

Letters in shapes: T tokens, S segments, K chunks of c tokens, Hk key heads, Hv value heads, r = Hv
/ Hk, dk and dv their sizes, C channels and W taps of the convolution.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from packaging.version import Version
from torch.nn import functional as F

from rlinf_vl.models.kernels.delta_layout import Chunks, DeltaLayout, Edges

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Mixer:
    """The convolution of one layer, weight [C, W], and its heads.

    Its C inputs are those of all queries, keys and values. Each key head serves value_heads /
    key_heads consecutive value heads.
    """

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
    """Run convolution and recurrence of one layer over a packed row.

    Args:
        qkv: [T, C], inputs of the convolution.
        g: float32 [T, Hv], log of the decay, at most 0.
        beta: float32 [T, Hv].
        initial: (tails [S, W - 1, C], states float32 [S, Hv, dk, dv]) before each segment that
            continues none; None: zeros.

    Returns:
        (outputs [T, Hv, dv] in qkv's dtype, tails [S, W - 1, C] in qkv's dtype and states float32
            [S, Hv, dk, dv] after each segment). Gradients flow through the outputs, and not to
            `initial`.
    """
    tails, states = initial or (None, None)
    edges = layout.edges(mixer.weight.shape[1])
    qk, v = _Convolution.apply(qkv, mixer.weight, tails, edges, 2 * mixer.key_heads * mixer.key_dim)
    qk, v = qk.view(len(qk), -1, mixer.key_dim), v.view(len(v), -1, mixer.value_dim)
    if (rule := _rule_for(qkv.device.type, qkv.dtype)) is not None:
        out, states = _by_level(rule, qk, v, g, beta, layout, states)
    else:
        out, states = _by_chunk(qk, v, g, beta, layout, states)
    return out, edges.tails.take(qkv.detach(), tails), states


@cache
def _rule_for(device: str, dtype: torch.dtype) -> Callable | None:
    """Return flash-linear-attention's kernel on CUDA, where that is installed; None elsewhere.

    None, too, in float32, which the kernel would round.
    """
    if device != "cuda" or dtype == torch.float32:
        return None
    try:
        import triton  # pyright: ignore[reportMissingImports]
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]
    except ImportError:
        logger.warning(
            "flash-linear-attention is not installed: gated delta nets are computed by PyTorch's "
            "operations, slowly; `python -m pip install 'fla-core>=0.6'` installs it"
        )
        return None
    has_wrong_gradients = Version("3.4.0") <= Version(triton.__version__) < Version("3.7.1")
    if (
        has_wrong_gradients
        and torch.cuda.get_device_capability() == (9, 0)
        and find_spec("tilelang") is None
    ):
        # flash-linear-attention raises in its backward then (its issue 640: wrong gradients on
        # Hopper)
        logger.warning(
            "Triton %s computes wrong gradients of flash-linear-attention on Hopper GPUs: gated "
            "delta nets are computed by PyTorch's operations, slowly; install triton>=3.7.1 (it "
            "comes with torch>=2.14) or tilelang",
            triton.__version__,
        )
        return None
    return chunk_gated_delta_rule


class _Convolution(torch.autograd.Function):
    """silu(Σ_i w_i · x_{t-i}) of each channel, in two parts, the first of `width` channels.

    Shifted products run over the whole row, across segment boundaries. The first tokens of each
    segment, whose taps reach across, are computed anew from their true earlier inputs.
    """

    @staticmethod
    def forward(ctx, x, weight, tails, edges: Edges, width: int):
        taps = weight.float().t().contiguous()  # [W, C]; the last is a token's own
        n_earlier, x_float32 = len(taps) - 1, x.float()
        earlier_inputs = edges.inputs_before.take(x_float32, tails)
        # Over the whole row first; then tokens whose taps cross a segment's start are replaced.
        out = x_float32 * taps[n_earlier]
        first_out = out[edges.first_tokens]
        for i in range(n_earlier):
            first_out.addcmul_(earlier_inputs[:, i], taps[i])
            out[i + 1 :].addcmul_(x_float32[: -i - 1], taps[n_earlier - i - 1])
        out[edges.first_tokens] = first_out
        ctx.save_for_backward(x, weight, out, earlier_inputs)
        ctx.edges = edges
        return F.silu(out[:, :width]).to(x.dtype), F.silu(out[:, width:]).to(x.dtype)

    @staticmethod
    def backward(ctx, grad_qk, grad_v):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, out, earlier_inputs = ctx.saved_tensors
        edges: Edges = ctx.edges
        taps, x_float32 = weight.float().t().contiguous(), x.float()
        n_earlier = len(taps) - 1
        grad = torch.empty_like(out)
        widths = [grad_qk.shape[1], grad_v.shape[1]]
        parts = zip((grad_qk, grad_v), out.split(widths, 1), grad.split(widths, 1), strict=True)
        for grad_silu, conv_out, grad_conv in parts:
            torch.ops.aten.silu_backward(grad_silu.float(), conv_out, grad_input=grad_conv)
        dweight = torch.empty_like(taps)
        dx = grad * taps[n_earlier]
        dweight[n_earlier] = (grad * x_float32).sum(0)
        # First tokens read other inputs than their neighbours in the row: their gradients go to
        # `earlier_inputs`, and the shifted products below must not see them.
        first_grad = grad[edges.first_tokens]
        grad[edges.first_tokens] = 0
        for i in range(1, n_earlier + 1):
            dx[:-i].addcmul_(grad[i:], taps[n_earlier - i])
            dweight[n_earlier - i] = (grad[i:] * x_float32[:-i]).sum(0) + (
                first_grad * earlier_inputs[:, n_earlier - i]
            ).sum(0)
        earlier_grad = (first_grad.unsqueeze(1) * taps[:n_earlier]).flatten(0, 1)
        dx.index_add_(0, edges.inputs_before.rows, earlier_grad[edges.inputs_before.slots])
        return dx.to(x.dtype), dweight.t().to(weight.dtype), None, None, None


def _by_level(rule: Callable, qk, v, g, beta, layout: DeltaLayout, initial: torch.Tensor | None):
    """Compute (outputs, final states) by a kernel for packed rows without shared prefixes.

    Each level of the tree is one call, which starts from the final states of the levels before.
    """
    runs, token_places, rank = layout.runs()
    q, k = qk.chunk(2, 1)
    level_outs, final_states = [], g.new_empty(0, v.shape[1], k.shape[2], v.shape[2])
    for run in runs:
        if run.level.parents is not None:
            initial_states = final_states[run.level.parents]
        else:
            initial_states = (
                None if initial is None else initial[rank.argsort()[run.level.segments]]
            )
        out, level_states = rule(
            *(x.index_select(0, run.tokens).unsqueeze(0) for x in (q, k, v, g, beta)),
            initial_state=initial_states,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=run.cu_seqlens,
            cu_seqlens_cpu=run.cu_seqlens_cpu,
        )
        level_outs.append(out[0])
        final_states = torch.cat([final_states, level_states])
    return torch.cat(level_outs)[token_places], final_states.detach()[rank]


def _by_chunk(qk, v, g, beta, layout: DeltaLayout, initial: torch.Tensor | None):
    """Compute (outputs [T, Hv, dv], final states [S, Hv, dk, dv]) by PyTorch's operations.

    qk [T, 2 · Hk, dk] are queries and keys, v is [T, Hv, dv].
    """
    key_heads, key_dim, (heads, value_dim) = qk.shape[1] // 2, qk.shape[2], v.shape[1:]
    size = layout.best_size()
    chunks = layout.chunks(size)
    value_index, value_inverse = layout.by_head(size, heads)
    qk_index, qk_inverse = layout.by_head(size, key_heads, 2)
    q, k = _Units.apply(qk, qk_index, qk_inverse)
    q, k = (x.view(-1, key_heads, 1, size, key_dim) for x in (q, k))
    repeat = heads // key_heads
    v_chunks = _Gather.apply(v.reshape(-1, value_dim).float(), value_index, value_inverse, None)
    v_chunks = v_chunks.view(-1, key_heads, repeat, size, value_dim)
    # Padding gets g = 0 and beta = 0: it neither decays the state nor adds to it.
    g, beta = (
        _Gather.apply(x, chunks.tokens, chunks.places, None).view(-1, size, heads)
        for x in (g, beta)
    )
    g, beta = (
        x.transpose(1, 2).masked_fill(chunks.padding, 0).unflatten(1, (key_heads, repeat))
        for x in (g, beta)
    )
    total = g.cumsum(-1, dtype=torch.float64)  # in float64: differences of large sums are used
    a, p = _Scores.apply(q, k, total, beta)
    # e^G: a chunk's decay from its start to each token; e^(G_C - G): from each token to its end.
    from_start, to_end = total.float().exp(), (total[..., -1:] - total).float().exp()
    beta, chunk_decay = beta.unsqueeze(-1), from_start[..., -1]
    from_start, to_end = from_start.unsqueeze(-1), to_end.unsqueeze(-1)
    v_beta, k_beta = v_chunks * beta, k * (from_start * beta)
    k_to_end, q_from_start = k * to_end, q * from_start
    a, v_beta, k_beta = (x.flatten(0, 2) for x in (a, v_beta, k_beta))
    k_to_end, q_from_start = (x.flatten(0, 2) for x in (k_to_end, q_from_start))
    p, chunk_decay = (x.flatten(0, 2) for x in (p, chunk_decay))
    u, w = _Solve.apply(a, v_beta, k_beta)
    out, states = _Scan.apply(u, w, k_to_end, q_from_start, p, chunk_decay, heads, chunks, initial)
    out = _Gather.apply(out.view(-1, value_dim), value_inverse, value_index, chunks.padding)
    return out.view(-1, heads, value_dim).to(v.dtype), states


class _Units(torch.autograd.Function):
    """Queries and keys by chunk and head, normed: q / |q| / √dk and k / |k|.

    Takes rows [T, 2 · Hk, dk] by `index` [2 · K · Hk · c]; returns each as [K · Hk · c, dk] in
    float32.
    """

    @staticmethod
    def forward(ctx, x, index, inverse):
        rows = x.view(-1, x.shape[2]).index_select(0, index).float().view(2, -1, x.shape[2])
        scale = torch.linalg.vector_norm(rows, dim=-1, keepdim=True).square_().add_(1e-6).rsqrt_()
        scale[0] *= x.shape[2] ** -0.5
        q, k = rows[0] * scale[0], rows[1] * scale[1]
        ctx.save_for_backward(q, k, scale, inverse)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return q, k

    @staticmethod
    def backward(ctx, dq, dk):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, scale, inverse = ctx.saved_tensors
        # For y = s · x / |x|, dx = s / |x| · (dy - y (y · dy) / s²): s² is 1 / dk for queries and 1
        # for keys.
        dx = torch.stack([dq, dk])
        for d, y, dim in zip(dx, (q, k), (q.shape[1], 1), strict=True):
            d.addcmul_(y, (d * y).sum(-1, keepdim=True), value=-dim)
        return (
            dx.mul_(scale)
            .view(-1, q.shape[1])
            .index_select(0, inverse)
            .view(ctx.shape)
            .to(ctx.dtype),
            None,
            None,
        )


class _Gather(torch.autograd.Function):
    """Rows of x [n, d] by `index`, with a backward that gathers, too, by `inverse`.

    `inverse` holds the place in `index` of each row of x, each once. `padding`, bool [K, 1, c], for
    x [K · H · c, d]: rows that `index` never names, whose gradient is 0.
    """

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


class _Scores(torch.autograd.Function):
    """A and P, [K, Hk, r, c, c], from q and k [K, Hk, 1, c, dk].

    `total` are the running sums of log decays (float64) and `beta` β, both [K, Hk, r, c]. The
    diagonal of A is not used.
    """

    @staticmethod
    def forward(ctx, q, k, total, beta):
        # Added before exp: entries above the diagonal become 0, and cannot overflow.
        mask = torch.full((total.shape[-1],) * 2, -torch.inf, device=total.device).triu(1)
        decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).float().add_(mask).exp_()
        a, p = ((x @ k.transpose(-1, -2)) * decay for x in (k, q))
        ctx.save_for_backward(q, k, beta, decay, a, p)
        return a * beta.unsqueeze(-1), p

    @staticmethod
    def backward(ctx, da, dp):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, beta, decay, a, p = ctx.saved_tensors
        # A and P have the factor e^(G_i - G_j): the exponent's gradient is dA · A + dP · P.
        da_times_a = da * a
        dbeta, beta = da_times_a.sum(-1), beta.unsqueeze(-1)
        dexponent = da_times_a.mul_(beta).addcmul_(dp, p)
        dtotal = (dexponent.sum(-1) - dexponent.sum(-2)).double()
        dkk = (da * beta).mul_(decay).sum(2, keepdim=True)
        dqk = (dp * decay).sum(2, keepdim=True)
        dk = dqk.transpose(-1, -2) @ q + (dkk + dkk.transpose(-1, -2)) @ k
        return dqk @ k, dk, dtotal, dbeta


class _Solve(torch.autograd.Function):
    """(1 + A)⁻¹ X and (1 + A)⁻¹ Y, for a [n, c, c], x and y [n, c, ·].

    Only the part of a below its diagonal is used.
    """

    @staticmethod
    def forward(ctx, a, x, y):
        inverse = inverse_of_unit_lower(a)
        solved_x, solved_y = inverse @ x, inverse @ y
        ctx.save_for_backward(inverse, solved_x, solved_y)
        return solved_x, solved_y

    @staticmethod
    def backward(ctx, grad_x, grad_y):  # pyright: ignore[reportIncompatibleMethodOverride]
        inverse, solved_x, solved_y = ctx.saved_tensors
        dx, dy = inverse.transpose(1, 2) @ grad_x, inverse.transpose(1, 2) @ grad_y
        da = torch.bmm(dx, solved_x.transpose(1, 2)).baddbmm_(
            dy, solved_y.transpose(1, 2), beta=-1, alpha=-1
        )
        return da.tril_(-1), dx, dy


def inverse_of_unit_lower(a: torch.Tensor, base: int = 8) -> torch.Tensor:
    """Return (1 + tril(a, -1))⁻¹ for a [n, c, c], c = base · 2^m.

    Rows of diagonal blocks come by substitution, for all blocks at once, then pairs of blocks by
    products: the block below the diagonal is -T₂₂ A₂₁ T₁₁.
    """
    n, size = a.shape[:2]
    blocks = (
        a.view(n, size // base, base, size // base, base)
        .diagonal(dim1=1, dim2=3)
        .permute(1, 2, 0, 3)
        .contiguous()
    )
    block_inverses = torch.zeros_like(blocks)  # [base, base, n, c / base]: long rows
    block_inverses[0, 0] = 1
    for i in range(1, base):
        block_inverses[i, :i] = (blocks[i, :i].unsqueeze(1) * block_inverses[:i, :i]).sum(0).neg_()
        block_inverses[i, i] = 1
    out = a.new_zeros(a.shape)
    out.view(n, size // base, base, size // base, base).diagonal(dim1=1, dim2=3).copy_(
        block_inverses.permute(2, 0, 1, 3)
    )
    while base < size:
        # [n, 2, base, 2, base, pairs]
        below, blocks = (
            x.view(n, size // (2 * base), 2, base, size // (2 * base), 2, base).diagonal(
                dim1=1, dim2=4
            )
            for x in (a, out)
        )
        lower, first, second = (
            x.movedim(-1, 1).flatten(0, 1)
            for x in (below[:, 1, :, 0], blocks[:, 0, :, 0], blocks[:, 1, :, 1])
        )
        # `first` and `second` are T₁₁ and T₂₂ of each pair, `lower` is A₂₁.
        lower_inverse = torch.bmm(second @ lower, first).neg_()
        blocks[:, 1, :, 0].copy_(lower_inverse.unflatten(0, (n, -1)).movedim(1, -1))
        base *= 2
    return out


class _Scan(torch.autograd.Function):
    """The recurrence over the chunks of all segments, one after another.

    With n = K · Hv: u [n, c, dv], w, k and q [n, c, dk], p [n, c, c], e [n]. Returns the outputs,
    [n, c, dv], and the final states, [S, Hv, dk, dv].
    """

    @staticmethod
    def forward(ctx, u, w, k, q, p, e, heads: int, chunks: Chunks, initial):
        v, e = u.clone(), e.view(-1, 1, 1)
        starts = u.new_empty(len(u), k.shape[2], u.shape[2])
        final = u.new_empty(len(chunks.order), heads, *starts.shape[1:])
        for level in chunks.levels:
            if level.parents is not None:
                state = final[level.parents]
            elif initial is not None:
                state = initial.to(final.dtype)[chunks.order[level.segments]]
            else:
                state = torch.zeros_like(final[level.segments])
            # Views of `final`: a segment's state is written there after its last chunk.
            level_finals, state = final[level.segments].flatten(0, 1), state.flatten(0, 1)
            for step in level.steps:
                rows = slice(step.start * heads, step.stop * heads)
                # Segments with the most chunks come first, so those that have ended are the last.
                if (n_rows := rows.stop - rows.start) < len(state):
                    level_finals[n_rows : len(state)] = state[n_rows:]
                    state = state[:n_rows]
                starts[rows] = state
                new_values = v[rows].baddbmm_(w[rows], state, alpha=-1)
                state = (state * e[rows]).baddbmm_(k[rows].transpose(1, 2), new_values)
            level_finals[: len(state)] = state
        out = torch.bmm(p, v).baddbmm_(q, starts)
        ctx.save_for_backward(v, w, k, q, p, e, starts)
        ctx.chunks, ctx.heads = chunks, heads
        final = final[chunks.rank]
        ctx.mark_non_differentiable(final)
        return out, final

    @staticmethod
    def backward(ctx, grad, _):  # pyright: ignore[reportIncompatibleMethodOverride]
        v, w, k, q, p, e, starts = ctx.saved_tensors
        chunks, heads = ctx.chunks, ctx.heads
        dv = torch.bmm(p.transpose(1, 2), grad)
        ds = torch.bmm(q.transpose(1, 2), grad)  # of each chunk's first state, by its own outputs
        ends = torch.empty_like(starts)  # gradients of the states after each chunk
        final = starts.new_zeros(len(chunks.order), heads, *starts.shape[1:])
        for level in reversed(chunks.levels):
            level_final_grads = final[level.segments].flatten(0, 1)
            state = level_final_grads[:0]
            for step in reversed(level.steps):
                rows = slice(step.start * heads, step.stop * heads)
                # Backwards, shorter segments join in at their last chunk.
                if (n_rows := rows.stop - rows.start) > len(state):
                    state = torch.cat([state, level_final_grads[len(state) : n_rows]])
                ends[rows] = state
                value_grads = dv[rows].baddbmm_(k[rows], state)
                state = (
                    ds[rows]
                    .addcmul_(state, e[rows])
                    .baddbmm_(w[rows].transpose(1, 2), value_grads, alpha=-1)
                )
            # Segments that continue the same one add up the gradients of its final state.
            if level.parents is not None:
                state = torch.cat([state, level_final_grads[len(state) :]]).view(
                    -1, *final.shape[1:]
                )
                final.index_add_(0, level.parents, state)
        dw, dk = torch.bmm(dv, starts.transpose(1, 2)).neg_(), torch.bmm(v, ends.transpose(1, 2))
        dq, dp = torch.bmm(grad, starts.transpose(1, 2)), torch.bmm(grad, v.transpose(1, 2))
        return dv, dw, dk, dq, dp, (starts * ends).sum((1, 2)), None, None, None


def delta_step(
    qkv: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    mixer: Mixer,
    tails: torch.Tensor,
    states: torch.Tensor,
) -> torch.Tensor:
    """Run `delta_rule` for one more token of each of S sequences.

    qkv [S, C], g and beta float32 [S, Hv] → [S, Hv, dv]. `tails` [S, W - 1, C] and `states` float32
    [S, Hv, dk, dv] become those after the tokens, in place.
    """
    window = torch.cat([tails, qkv.unsqueeze(1)], dim=1)
    tails.copy_(window[:, 1:])
    key_width = mixer.key_heads * mixer.key_dim
    conv_out = F.silu((window.float() * mixer.weight.float().t()).sum(1))
    conv_out = conv_out.to(qkv.dtype).float()  # rounded as in `delta_rule`
    q, k, v = conv_out.split([key_width, key_width, mixer.value_heads * mixer.value_dim], dim=1)
    repeat = mixer.value_heads // mixer.key_heads
    q, k = (
        _unit(x.unflatten(1, (mixer.key_heads, -1))).repeat_interleave(repeat, dim=1)
        for x in (q, k)
    )
    q = q * mixer.key_dim**-0.5
    states.mul_(g.exp()[:, :, None, None])
    # Keys and queries together, so that memory is passed once for both.
    state_at_key, state_at_query = (torch.stack([k, q], dim=2) @ states).unbind(2)
    change = beta.unsqueeze(-1) * (v.unflatten(1, (mixer.value_heads, -1)) - state_at_key)
    states.flatten(0, 1).baddbmm_(k.flatten(0, 1).unsqueeze(2), change.flatten(0, 1).unsqueeze(1))
    return (state_at_query + (q * k).sum(-1, keepdim=True) * change).to(qkv.dtype)


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Return x / |x| over the last dimension, as `_Units` computes it."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
