"""PAPO (Wang et al., arXiv:2507.06448): the KL to the policy on corrupted images is maximised.

Corrupted images are new in each step, and go through the policy's tower in each micro-batch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import repeat
from typing import Any

import torch

from rlinf_vl.actor.batch_types import Advantages, RankMiniBatch
from rlinf_vl.actor.batches import BatchMaker
from rlinf_vl.actor.terms.passes import ModelInput, Passes, Term, without_columns
from rlinf_vl.algorithms import divergence
from rlinf_vl.config.schema import AlgorithmConfig
from rlinf_vl.data.views import Mask
from rlinf_vl.models.policy import PolicyModel
from rlinf_vl.observe.spans import span
from rlinf_vl.types import Group, ImageRef

#: The share of an image's squares that are black, as in the paper.
MASKED_SHARE = 0.6
#: PAPO's KL is maximised, so that of one token is bounded, as its authors do.
MAX_KL = 10.0


class CorruptedForward:
    """The policy's forward on corrupted images."""

    def __init__(self, policy: PolicyModel, algorithm: AlgorithmConfig) -> None:
        self._policy, self._papo = policy, algorithm.papo
        self._batches: BatchMaker | None = None  # made anew in each step

    def prepare(self, batches: BatchMaker, seed: int) -> None:
        """Prepare a step whose images are corrupted with this seed, if the term is in use."""
        papo = self._papo
        if not (papo.weight or papo.entropy_weight):
            return
        corrupt, pixels = Mask(MASKED_SHARE), batches.pixels

        def corrupted_pixels(image: ImageRef) -> Any:
            return pixels(corrupt(image, seed))

        collate = replace(batches.collate, pixels=corrupted_pixels)
        self._batches = BatchMaker(self._policy, collate, None, batches.max_tokens)

    def inputs(
        self, mini: RankMiniBatch, groups: Mapping[int, Group], advantages: Advantages
    ) -> Iterator[ModelInput | None]:
        """Yield the input for each micro-batch, in order; without the term None without end."""
        if self._batches is None:
            return repeat(None)
        return self._batches(mini, groups, advantages)

    def __call__(self, model_input: ModelInput) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return logprobs and entropies, float32 [R]; with gradients only if the entropy is in the
        loss."""
        with_gradients = self._papo.entropy_weight > 0
        with torch.set_grad_enabled(with_gradients), span("corrupted images"):
            return self._policy(*without_columns(model_input))


def loss_terms(
    logprobs: torch.Tensor, entropy: torch.Tensor, passes: Passes, algorithm: AlgorithmConfig
) -> Iterator[Term]:
    """Yield the KL to the policy on corrupted images, in nats, and that policy's entropy."""
    if passes.corrupted is None:
        return
    corrupted_logprobs, corrupted_entropy = passes.corrupted
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    kl = divergence(corrupted_logprobs, logprobs, mask, "k3").clamp(max=MAX_KL)
    yield "actor/papo_kl", -algorithm.papo.weight, kl
    if corrupted_entropy is not None:
        yield "actor/papo_entropy", algorithm.papo.entropy_weight, corrupted_entropy
