"""Products of experts: tokens sorted by expert, multiplied, and brought back, on one rank or several.

A token goes to k experts, which gives k rows. Rows are sorted by expert, because a grouped product
takes consecutive rows for each. Every permutation is a gather, in forward by the order and in
backward by its inverse, so that no gradient is summed by atomic adds, whose order varies.

With expert parallelism each rank has e = E / P experts whole. A rank's sorted rows are already
sorted by the rank of their expert: one exchange brings them there, another brings the results back.
Before them the ranks exchange how many rows each expert gets, so no row is dropped or padded.

Letters in shapes: T tokens of a rank, k experts of a token, R = T·k rows, E experts, H hidden size,
P expert ranks, e experts of a rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from rlinf_vl.models.layers import kernels_for

#: The stacked weights of experts in transformers' modules, each [E, out, in].
STACKED = ("gate_up_proj", "down_proj")


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks that share out the experts of each mixture, and this rank's number among them.

    Rank p has experts p·e … (p + 1)·e.
    """

    group: dist.ProcessGroup
    rank: int
    size: int


def stacked_experts(experts: Any) -> tuple[Any, dict[str, Any]]:
    """Return the module with the stacked weights, and peft's wrappers around it by weight."""
    wrappers: dict[str, Any] = {}
    while hasattr(experts, "lora_A"):
        wrappers[experts.parameter_name] = experts
        experts = experts.base_layer
    return experts, wrappers


def experts_forward(
    self: Any, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Run `forward` of transformers' fused experts: one grouped product for all of them.

    x [T, H], experts int64 [T, k], weights [T, k] → [T, H]. Where transformers cannot use grouped
    products, it silently falls back to a loop whose backward is tens of times slower.
    """
    order = RowOrder(experts.flatten(), len(self.gate_up_proj))
    out = _products(order.spread(x), order.counts, self.gate_up_proj, self.down_proj)
    return order.combine(out, weights)


def exchanged_forward(
    experts_module: Any,
    ranks: ExpertRanks,
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    meanwhile: Callable[[], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Run `experts_forward` where each of `ranks` has only its own experts. Collective.

    `meanwhile` computes what is added to the result, while rows travel: the shared experts. In
    backward its gradient is computed while the rows' gradients travel.
    """
    base, wrappers = stacked_experts(experts_module)
    gate_up_proj, down_proj = (
        _own_weight(getattr(base, name), wrappers.get(name), ranks) for name in STACKED
    )
    n_own = len(gate_up_proj)
    order = RowOrder(experts.flatten(), n_own * ranks.size)
    sent_PE = order.counts.view(ranks.size, n_own)
    received_PE = torch.empty_like(sent_PE)
    dist.all_to_all_single(received_PE, sent_PE, group=ranks.group)
    # The sizes of buffers are the host's: the only wait for the device.
    n_sent, n_received = torch.stack([sent_PE.sum(1), received_PE.sum(1)]).tolist()

    outward = Transfer(ranks, n_sent, n_received)
    rows = _Begin.apply(order.spread(x), outward)
    added = None if meanwhile is None else meanwhile()
    rows = _End.apply(rows, outward)
    # Rows arrive by sender, and of each sender by expert.
    own_experts = torch.arange(n_own, device=x.device).repeat(ranks.size)
    arrived = own_experts.repeat_interleave(received_PE.flatten(), output_size=sum(n_received))
    own_order = RowOrder(arrived, n_own)
    out = _products(own_order.spread(rows), own_order.counts, gate_up_proj, down_proj)
    out = own_order.restore(out)
    homeward = Transfer(ranks, n_received, n_sent)
    out = order.combine(_End.apply(_Begin.apply(out, homeward), homeward), weights)
    return out if added is None else out + added


def _own_weight(weight: torch.Tensor, wrapper: Any, ranks: ExpertRanks) -> torch.Tensor:
    """Return the stacked weight of this rank's experts, [e, out, in], with peft's adapters added.

    Adapters are small, and every rank has those of all experts: the gradient of those that are not
    its own is zero.
    """
    weight = weight.to_local() if isinstance(weight, DTensor) else weight
    if wrapper is None or wrapper.disable_adapters:
        return weight
    (name,) = wrapper.lora_A
    # peft stores the factors of experts as A [E · r, in] and B [out, r · E].
    a, b = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
    n_own = len(weight)
    own_experts = slice(ranks.rank * n_own, (ranks.rank + 1) * n_own)
    a = a.view(n_own * ranks.size, -1, a.shape[-1])[own_experts]
    b = b.view(len(b), -1, n_own * ranks.size)[..., own_experts].permute(2, 0, 1)
    scaling = wrapper.scaling[name]
    return torch.baddbmm(weight, b.to(weight.dtype), a.to(weight.dtype), alpha=scaling)


def _products(
    rows: torch.Tensor, counts: torch.Tensor, gate_up_proj: torch.Tensor, down_proj: torch.Tensor
) -> torch.Tensor:
    """Return the gated MLP of each row's expert: rows [R, H] sorted by expert → [R, H].

    counts int64 [E]: rows of each expert, which may be 0.
    """
    if any(size * rows.itemsize % 16 for size in down_proj.shape[1:]):
        raise ValueError(
            f"experts {tuple(down_proj.shape)} in {rows.dtype}: grouped products take rows of "
            "whole 16 bytes, multiples of 4 numbers in float32 and of 8 in bfloat16"
        )
    n_rows = len(rows)
    if not n_rows:
        # Rows and weights must be in the graph all the same: backward has an exchange for the rows,
        # and FSDP2 reduces the weights' gradients, for both of which other ranks would wait. One
        # row of zeros stands in.
        rows, counts = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), counts.clone()
        counts[0] = 1
    ends = counts.cumsum(0).to(torch.int32)
    gate, up = F.grouped_mm(rows, gate_up_proj.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    inner = kernels_for(rows).swiglu(gate, up)
    return F.grouped_mm(inner, down_proj.transpose(1, 2), offs=ends)[:n_rows]


class RowOrder:
    """The order of rows sorted by key, and its inverse.

    Attributes:
        order: int64 [R], the row at each place of the sorted rows.
        inverse: int64 [R], the place of each row.
        counts: int64 [E], rows of each key.
    """

    order: torch.Tensor
    inverse: torch.Tensor
    counts: torch.Tensor

    def __init__(self, keys: torch.Tensor, n_keys: int) -> None:
        """Sort `keys`, int64 [R] below `n_keys`; rows of equal keys keep their order."""
        self.order = keys.argsort(stable=True)
        places = torch.arange(len(keys), device=keys.device)
        self.inverse = torch.empty_like(keys).scatter_(0, self.order, places)
        counts = torch.zeros(n_keys, dtype=torch.int64, device=keys.device)
        self.counts = counts.scatter_add_(0, keys, torch.ones_like(keys))

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sorted rows of tokens x [T, H], R / T for each: [R, H]."""
        return _Spread.apply(x, self.order, self.inverse)

    def restore(self, rows: torch.Tensor) -> torch.Tensor:
        """Return sorted rows [R, H] in the order before."""
        return _Spread.apply(rows, self.inverse, self.order)

    def combine(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's rows: sorted [R, H], weights [T, k] → [T, H]."""
        return _Combine.apply(rows, weights, self.order, self.inverse)


class _Spread(torch.autograd.Function):
    """`RowOrder.spread`; backward gathers each token's k gradients and sums them.

    The orders are saved like activations, so that activation checkpointing drops them, too.
    """

    @staticmethod
    def forward(ctx, x, order, inverse):
        ctx.save_for_backward(inverse)
        ctx.n_tokens = len(x)
        return x.index_select(0, _tokens(order, len(x)))

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]  # torch leaves the number open
        (inverse,) = ctx.saved_tensors
        rows = grad.index_select(0, inverse)
        if len(rows) != ctx.n_tokens:
            rows = rows.view(ctx.n_tokens, -1, rows.shape[1]).sum(1)
        return rows, None, None


