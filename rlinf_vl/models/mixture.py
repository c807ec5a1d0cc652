"""Mixtures of experts: which experts a token goes to, the products of all experts at once, and routing replay.

The router computes in float32 whatever the dtype of the rest: softmax over all experts, the k most likely ones, their weights
renormalised, as transformers does. With routing replay (R3; Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning
Training and Inference Routers") the trainer takes the experts that the engine took. It weighs them by its own router, which so
still learns.

T tokens, L mixtures of E experts each, k of them for a token.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from rlinf_vl.models.layers import kernels_for


class ExpertLoad:
    """Sums over the tokens of a mini-batch. A token counts for each sequence that it is part of, so that neither packing nor the
    sharing of prompts matters.

    Attributes:
        counts: float64 [L, E], tokens that took each expert.
        probs: float64 [E], the router's probabilities, over all mixtures.
        tokens: float64 [3]: all; those whose experts the engine reported; and those of them that this router would send elsewhere in
            some mixture.
        differing: float64 [1], (token, mixture) pairs that it would send elsewhere.
    """

    def __init__(self, layers: int, experts: int, device: torch.device | str) -> None:
        self._sums = torch.zeros(layers * experts + experts + 4, dtype=torch.float64, device=device)
        counts, self.probs, self.tokens, self.differing = self._sums.split((layers * experts, experts, 3, 1))
        self.counts = counts.view(layers, experts)

    def sum_over_ranks(self) -> None:
        """Add what other ranks have counted. Collective."""
        sums = self._sums.cpu()
        dist.all_reduce(sums)
        self._sums.copy_(sums)

    def imbalance(self) -> float:
        """Tokens of the busiest expert over the mean of all, mean over mixtures: 1 if all are equally busy, E/k at most."""
        return float((self.counts.amax(1) / self.counts.mean(1)).mean())

    def balance_loss(self) -> float:
        """E · Σ_e f_e · P_e, with f_e the experts e taken and P_e the probability of e, per token and mixture (Fedus et al. 2021,
        "Switch Transformers", equations 4 to 6; for k experts and over all mixtures at once as transformers computes it)."""
        return float(self.balance_gradient() @ self.probs)

    def balance_gradient(self) -> torch.Tensor:
        """Gradient of `balance_loss` with respect to each probability of a token that counts once, float64 [E]."""
        layers, experts = self.counts.shape
        return experts * self.counts.sum(0) / (layers * self.tokens[0].clamp(min=1)) ** 2


class Routing:
    """Chooses experts in the mixtures of one forward.

    Attributes:
        taken: of each mixture in order, int64 [T, k], where `record` asks for it.
        load: counts what is taken; None from the end of forward on, for backward computes layers again.
    """

    def __init__(
        self,
        given: torch.Tensor | None = None,
        *,
        replay: bool = False,
        load: ExpertLoad | None = None,
        copies: torch.Tensor | None = None,
        balance: torch.Tensor | None = None,
        record: bool = False,
    ) -> None:
        """
        Args:
            given: what an engine has taken, integers [T, L, k]; all 0 for a token that it did not report.
            replay: take what is given; otherwise it is only compared with.
            copies: float32 [T], how often each token counts in `load` and `balance`.
            balance: float32 [E], added to the gradient of each token's probabilities.
            record: keep `taken`.
        """
        self.taken: list[torch.Tensor] = []
        self.load = load
        self._given = given
        self._replay = replay
        self._copies = copies
        self._balance = balance
        self._record = record
        self._differing: torch.Tensor | None = None  # tokens, in a mixture so far

    def __call__(self, number: int, probs: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """In mixture `number`: (the router's probabilities float32 [T, E], experts int64 [T, k])."""
        own = taken = probs.topk(k, dim=-1).indices
        given = reported = None
        if self._given is not None:
            given, reported = self._given[:, number].long(), (self._given != 0).flatten(1).any(1)
            if self._replay:
                taken = torch.where(reported[:, None], given, own)
        if self._record:
            self.taken.append(taken)
        if self.load is not None:
            assert self._copies is not None
            self._count(self.load, self._copies, number, probs.detach(), taken)
            if given is not None and reported is not None:
                differs = (own.sort(-1).values != given.sort(-1).values).any(-1) & reported
                self._compare(self.load, self._copies, number, reported, differs)
        if self._balance is not None:
            assert self._copies is not None
            probs = _AddGradient.apply(probs, self._copies[:, None] * self._balance)
        return probs, taken

    def _count(self, load: ExpertLoad, copies: torch.Tensor, number: int, probs, taken) -> None:
        load.probs += copies @ probs
        load.counts[number].scatter_add_(0, taken.flatten(), copies.repeat_interleave(taken.shape[1]).double())
        if number == 0:
            load.tokens[0] += copies.sum()

    def _compare(self, load: ExpertLoad, copies: torch.Tensor, number: int, reported, differs) -> None:
        load.differing += (differs * copies).sum()
        before = self._differing
        if number == 0 or before is None:
            load.tokens[1] += (reported * copies).sum()
            before = torch.zeros_like(differs)
        load.tokens[2] += ((differs & ~before) * copies).sum()
        self._differing = before | differs


class _AddGradient(torch.autograd.Function):
    """The tensor itself; backward adds to its gradient. So a loss can be a function of activations that backward computes again."""

    @staticmethod
    def forward(ctx, x, gradient):
        ctx.save_for_backward(gradient)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]  # torch leaves the number open
        (gradient,) = ctx.saved_tensors
        return grad + gradient, None


