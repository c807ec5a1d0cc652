"""Terms of the loss from forwards beside the policy's own: reference, teacher, corrupted images."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rlinf_vl.algorithms import divergence, reverse_kl
from rlinf_vl.config.schema import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class Passes:
    """Results of the forwards beside the policy's own, for the sampled tokens.

    Each is float32 [R], or None where there was no such forward.

    Attributes:
        reference: logprobs of the reference policy.
        teacher: logprobs of the teacher.
        candidates: logprobs [R, K] of the policy's K likeliest tokens, by the policy
            (differentiable) and by the teacher.
        corrupted: logprobs of the policy on corrupted images, and entropies if they are in the
            loss; both are differentiable then.
    """

    reference: torch.Tensor | None = None
    teacher: torch.Tensor | None = None
    candidates: tuple[torch.Tensor, torch.Tensor] | None = None
    corrupted: tuple[torch.Tensor, torch.Tensor | None] | None = None


#: PAPO's KL is maximised, so that of one token is bounded, as its authors do.
MAX_PAPO_KL = 10.0
#: Metric, weight in the loss (0: it is only reported), value of each token.
Term = tuple[str, float, torch.Tensor]


def extra_terms(
    logprobs: torch.Tensor, entropy: torch.Tensor, passes: Passes, algorithm: AlgorithmConfig
) -> Iterator[Term]:
    """Yield the terms added to the policy's loss.

    They are differentiable in `logprobs` and `entropy`, float32 [R].
    """
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    papo, distillation = algorithm.papo, algorithm.distillation
    yield "actor/entropy", papo.entropy_weight - algorithm.entropy_bonus, entropy
    if passes.reference is not None and algorithm.kl_penalty_type is not None:
        kl = divergence(passes.reference, logprobs, mask, algorithm.kl_penalty_type)
        yield "actor/ref_kl", algorithm.kl_beta, kl
    if passes.corrupted is not None:
        corrupted_logprobs, corrupted_entropy = passes.corrupted
        yield (
            "actor/papo_kl",
            -papo.weight,
            divergence(corrupted_logprobs, logprobs, mask, "k3").clamp(max=MAX_PAPO_KL),
        )
        if corrupted_entropy is not None:
            yield "actor/papo_entropy", papo.entropy_weight, corrupted_entropy
    if passes.candidates is not None:
        policy_candidates, teacher_candidates = passes.candidates
        yield (
            "actor/teacher_kl",
            distillation.weight,
            reverse_kl(policy_candidates, teacher_candidates),
        )
    elif passes.teacher is not None:  # its KL is in the advantages already (`guided_advantages`)
        yield "actor/teacher_kl", 0.0, divergence(passes.teacher, logprobs, mask, "k1")


def guided_advantages(
    advantages: torch.Tensor, old_logprobs: torch.Tensor, passes: Passes, algorithm: AlgorithmConfig
) -> torch.Tensor:
    """Return the advantages less each sampled token's log-ratio to the teacher, float32 [R].

    A · reward_weight - weight · (old_logprobs - teacher): the reverse KL as a reward of each token,
    without discount (Lu, "On-Policy Distillation", Thinking Machines Lab 2025). With candidates the
    KL is a term of the loss.
    """
    distillation = algorithm.distillation
    if passes.teacher is None:
        return advantages
    advantages = distillation.reward_weight * advantages
    if passes.candidates is not None:
        return advantages
    return advantages - distillation.weight * (old_logprobs - passes.teacher)
