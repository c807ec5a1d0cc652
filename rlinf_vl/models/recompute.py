"""Activation checkpointing of blocks: the outputs that a forward keeps, and what backward recomputes.

| mode | kept of a block's forward | recomputed in backward |
|---|---|---|
| `none` | all that its operations need | – |
| `selective` | its input, the outputs of attention and of linear layers | norms, rotations, activations, … |
| `mlp` | the same, but for the MLP's layers | the MLP, too |
| `full` | its input | the block |

Experts, delta nets and exchanges between ranks run again in all modes but `none`.

A recomputation runs the block's own forward once more. Where that calls `kept`, it gets the tensors
of the first forward in place of new ones, in the order of the calls. So `selective` needs nothing of
torch's dispatch, and serves both variants of torch's checkpointing. The choice of experts is kept in
`full`, too: tokens go to the same experts in both forwards.
"""

import threading
import types
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rlinf_vl.models.family import Family

#: The modes, those that keep most first.
MODES = ("none", "selective", "mlp", "full")
#: The modes that keep the outputs of attention.
KEEPS_ATTENTION = ("selective", "mlp")
#: A product is kept if its input has at least this share of the width of the block's widest: FLOPs
#: per byte of output grow with that width, and those of narrow adapters are few.
LEAST_WIDTH = 1 / 8

Tensors = tuple[torch.Tensor, ...]
_running = threading.local()


class KeptOutputs:
    """The outputs that one forward of a block keeps for its recomputation, in order."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self._outputs: list[Tensors] = []
        self._recomputes = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let `kept` in this thread use these outputs while the block's forward runs in the `with`.

        The first forward stores them, a later one takes them.
        """
        outer = getattr(_running, "outputs", None)
        _running.outputs = self
        try:
            yield
        finally:
            _running.outputs = outer
            if self._recomputes:
                self._outputs.clear()
            self._outputs.reverse()  # `next` takes them from the end
            self._recomputes = True

    def next(self, compute: Callable[[], Tensors]) -> Tensors:
        """Return the next outputs: computed and stored, or those that are stored."""
        if self._recomputes:
            assert self._outputs, "backward ran a second time through a block that keeps outputs"
            # Taken out, so that a tensor is freed once backward has used it.
            return self._outputs.pop()
        outputs = compute()
        # Without what autograd attaches to a function's results: it would be a circle.
        self._outputs.append(tuple(x.detach() for x in outputs))
        return outputs


def kept(compute: Callable[[], Tensors], modes: Collection[str] = KEEPS_ATTENTION) -> Tensors:
    """Return `compute()`, or in a recomputation what the block's first forward returned here.

    For results that autograd doesn't record: within the forward of an `autograd.Function`, or
    integers.

    Args:
        modes: those that keep them.
    """
    outputs: KeptOutputs | None = getattr(_running, "outputs", None)
    if outputs is None or outputs.mode not in modes:
        return compute()
    return outputs.next(compute)


class Checkpointing:
    """The checkpointing of a model's blocks.

    Attributes:
        mode: one of `MODES`; may be changed between passes.
    """

    def __init__(self, model: nn.Module, family: Family, mode: str, use_reentrant: bool) -> None:
        """Wrap the `forward` of each block of text model and vision tower.

        transformers' own switch depends on its version: it wraps `__call__` in some and the class's
        `forward` in others, which a family's own forward (`Family.layers`) then bypasses.
        """
        assert mode in MODES, f"{mode} is none of {MODES}"
        self.mode = mode
        self._use_reentrant = use_reentrant
        for path in (family.text_blocks, family.vision_blocks):
            for block in model.get_submodule(path).children() if path else ():
                block.forward = partial(self._forward, block, block.forward)
                _mark_kept_layers(block)

    def _forward(
        self,
        block: nn.Module,
        forward: Callable[..., Any],
        hidden_states: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run `forward` of this block under torch's activation checkpointing while the block trains.

        Hooks of the module, FSDP2's among them, stay outside: a recomputed forward runs none of
        them a second time.
        """
        if self.mode == "none" or not (block.training and torch.is_grad_enabled()):
            return forward(hidden_states, *args, **kwargs)
        if (
            self._use_reentrant
            and not hidden_states.requires_grad
            and any(p.requires_grad for p in block.parameters())
        ):
            # The reentrant kind builds a graph only for inputs with gradients: after frozen
            # embeddings, which give none, adapters of the first blocks would learn nothing.
            hidden_states = hidden_states.detach().requires_grad_()
        outputs = KeptOutputs(self.mode)

        def run(hidden_states: torch.Tensor, *args: Any) -> Any:
            with outputs.running():
                return forward(hidden_states, *args, **kwargs)

        return checkpoint(run, hidden_states, *args, use_reentrant=self._use_reentrant)


def checkpoint_blocks(
    model: nn.Module, family: Family, mode: str, use_reentrant: bool = False
) -> Checkpointing:
    """Checkpoint the blocks of text model and vision tower in training forwards."""
    return Checkpointing(model, family, mode, use_reentrant)


def _mark_kept_layers(block: nn.Module) -> None:
    """Let the linear layers of a block keep their products, in the modes that do.

    The MLP's last product is never kept: backward needs its result nowhere, and a recomputation
    ends before it.
    """
    linears = [module for module in block.modules() if type(module) is nn.Linear]
    mlp = getattr(block, "mlp", None)
    mlp_linears = [] if mlp is None else [m for m in mlp.modules() if type(m) is nn.Linear]
    widest = max((linear.in_features for linear in linears), default=0)
    for linear in linears:
        if linear.in_features >= LEAST_WIDTH * widest and linear not in mlp_linears[-1:]:
            modes = ("selective",) if linear in mlp_linears else KEEPS_ATTENTION
            vars(linear)["kept_in"] = modes  # read by `modes_keeping`
            linear.forward = types.MethodType(_kept_linear_forward, linear)


def modes_keeping(layer: nn.Module) -> Collection[str]:
    """Return the modes that keep a linear layer's product."""
    return vars(layer).get("kept_in", ())


def _kept_linear_forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Run `forward` of a linear layer whose product some modes keep."""
    outputs: KeptOutputs | None = getattr(_running, "outputs", None)
    modes = modes_keeping(self)
    if outputs is None or outputs.mode not in modes:
        return F.linear(x, self.weight, self.bias)
    return _KeptLinear.apply(x, self.weight, self.bias, modes)


class _KeptLinear(torch.autograd.Function):
    """A linear layer whose output is `kept`."""

    @staticmethod
    def forward(ctx, x, weight, bias, modes):
        ctx.save_for_backward(x, weight)
        (out,) = kept(lambda: (F.linear(x, weight, bias),), modes)
        return out

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]  # torch leaves the number open
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        dx = (rows @ weight).view_as(x) if ctx.needs_input_grad[0] else None
        dweight = rows.t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        dbias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return dx, dweight, dbias, None
