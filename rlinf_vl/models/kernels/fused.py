# pyright: reportPossiblyUnboundVariable=false, reportIndexIssue=false, reportOptionalMemberAccess=false
# pyright: reportMissingImports=false, reportCallIssue=false
"""Fused kernels in Triton for CUDA: rotation, SwiGLU, and the logprob head's reductions.

Each reads and writes its tensors once, computes in float32 and rounds once. PyTorch's own
operations take five passes for a rotation and about eight for the head's statistics or their
gradient; on an H100 these were a third of a 2B model's training step (docs/gpu-checks.md). Triton comes
with PyTorch for CUDA, and needs a C compiler on first use; `serves` tells whether both are there.
"""

import shutil
from collections.abc import Sequence

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # PyTorch for CPUs
    triton = None

_AVAILABLE = triton is not None and any(map(shutil.which, ("cc", "gcc", "clang")))


def serves(x: torch.Tensor) -> bool:
    """Return whether the kernels compute for this tensor.

    A memory trace pretends that its `meta` tensors are on CUDA, but these have no data.
    """
    return _AVAILABLE and x.device.type == "cuda"


if triton is not None:
    # e^x is 2^(x · log2 e), and GPUs have an instruction for 2^x.
    _LOG2E = tl.constexpr(1.4426950408889634)

    @triton.jit
    def _rotate_kernel(
        x, cos, sin, out, x_row, heads, D: tl.constexpr, R: tl.constexpr, BACKWARD: tl.constexpr, H: tl.constexpr,
        B: tl.constexpr,
    ):  # fmt: skip
        """Rotate columns i and i + R/2 of a row's block of H heads; copy columns from R on."""
        row = tl.program_id(0).to(tl.int64)
        head = tl.program_id(1) * H + tl.arange(0, H)
        n_pairs: tl.constexpr = R // 2
        i = tl.arange(0, B)
        angles = row * R + i
        c1, c2 = (
            tl.load(cos + angles, i < n_pairs, 0.0),
            tl.load(cos + angles + n_pairs, i < n_pairs, 0.0),
        )
        s1, s2 = (
            tl.load(sin + angles, i < n_pairs, 0.0),
            tl.load(sin + angles + n_pairs, i < n_pairs, 0.0),
        )
        c1, c2, s1, s2 = (
            c1.to(tl.float32),
            c2.to(tl.float32),
            s1.to(tl.float32),
            s2.to(tl.float32),
        )
        if BACKWARD:  # the transposed map: the sines change places and signs
            s1, s2 = -s2, -s1
        places = head[:, None] * D + i[None, :]
        mask = (head[:, None] < heads) & (i[None, :] < n_pairs)
        first = tl.load(x + row * x_row + places, mask, 0.0).to(tl.float32)
        second = tl.load(x + row * x_row + places + n_pairs, mask, 0.0).to(tl.float32)
        target = out + row * heads * D + places
        tl.store(
            target, (first * c1[None, :] - second * s1[None, :]).to(out.dtype.element_ty), mask
        )
        tl.store(
            target + n_pairs,
            (second * c2[None, :] + first * s2[None, :]).to(out.dtype.element_ty),
            mask,
        )
        for start in tl.static_range(R, D, B):
            column = start + i
            mask = (head[:, None] < heads) & (column[None, :] < D)
            places = head[:, None] * D + column[None, :]
            tl.store(
                out + row * heads * D + places, tl.load(x + row * x_row + places, mask, 0.0), mask
            )

    @triton.jit
    def _swiglu_kernel(gate, up, out, n, BLOCK: tl.constexpr):
        """Compute silu(gate) · up for a block of elements."""
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        g = tl.load(gate + i, i < n, 0.0).to(tl.float32)
        u = tl.load(up + i, i < n, 0.0).to(tl.float32)
        tl.store(out + i, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), i < n)

    @triton.jit
    def _swiglu_backward_kernel(grad, gate, up, dgate, dup, n, BLOCK: tl.constexpr):
        """Compute the gradients of gate and up for a block of elements."""
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        d = tl.load(grad + i, i < n, 0.0).to(tl.float32)
        g = tl.load(gate + i, i < n, 0.0).to(tl.float32)
        u = tl.load(up + i, i < n, 0.0).to(tl.float32)
        # The derivative of silu(g) = g · s is s · (1 + g · (1 - s)).
        s = tl.sigmoid(g)
        tl.store(dgate + i, (d * u * s * (1 + g * (1 - s))).to(dgate.dtype.element_ty), i < n)
        tl.store(dup + i, (d * g * s).to(dup.dtype.element_ty), i < n)

    @triton.jit
    def _statistics_kernel(
        logits,
        banned,
        lse,
        entropy,
        V,
        inverse,
        BANNED: tl.constexpr,
        ENTROPY: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Compute a row's log Σ e^x and its entropy in one pass.

        The entropy is log Σ e^(x - m) - Σ e^(x - m) (x - m) / Σ e^(x - m) with the maximum m. Where
        a block has a larger maximum, both sums so far are rescaled to it.
        """
        row = tl.program_id(0).to(tl.int64)
        top = tl.full((), float("-inf"), tl.float32)
        total = tl.zeros((), tl.float32)
        weighted = tl.zeros((), tl.float32)
        for start in range(0, V, BLOCK):
            i = start + tl.arange(0, BLOCK)
            x = tl.load(logits + row * V + i, i < V, float("-inf")) * inverse
            if BANNED:
                x = tl.where(tl.load(banned + i, i < V, 1) != 0, float("-inf"), x)
            # While all ids so far are banned, the maximum is -inf: -inf - -inf would be NaN.
            new_top = tl.maximum(top, tl.max(x, 0))
            scale = tl.where(top > float("-inf"), tl.exp2((top - new_top) * _LOG2E), 0.0)
            x_below_top = tl.where(x > float("-inf"), x - new_top, 0.0)
            exp_x = tl.where(x > float("-inf"), tl.exp2(x_below_top * _LOG2E), 0.0)
            if ENTROPY:
                moved_sum = tl.where(top > float("-inf"), weighted + (top - new_top) * total, 0.0)
                weighted = moved_sum * scale + tl.sum(exp_x * x_below_top, 0)
            total = total * scale + tl.sum(exp_x, 0)
            top = new_top
        log_total = tl.log(total)
        tl.store(lse + row, log_total + top)
        if ENTROPY:
            tl.store(entropy + row, log_total - weighted / total)

    @triton.jit
    def _gradient_kernel(
        logits, banned, targets, lse, entropy, grad_logprob, grad_entropy, out, V, inverse, BANNED: tl.constexpr,
        LOGPROB: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Compute the gradient of a row's block of ids, over the temperature.

        It is ([v = t] - p_v) · grad_logprob - p_v (log p_v + H) · grad_entropy.
        """
        row = tl.program_id(0).to(tl.int64)
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        logp = tl.load(logits + row * V + i, i < V, 0.0) * inverse - tl.load(lse + row)
        p = tl.exp2(logp * _LOG2E)
        grad = tl.zeros((BLOCK,), tl.float32)
        if LOGPROB:
            g = tl.load(grad_logprob + row)
            grad = tl.where(i == tl.load(targets + row), g, 0.0) - p * g
        if ENTROPY:
            grad -= p * (logp + tl.load(entropy + row)) * tl.load(grad_entropy + row)
        if BANNED:
            grad = tl.where(tl.load(banned + i, i < V, 1) != 0, 0.0, grad)
        tl.store(out + row * V + i, (grad * inverse).to(out.dtype.element_ty), i < V)


class _Rotate(torch.autograd.Function):
    """Rotary embedding by `_rotate_kernel`, in both directions."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, False)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _rotated(grad, *ctx.saved_tensors, True), None, None


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, backward: bool) -> torch.Tensor:
    """Launch `_rotate_kernel`, forward or backward; returns x's shape and dtype."""
    rotated_width, (rows, width) = cos.shape[-1], (cos[..., 0].numel(), x.shape[-1])
    flat = x.reshape(rows, -1, width)
    # The kernel takes any stride between rows, but heads must lie end to end.
    if flat.stride()[1:] != (width, 1):
        flat = flat.contiguous()
    out = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    heads, block = flat.shape[1], triton.next_power_of_2(rotated_width // 2)
    heads_per_program = max(1, min(triton.next_power_of_2(heads), 2048 // block))
    _rotate_kernel[(rows, triton.cdiv(heads, heads_per_program))](
        flat,
        cos,
        sin,
        out,
        flat.stride(0),
        heads,
        width,
        rotated_width,
        backward,
        heads_per_program,
        block,
    )
    return out.view(x.shape)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return the rotary embedding of the first R columns, pairs (i, i + R/2).

    x [B, …, heads, D]; cos and sin [B or 1, …, 1, R], without gradient; returns x's shape and
    dtype.
    """
    cos, sin = (a.expand(x.shape[0], *a.shape[1:]).contiguous() for a in (cos, sin))
    return _Rotate.apply(x, cos, sin)


class _Swiglu(torch.autograd.Function):
    """The autograd function of `swiglu`; it saves its inputs alone."""

    @staticmethod
    def forward(ctx, gate, up):
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        out = torch.empty(
            gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype), device=gate.device
        )
        _swiglu_kernel[(triton.cdiv(out.numel(), 2048),)](gate, up, out, out.numel(), 2048)
        return out

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up = ctx.saved_tensors
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        n = gate.numel()
        _swiglu_backward_kernel[(triton.cdiv(n, 2048),)](
            grad.contiguous(), gate, up, dgate, dup, n, 2048
        )
        return dgate, dup


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) · up, of one shape."""
    return _Swiglu.apply(gate, up)


def head_statistics(
    logits: torch.Tensor, banned: torch.Tensor | None, temperature: float, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (log Σ e^(logits / temperature) [C, 1], entropy [C] or None), float32.

    Both are over the ids that are not banned.

    Args:
        logits: float32 [C, V], dense.
        banned: uint8 [V], 1 where an id can't be sampled.
        temperature: the divisor of the logits.
        with_entropy: whether to compute the entropy.
    """
    rows, vocab = logits.shape
    lse = logits.new_empty(rows, 1)
    entropy = logits.new_empty(rows) if with_entropy else None
    _statistics_kernel[(rows,)](
        logits,
        banned,
        lse,
        entropy,
        vocab,
        1 / temperature,
        banned is not None,
        with_entropy,
        4096,
        num_warps=8,
    )
    return lse, entropy


def head_gradient(
    logits: torch.Tensor,
    banned: torch.Tensor | None,
    temperature: float,
    columns: Sequence[torch.Tensor | None],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the gradient of Σ logprob · grad_logprobs + entropy · grad_entropy in the logits.

    Args:
        logits: float32 [C, V], dense.
        banned: uint8 [V], 1 where an id can't be sampled.
        temperature: the divisor of the logits.
        columns: targets (int64), log Σ e^x, grad_logprobs, entropy, grad_entropy, of C elements
            each; a gradient may be None, and the entropy with its own.
        dtype: dtype of the result, [C, V].
    """
    rows, vocab = logits.shape
    out = torch.empty(rows, vocab, dtype=dtype, device=logits.device)
    targets, lse, grad_logprobs, entropy, grad_entropy = (
        x if x is None else x.contiguous() for x in columns
    )
    _gradient_kernel[(rows, triton.cdiv(vocab, 4096))](
        logits, banned, targets, lse, entropy, grad_logprobs, grad_entropy, out, vocab, 1 / temperature,
        banned is not None, grad_logprobs is not None, grad_entropy is not None, 4096, num_warps=8,
    )  # fmt: skip
    return out
