"""The policy's entropy: a bonus (`algorithm.entropy_bonus`), or a price (`algorithm.papo`)."""

from collections.abc import Iterator

import torch

from rlinf_vl.actor.terms.passes import Passes, Term
from rlinf_vl.config.schema import AlgorithmConfig


def loss_terms(
    logprobs: torch.Tensor, entropy: torch.Tensor, passes: Passes, algorithm: AlgorithmConfig
) -> Iterator[Term]:
    """Yield the entropy of each token, in nats."""
    yield "actor/entropy", algorithm.papo.entropy_weight - algorithm.entropy_bonus, entropy
