"""Mixtures of experts: the choice of experts, their load, and routing replay.

The router computes in float32 whatever the dtype of the rest: softmax over all experts, the k most
likely ones, their weights renormalised, as in transformers. With routing replay (R3; Ma et al.
2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers") the
trainer uses the experts that the engine used. It weighs them by its own router, which therefore
still learns.

Letters in shapes: T tokens, L mixtures of E experts each, k of them for a token.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from rlinf_vl.models.experts import ExpertRanks, exchanged_forward
from rlinf_vl.models.recompute import MODES, kept

#: The column (`TokenSequence.columns`) of the experts that an engine chose for each token, uint8 or
#: int16 [T, L·k] (`Mixture.dtype`); all 0 for a token that was not reported, such as the last.
ROUTES = "routes"


class ExpertLoad:
    """Sums over the tokens of a mini-batch.

    A token counts once for each sequence that it is part of, so the sums depend neither on packing
    nor on the sharing of prompts.

    Attributes:
        counts: float64 [L, E], tokens that each expert received.
        probs: float64 [E], the router's probabilities, over all mixtures.
        tokens: float64 [3]: all tokens; those whose experts the engine reported; and those of them
            for which this router chooses otherwise in some mixture.
        differing: float64 [1], (token, mixture) pairs for which it chooses otherwise.
    """

    def __init__(self, layers: int, experts: int, device: torch.device | str) -> None:
        # One tensor of all sums, so that one collective adds them up.
        self._sums = torch.zeros(layers * experts + experts + 4, dtype=torch.float64, device=device)
        counts, self.probs, self.tokens, self.differing = self._sums.split(
            (layers * experts, experts, 3, 1)
        )
        self.counts = counts.view(layers, experts)

    def sum_over_ranks(self) -> None:
        """Add the sums of the other ranks. Collective."""
        sums = self._sums.cpu()
        dist.all_reduce(sums)
        self._sums.copy_(sums)

    def imbalance(self) -> float:
        """Return the tokens of the busiest expert over the mean of all, averaged over mixtures.

        It is 1 if all experts are equally busy, and E/k at most.
        """
        return float((self.counts.amax(1) / self.counts.mean(1)).mean())

    def balance_loss(self) -> float:
        """Return E · Σ_e f_e · P_e over tokens and mixtures.

        f_e is the share of tokens that went to expert e, and P_e its mean probability (Fedus et al.
        2021, "Switch Transformers", equations 4 to 6; for k experts and over all mixtures at once
        as transformers computes it).
        """
        return float(self.balance_gradient() @ self.probs)

    def balance_gradient(self) -> torch.Tensor:
        """Return the gradient of `balance_loss` in each probability of a token that counts once.

        It is float64 [E].
        """
        layers, experts = self.counts.shape
        return experts * self.counts.sum(0) / (layers * self.tokens[0].clamp(min=1)) ** 2


class Routing:
    """The choice of experts in the mixtures of one forward.

    Attributes:
        taken: the experts of each mixture in order, int64 [T, k], if `record` is set.
        load: receives the counts; set to None at the end of forward, because backward computes
            layers again and must not count twice.
    """

    def __init__(
        self,
        engine_experts: torch.Tensor | None = None,
        *,
        replay: bool = False,
        load: ExpertLoad | None = None,
        copies: torch.Tensor | None = None,
        balance: torch.Tensor | None = None,
        record: bool = False,
    ) -> None:
        """Store what to replay, to count and to record.

        Args:
            engine_experts: the experts that an engine used, integers [T, L, k]; all 0 for a token
                that it did not report.
            replay: use the engine's experts; otherwise they are only compared with this router's.
            load: counts experts and differences; None counts nothing.
            copies: float32 [T], how often each token counts in `load` and `balance`.
            balance: float32 [E], added to the gradient of each token's probabilities.
            record: keep the experts in `used_experts`.
        """
        self.used_experts: list[torch.Tensor] = []
        self.load = load
        self._engine_experts = engine_experts
        self._replay = replay
        self._copies = copies
        self._balance = balance
        self._record = record
        #: bool [T], tokens that differ in some mixture so far.
        self._differing: torch.Tensor | None = None

    def __call__(
        self, number: int, probs: torch.Tensor, k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the router's probabilities, float32 [T, E], and the experts, int64 [T, k].

        `number` is that of the mixture.
        """
        (router_choice,) = kept(lambda: (probs.detach().topk(k).indices,), MODES)
        experts = router_choice
        # Zeros in all places mark a token that was not reported: with k > 1 no token has expert 0
        # in all of them.
        engine_choice = is_reported = None
        if self._engine_experts is not None:
            engine_choice, is_reported = (
                self._engine_experts[:, number].long(),
                (self._engine_experts != 0).flatten(1).any(1),
            )
            if self._replay:
                experts = torch.where(is_reported[:, None], engine_choice, router_choice)
        if self._record:
            self.used_experts.append(experts)
        if self.load is not None:
            assert self._copies is not None
            self._count(self.load, self._copies, number, probs.detach(), experts)
            if engine_choice is not None and is_reported is not None:
                # The order of experts does not matter: sorted, equal sets are equal.
                differs = (router_choice.sort(-1).values != engine_choice.sort(-1).values).any(
                    -1
                ) & is_reported
                self._compare(self.load, self._copies, number, is_reported, differs)
        if self._balance is not None:
            assert self._copies is not None
            probs = _AddGradient.apply(probs, self._copies[:, None] * self._balance)
        return probs, experts

    def _count(self, load: ExpertLoad, copies: torch.Tensor, number: int, probs, experts) -> None:
        """Add probabilities and chosen experts of one mixture to the load."""
        load.probs += copies @ probs
        load.counts[number].scatter_add_(
            0, experts.flatten(), copies.repeat_interleave(experts.shape[1]).double()
        )
        if number == 0:  # tokens count once, and not in every mixture
            load.tokens[0] += copies.sum()

    def _compare(
        self, load: ExpertLoad, copies: torch.Tensor, number: int, is_reported, differs
    ) -> None:
        """Add the tokens for which this router chooses otherwise than the engine did.

        `is_reported` and `differs`: bool [T]. A token counts once in `tokens`, however many
        mixtures differ.
        """
        load.differing += (differs * copies).sum()
        differed_earlier = self._differing
        if number == 0 or differed_earlier is None:
            load.tokens[1] += (is_reported * copies).sum()
            differed_earlier = torch.zeros_like(differs)
        load.tokens[2] += ((differs & ~differed_earlier) * copies).sum()
        self._differing = differed_earlier | differs


