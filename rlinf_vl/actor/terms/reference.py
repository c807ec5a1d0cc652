"""The KL to a frozen reference in the loss: `algorithm.kl_beta`, `kl_placement: loss`.

With `kl_placement: reward` the trainer calls `reference_logprobs` before the step instead.
"""

from collections.abc import Iterator

import torch

from rlinf_vl.actor.terms.passes import ModelInput, Passes, Term, without_columns
from rlinf_vl.algorithms import divergence
from rlinf_vl.config.schema import AlgorithmConfig
from rlinf_vl.models.lora import adapters_off
from rlinf_vl.models.policy import PolicyModel
from rlinf_vl.observe.spans import span


@torch.no_grad()
def reference_logprobs(reference: PolicyModel, model_input: ModelInput) -> torch.Tensor:
    """Return the reference's logprobs, float32 [R], without gradients.

    It takes the policy's rows, and shares its image features. With LoRA the reference is the policy
    with its adapters off.
    """
    with span("reference"), adapters_off(reference.model):
        return reference(*without_columns(model_input))[0]


def loss_terms(
    logprobs: torch.Tensor, entropy: torch.Tensor, passes: Passes, algorithm: AlgorithmConfig
) -> Iterator[Term]:
    """Yield the KL to the reference of each token, in nats, by `algorithm.kl_penalty_type`."""
    if passes.reference is not None and algorithm.kl_penalty_type is not None:
        mask = torch.ones_like(logprobs, dtype=torch.bool)
        kl = divergence(passes.reference, logprobs, mask, algorithm.kl_penalty_type)
        yield "actor/ref_kl", algorithm.kl_beta, kl
