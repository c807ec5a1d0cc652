"""Terms of the loss beside the policy's own, a file each: its forward, if it has one, and its share of
the loss and the advantages. `forwards` runs the forwards."""

from collections.abc import Iterator

import torch

from rlinf_vl.actor.terms import entropy, papo, reference, teacher
from rlinf_vl.actor.terms.passes import Passes, Term
from rlinf_vl.actor.terms.teacher import guided_advantages
from rlinf_vl.config.schema import AlgorithmConfig

__all__ = ["Passes", "guided_advantages", "loss_terms"]

#: In the order in which they are added.
TERMS = (entropy, reference, papo, teacher)


def loss_terms(
    logprobs: torch.Tensor, entropies: torch.Tensor, passes: Passes, algorithm: AlgorithmConfig
) -> Iterator[Term]:
    """Yield the terms added to the policy's loss.

    They are differentiable in `logprobs` and `entropies`, float32 [R].
    """
    for term in TERMS:
        yield from term.loss_terms(logprobs, entropies, passes, algorithm)