class _AddGradient(torch.autograd.Function):
    """The tensor itself; backward adds to its gradient.

    A loss can so be a function of activations that backward computes again.
    """

    @staticmethod
    def forward(ctx, x, gradient):
        ctx.save_for_backward(gradient)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]  # torch leaves the number open
        (gradient,) = ctx.saved_tensors
        return grad + gradient, None


def mixture_forward(
    self: Any, hidden_states: torch.Tensor, *, routing: Routing | None = None, **_
) -> torch.Tensor:
    """Run `forward` of a transformers mixture, with or without a shared expert.

    [B, T, H] → [B, T, H]. `self.number` is the mixture's number among those of the model;
    `self.expert_ranks`, where it is set, are the ranks that share out its experts.
    """
    x = hidden_states.flatten(0, -2)
    probs = F.linear(x.float(), self.gate.weight.float()).softmax(-1)
    probs, experts = (routing or Routing())(self.number, probs, self.gate.top_k)
    weights = probs.gather(1, experts)
    weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)

    def shared() -> torch.Tensor:
        return torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)

    has_shared = hasattr(self, "shared_expert")
    ranks: ExpertRanks | None = getattr(self, "expert_ranks", None)
    if ranks is not None:
        out = exchanged_forward(
            self.experts, ranks, x, experts, weights, shared if has_shared else None
        )
    else:
        out = self.experts(x, experts, weights)
        out = out + shared() if has_shared else out
    return out.view_as(hidden_states)


def mixture_layer_forward(
    self: Any, hidden_states: torch.Tensor, *, routing: Routing | None = None, **kwargs
) -> torch.Tensor:
    """Run `forward` of a transformers decoder layer that hands `routing` on to its mixture."""
    mixer = self.self_attn if hasattr(self, "self_attn") else self.linear_attn
    mixed = mixer(hidden_states=self.input_layernorm(hidden_states), **kwargs)
    hidden_states = hidden_states + (mixed[0] if isinstance(mixed, tuple) else mixed)
    return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states), routing=routing)
