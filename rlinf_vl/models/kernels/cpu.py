"""The parts of a layer on a CPU.

Each has a backward written by hand, which passes over memory less often than autograd's: that saves
a quarter of a training step.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from rlinf_vl.models.kernels.products import add_matmul, has_bfloat16_units, matmul
from rlinf_vl.models.recompute import kept, modes_keeping

#: Elements that a chain of element-wise operations in bfloat16 processes at a time, so that
#: intermediate results stay in the cache. (In float32 the chains are shorter, and whole tensors
#: measure faster.)
BLOCK = 2**19


def _blocks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Split tensors [T, W] into blocks of the same rows [n, W], about `BLOCK` elements each.

    Float32 tensors stay in one block.
    """
    if tensors[0].dtype == torch.float32:
        return iter([tensors])
    rows = max(1, BLOCK // tensors[0].shape[-1])
    return zip(*(x.split(rows) for x in tensors), strict=True)


class _NoBackward:
    """The context of a forward that has no backward: it saves nothing."""

    def save_for_backward(self, *_: torch.Tensor) -> None:
        pass


def _apply(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    """Call `function.apply`, or its forward alone where autograd does not record.

    `apply` itself takes as long as two small operations.
    """
    run = function.apply if torch.is_grad_enabled() else partial(function.forward, _NoBackward())
    return run(*inputs)


class _RmsNorm(torch.autograd.Function):
    """RMSNorm with LayerNorm's backward.

    With y = w · x̂, x̂ = x · r and r = 1/√(mean(x²) + ε):

        dx = r · (g' - x̂ · mean(g' · x̂)),  g' = g · w

    LayerNorm's backward, given a mean of 0, is r · (g' - mean(g') - x̂ · mean(g' · x̂)), so
    PyTorch's one-pass kernel for it plus r · mean(g') gives ours.
    """

    @staticmethod
    def forward(ctx, x, weight, eps: float):
        rows = x.reshape(-1, x.shape[-1])
        out, rstd = torch.empty_like(rows), rows.new_empty(len(rows), 1, dtype=torch.float32)
        for block, normed, block_rstd in _blocks(rows, out, rstd):
            block = block.float()
            torch.linalg.vector_norm(block, dim=-1, keepdim=True, out=block_rstd)
            block_rstd.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
            if x.dtype == torch.float32:
                torch.mul(block, block_rstd, out=normed).mul_(weight)
            else:
                # Rounded once, in the copy; transformers also rounds before the weight.
                normed.copy_(block.mul_(block_rstd).mul_(weight))
        ctx.save_for_backward(x, weight, rstd)
        return out.view_as(x)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]  # torch leaves the number open
        x, weight, rstd = ctx.saved_tensors
        width = x.shape[-1]
        g, rows, is_float32 = (
            grad.reshape(-1, width),
            x.reshape(-1, width),
            x.dtype == torch.float32,
        )
        # In bfloat16 the kernel would sum the weight's gradient in bfloat16.
        dx, dweight, _ = torch.ops.aten.native_layer_norm_backward(
            g,
            rows,
            [width],
            torch.zeros_like(rstd),
            rstd,
            weight.float(),
            None,
            [True, is_float32, False],
        )
        if not is_float32:
            dweight = torch.mv((g * rows).float().t(), rstd.squeeze(1))
        mean = torch.mv(g, weight.to(g.dtype)).float().unsqueeze(1).mul_(rstd).div_(width)
        dx = dx.add_(mean) if is_float32 else dx + mean.to(dx.dtype)
        return dx.view_as(x), dweight.to(weight.dtype), None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return weight · x / √(mean(x²) + eps) over the last dimension, statistics in float32.

    x [..., H], weight [H] → [..., H], in x's dtype. The norm is that of Zhang & Sennrich 2019.
    """
    return _apply(_RmsNorm, x, weight, eps)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int) -> torch.Tensor:
    """Rotate the pairs (x_i, x_{i + R/2}) by angles times `sign`; columns from R on are copied."""
    width, n_pairs = cos.shape[-1], cos.shape[-1] // 2
    first, second, sin = x[..., :n_pairs], x[..., n_pairs:width], sin[..., n_pairs:]
    out = x * cos if width == x.shape[-1] else torch.cat([x[..., :width] * cos, x[..., width:]], -1)
    # Fused multiply-adds on the halves: no swapped copy of x is made.
    out[..., :n_pairs].addcmul_(second, sin, value=-sign)
    out[..., n_pairs:width].addcmul_(first, sin, value=sign)
    return out


class _Rotate(torch.autograd.Function):
    """Rotary embedding; its backward is the inverse rotation, which is the transpose."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]  # torch leaves the number open
        cos, sin = ctx.saved_tensors  # a rotation's transpose turns the other way
        return _turn(grad, cos, sin, -1), None, None


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return the rotary position embedding: the pairs (x_i, x_{i + R/2}) turned by their angles.

    x [..., H, D]; cos and sin [..., 1, R], the same in both halves. Columns from R on stay as they
    are (Su et al. 2021).
    """
    return _apply(_Rotate, x, cos, sin)


def _times(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a · b; may overwrite `a`.

    PyTorch's in-place bfloat16 product takes twice as long as one into new memory.
    """
    return a * b if a.dtype == torch.bfloat16 else a.mul_(b)


class _SwiGlu(torch.autograd.Function):
    """The autograd function of `swiglu`; it saves its inputs alone."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return _times(F.silu(gate), up)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]  # torch leaves the number open
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), _times(F.silu(gate), grad)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) · up (Shazeer 2020), any shape; backward computes silu(gate) again."""
    return _apply(_SwiGlu, gate, up)


class _Projections(torch.autograd.Function):
    """Linear layers without bias that share an input.

    The products in backward add up the gradients of the input themselves, without passes over
    memory for sums.
    """

    @staticmethod
    def forward(ctx, x, kept_in, *weights):
        ctx.save_for_backward(x, *weights)
        rows = x.flatten(0, -2)
        return kept(
            lambda: tuple(matmul(rows, w.t()).view(*x.shape[:-1], -1) for w in weights), kept_in
        )

    @staticmethod
    def backward(ctx, *grads):
        x, *weights = ctx.saved_tensors
        rows, grads = x.flatten(0, -2), [grad.flatten(0, -2) for grad in grads]
        dx = None
        if ctx.needs_input_grad[0]:
            dx = matmul(grads[0], weights[0])
            for grad, weight in zip(grads[1:], weights[1:], strict=True):
                add_matmul(dx, grad, weight)
            dx = dx.view_as(x)
        needed = ctx.needs_input_grad[2:]
        needed_grads = [grad for grad, is_needed in zip(grads, needed, strict=True) if is_needed]
        weight_grads = _weight_gradients(rows, needed_grads)
        return dx, None, *(next(weight_grads) if is_needed else None for is_needed in needed)


def _weight_gradients(x: torch.Tensor, grads: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield gradᵀ · x [N, W] for gradients [T, N] and x [T, W].

    A CPU's bfloat16 units take a transposed left factor at half to two thirds of their speed, so
    where one side is much narrower than the other, its transpose is made first.
    """
    width, out_widths = x.shape[1], [grad.shape[1] for grad in grads]
    on_units = x.device.type == "cpu" and x.dtype == torch.bfloat16 and has_bfloat16_units()
    if on_units and width >= 2 * max(out_widths):
        yield from (_transposed(grad) @ x for grad in grads)
    elif on_units and min(out_widths) >= 2 * width:
        x_WT = _transposed(x)
        yield from (_transposed(x_WT @ grad) for grad in grads)
    else:
        yield from (matmul(grad.t(), x) for grad in grads)


def _transposed(x: torch.Tensor) -> torch.Tensor:
    """Transpose a bfloat16 tensor on a CPU with units for it: [T, W] → [W, T], contiguous.

    oneDNN uses every thread for it, PyTorch's copy one.
    """
    return x.to_mkldnn().transpose(0, 1).to_dense()


def projections(x: torch.Tensor, *layers: nn.Module) -> tuple[torch.Tensor, ...]:
    """Return each linear layer applied to x [..., H]."""
    if all(type(layer) is nn.Linear and layer.bias is None for layer in layers):
        weights = (layer.weight for layer in layers)
        return _apply(_Projections, x, modes_keeping(layers[0]), *weights)
    return tuple(layer(x) for layer in layers)