def mixture_forward(self: Any, hidden_states: torch.Tensor, *, routing: Routing | None = None, **_) -> torch.Tensor:
    """`forward` of a transformers mixture, with an expert that all tokens share or without. [B, T, H] → [B, T, H].

    `self.number` is the mixture's among those of the model.
    """
    x = hidden_states.flatten(0, -2)
    probs = F.linear(x.float(), self.gate.weight.float()).softmax(-1)
    probs, taken = (routing or Routing())(self.number, probs, self.gate.top_k)
    weights = probs.gather(1, taken)
    weights = weights / weights.sum(-1, keepdim=True)
    out = self.experts(x, taken, weights.to(x.dtype))
    if hasattr(self, "shared_expert"):
        out = out + torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
    return out.view_as(hidden_states)


def experts_forward(self: Any, x: torch.Tensor, taken: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`forward` of transformers' fused experts: one grouped product for all of them.

    x [T, H], taken int64 [T, k], weights [T, k] → [T, H]. transformers' own, where it can't have grouped products, quietly takes a
    loop whose backward is tens of times slower.
    """
    if any(size * x.itemsize % 16 for size in self.down_proj.shape[1:]):
        raise ValueError(
            f"experts {tuple(self.down_proj.shape)} in {x.dtype}: grouped products take rows of whole 16 bytes, multiples of 4 "
            "numbers in float32 and of 8 in bfloat16"
        )
    k = taken.shape[1]
    order = taken.flatten().argsort(stable=True)  # by expert
    counts = torch.zeros(len(self.gate_up_proj), dtype=torch.int32, device=x.device)
    ends = counts.scatter_add_(0, taken.flatten(), torch.ones_like(taken.flatten(), dtype=torch.int32)).cumsum(0)
    ends = ends.to(torch.int32)
    rows = x.repeat_interleave(k, dim=0).index_select(0, order)
    gate, up = F.grouped_mm(rows, self.gate_up_proj.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    inner = kernels_for(x).swiglu(gate, up)
    out = F.grouped_mm(inner, self.down_proj.transpose(1, 2), offs=ends)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    return (out.index_select(0, back).view(*taken.shape, -1) * weights.unsqueeze(-1)).sum(1)


def mixture_layer_forward(
    self: Any, hidden_states: torch.Tensor, *, routing: Routing | None = None, **kwargs
) -> torch.Tensor:
    """`forward` of a transformers decoder layer that may have a mixture: it hands `routing` on to it."""
    mixer = self.self_attn if hasattr(self, "self_attn") else self.linear_attn
    mixed = mixer(hidden_states=self.input_layernorm(hidden_states), **kwargs)
    hidden_states = hidden_states + (mixed[0] if isinstance(mixed, tuple) else mixed)
    return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states), routing=routing)
