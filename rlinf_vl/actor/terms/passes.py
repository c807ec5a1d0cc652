"""The results of the forwards of terms, and the input of one forward."""

from dataclasses import dataclass, replace

import torch

from rlinf_vl.models.family import VisionFeatures
from rlinf_vl.types import MicroBatch

#: A micro-batch, and the features of its images; None: the tower makes them from its pixels.
ModelInput = tuple[MicroBatch, VisionFeatures | None]
#: Metric, weight in the loss (0: it is only reported), value of each sampled token, float32 [R].
Term = tuple[str, float, torch.Tensor]


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


def without_columns(model_input: ModelInput) -> ModelInput:
    """Return the input without what the engine reported of the tokens, such as their experts.

    That is of the policy and the images that it saw; another forward chooses by itself.
    """
    batch, features = model_input
    return replace(batch, row_columns={}), features
