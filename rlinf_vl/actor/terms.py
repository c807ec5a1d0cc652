"""What further passes over a micro-batch add to its loss, token by token."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rlinf_vl.algorithms import divergence
from rlinf_vl.config.schema import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class Passes:
    """What passes beside the policy's own say of the sampled tokens: float32 [R], None where there was no such pass.

    Attributes:
        reference: logprobs of the reference policy.
    """

    reference: torch.Tensor | None = None


#: Metric, weight in the loss (0: it is only reported), value of each token.
Term = tuple[str, float, torch.Tensor]


def extra_terms(
    logprobs: torch.Tensor, entropy: torch.Tensor, passes: Passes, algorithm: AlgorithmConfig
) -> Iterator[Term]:
    """The terms that are added to the policy's loss, differentiable in `logprobs` and `entropy`, float32 [R]."""
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    yield "actor/entropy", -algorithm.entropy_bonus, entropy
    if passes.reference is not None and algorithm.kl_penalty_type is not None:
        kl = divergence(passes.reference, logprobs, mask, algorithm.kl_penalty_type)
        yield "actor/ref_kl", algorithm.kl_beta, kl