class _Combine(torch.autograd.Function):
    """`RowOrder.combine`; backward gathers the gradient of each row's token."""

    @staticmethod
    def forward(ctx, rows, weights, order, inverse):
        ctx.save_for_backward(rows, weights, order, inverse)
        by_token = rows.index_select(0, inverse).view(*weights.shape, -1)
        return (by_token * weights.unsqueeze(-1)).sum(1)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        rows, weights, order, inverse = ctx.saved_tensors
        grad_rows = grad_weights = None
        if ctx.needs_input_grad[0]:
            row_weights = weights.flatten().index_select(0, order).unsqueeze(-1)
            grad_rows = grad.index_select(0, _tokens(order, len(weights))) * row_weights
        if ctx.needs_input_grad[1]:
            by_token = rows.index_select(0, inverse).view(*weights.shape, -1)
            grad_weights = (by_token * grad.unsqueeze(1)).sum(-1)
        return grad_rows, grad_weights, None, None


def _tokens(order: torch.Tensor, n_tokens: int) -> torch.Tensor:
    """Return the token of each sorted row."""
    return order if len(order) == n_tokens else order // (len(order) // n_tokens)


class Transfer:
    """One exchange of rows between expert ranks, in forward, and of their gradients in backward."""

    def __init__(
        self, ranks: ExpertRanks, n_sent: Sequence[int], n_received: Sequence[int]
    ) -> None:
        """Prepare to send `n_sent[p]` rows to rank p, and to receive `n_received[p]` from it."""
        self._ranks = ranks
        self._n_sent = list(n_sent)
        self._n_received = list(n_received)
        self._work: Any = None
        self._leaving: torch.Tensor | None = None  # must live until it is sent
        self._arriving: torch.Tensor | None = None

    def begin(self, rows: torch.Tensor, *, backward: bool = False) -> torch.Tensor:
        """Begin to send the rows [n, H]; return those that arrive, which are there after `wait`."""
        n_in, n_out = self._n_sent, self._n_received
        if backward:
            n_in, n_out = n_out, n_in
        self._leaving = rows.contiguous()
        arriving = self._arriving = rows.new_empty(sum(n_out), *rows.shape[1:])
        self._work = dist.all_to_all_single(
            arriving, self._leaving, n_out, n_in, group=self._ranks.group, async_op=True
        )
        return arriving

    def wait(self) -> torch.Tensor:
        """Return the rows that `begin` returned, when they have arrived."""
        arrived = self._arriving
        assert arrived is not None
        self._work.wait()
        self._work = self._leaving = self._arriving = None
        return arrived


class _Begin(torch.autograd.Function):
    """`Transfer.begin`; backward ends the transfer of gradients that `_End` has begun.

    Backward runs the nodes made last first. So what is computed between `_Begin` and `_End` has its
    backward between theirs, while gradients travel.
    """

    @staticmethod
    def forward(ctx, rows, transfer: Transfer):
        ctx.transfer = transfer
        return transfer.begin(rows)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.transfer.wait(), None


class _End(torch.autograd.Function):
    """`Transfer.wait`; backward begins the transfer of gradients."""

    @staticmethod
    def forward(ctx, rows, transfer: Transfer):
        ctx.transfer = transfer
        return transfer.wait().view_as(rows)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        # `_Begin` takes what arrives from the transfer: autograd wants this shape here, and other
        # ranks send another number of rows.
        ctx.transfer.begin(grad, backward=True)
        return grad, None
