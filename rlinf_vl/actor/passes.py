"""Forwards beside the policy's own: of the reference, a teacher, and on corrupted images.

All take the policy's rows, packed alike, so they cost one forward each. The reference shares the
policy's image features. A teacher has a tower of its own, which encodes each image once. Corrupted
images are new in each step, and go through the policy's tower in each micro-batch.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import torch

from rlinf_vl.actor.batch_types import Advantages, RankMiniBatch
from rlinf_vl.actor.batches import BatchMaker
from rlinf_vl.actor.terms import Passes
from rlinf_vl.config.schema import AlgorithmConfig
from rlinf_vl.data.corruption import Corruption
from rlinf_vl.models.family import VisionFeatures
from rlinf_vl.models.lora import adapters_off
from rlinf_vl.models.policy import Candidates, PolicyModel
from rlinf_vl.observe.spans import span
from rlinf_vl.types import Group, ImageRef, MicroBatch

#: A micro-batch, and the features of its images; None: the tower makes them from its pixels.
ModelInput = tuple[MicroBatch, VisionFeatures | None]


@dataclass(slots=True)
class MicroBatchInputs:
    """The inputs of one micro-batch's forwards.

    Attributes:
        policy: of the policy and the reference.
        corrupted: of the policy on corrupted images; None without PAPO.
        teacher: of the teacher; None without one.
    """

    policy: ModelInput
    corrupted: ModelInput | None
    teacher: ModelInput | None
    forwards: "AuxiliaryForwards"

    def before_policy(self) -> Passes:
        """Run the forwards that precede the policy's: of the reference, and on corrupted images.

        The latter get gradients only if their entropy is in the loss.
        """
        reference = corrupted = None
        if (model := self.forwards.reference) is not None:
            reference = reference_logprobs(model, self.policy)
        if self.corrupted is not None:
            with_gradients = self.forwards.algorithm.papo.entropy_weight > 0
            with torch.set_grad_enabled(with_gradients), span("corrupted images"):
                corrupted = self.forwards.policy(*_without_columns(self.corrupted))
        return Passes(reference, corrupted=corrupted)

    def after_policy(
        self, passes: Passes, logprobs: torch.Tensor, candidates: Candidates | None
    ) -> Passes:
        """Run the teacher's forward, and return `passes` with its logprobs.

        With `candidates`, `logprobs` are the policy's, [R, 1 + K]: of the sampled tokens, then of
        the candidates. The teacher is asked for the same tokens.
        """
        if self.teacher is None or self.forwards.teacher is None:
            return passes
        with torch.no_grad(), span("teacher"):
            teacher_logprobs, _ = self.forwards.teacher(
                *_without_columns(self.teacher), candidates=candidates
            )
        if candidates is None:
            return replace(passes, teacher=teacher_logprobs)
        return replace(
            passes,
            teacher=teacher_logprobs[:, 0],
            candidates=(logprobs[:, 1:], teacher_logprobs[:, 1:]),
        )


@torch.no_grad()
def reference_logprobs(reference: PolicyModel, model_input: ModelInput) -> torch.Tensor:
    """Return the reference's logprobs, float32 [R], without gradients.

    With LoRA the reference is the policy with its adapters off.
    """
    with span("reference"), adapters_off(reference.model):
        return reference(*_without_columns(model_input))[0]


def _without_columns(model_input: ModelInput) -> ModelInput:
    """Return the input without what the engine reported of the tokens, such as their experts.

    That is of the policy and the images that it saw; another forward chooses by itself.
    """
    batch, features = model_input
    return replace(batch, row_columns={}), features


class AuxiliaryForwards:
    """The models of the auxiliary forwards, and the makers of their inputs."""

    def __init__(
        self,
        policy: PolicyModel,
        reference: PolicyModel | None,
        teacher: PolicyModel | None,
        teacher_batches: BatchMaker | None,
        algorithm: AlgorithmConfig,
    ) -> None:
        """Store the models; `teacher_batches` makes the teacher's micro-batches.

        `reference` is None where its KL is not in the loss.
        """
        self.policy = policy
        self.reference = reference
        self.teacher = teacher
        self.algorithm = algorithm
        self._teacher_batches = teacher_batches
        self._corrupted_batches: BatchMaker | None = None  # made anew in each step

    def prepare(self, batches: BatchMaker, groups: Collection[Group], seed: int) -> None:
        """Prepare a step on these groups. Collective.

        `batches` makes the policy's micro-batches; `seed` seeds the corruption of images.
        """
        if self._teacher_batches is not None:
            self._teacher_batches.prepare(groups)
        papo = self.algorithm.papo
        if papo.weight or papo.entropy_weight:
            corrupt, pixels = Corruption(papo.kind, papo.strength), batches.pixels

            def corrupted_pixels(image: ImageRef) -> Any:
                return pixels(corrupt(image, seed))

            collate = replace(batches.collate, pixels=corrupted_pixels)
            self._corrupted_batches = BatchMaker(self.policy, collate, None, batches.max_tokens)

    def candidates(self) -> Candidates | None:
        """Return an object for the policy's likeliest tokens, which its own forward fills in.

        None if the teacher is compared on the sampled tokens only, or there is none.
        """
        k = self.algorithm.distillation.top_k
        return Candidates(k) if self.teacher is not None and k else None

    def inputs(
        self,
        batches: BatchMaker,
        mini: RankMiniBatch,
        groups: Mapping[int, Group],
        advantages: Advantages,
    ) -> Iterator[MicroBatchInputs]:
        """Yield the inputs of all forwards for each micro-batch of `mini`, in order."""
        if self._corrupted_batches is None:
            corrupted_inputs = repeat(None)
        else:
            corrupted_inputs = self._corrupted_batches(mini, groups, advantages)
        if self._teacher_batches is None:
            teacher_inputs = repeat(None)
        else:
            teacher_inputs = self._teacher_batches(mini, groups, advantages)
        policy_inputs = batches(mini, groups, advantages)
        # Not strict: an input that no forward needs is None without end.
        for policy, corrupted, teacher in zip(
            policy_inputs, corrupted_inputs, teacher_inputs, strict=False
        ):
            yield MicroBatchInputs(policy, corrupted, teacher, self)
