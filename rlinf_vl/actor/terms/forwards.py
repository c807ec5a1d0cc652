"""The forwards of a micro-batch: the policy's own, and those of the terms, in their order.

All take the policy's rows, packed alike, so they cost one forward each.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from rlinf_vl.actor.batch_types import Advantages, RankMiniBatch
from rlinf_vl.actor.batches import BatchMaker
from rlinf_vl.actor.terms.papo import CorruptedForward
from rlinf_vl.actor.terms.passes import ModelInput, Passes
from rlinf_vl.actor.terms.reference import reference_logprobs
from rlinf_vl.actor.terms.teacher import Teacher, TeacherForwards, TeacherInput, with_teachers
from rlinf_vl.config.schema import AlgorithmConfig
from rlinf_vl.models.mixture import ExpertLoad
from rlinf_vl.models.policy import PolicyModel
from rlinf_vl.observe.spans import span
from rlinf_vl.types import Group


@dataclass(frozen=True, slots=True)
class MicroBatchInputs:
    """The inputs of one micro-batch's forwards.

    Attributes:
        policy: of the policy and the reference.
        corrupted: of the policy on corrupted images; None without PAPO.
        teachers: of each teacher.
    """

    policy: ModelInput
    corrupted: ModelInput | None
    teachers: tuple[TeacherInput, ...]


class Forwards:
    """The policy's forward, and those of the terms."""

    def __init__(
        self,
        policy: PolicyModel,
        reference: PolicyModel | None,
        teachers: Sequence[Teacher],
        algorithm: AlgorithmConfig,
    ) -> None:
        """Store the models; `reference` is None where its KL is not in the loss."""
        self._policy, self._reference = policy, reference
        self._corrupted = CorruptedForward(policy, algorithm)
        self.teachers = TeacherForwards(teachers, algorithm)

    def prepare(self, batches: BatchMaker, groups: Collection[Group], seed: int) -> None:
        """Prepare a step on these groups. Collective.

        `batches` makes the policy's micro-batches; `seed` seeds the corruption of images.
        """
        self.teachers.prepare(groups)
        self._corrupted.prepare(batches, seed)

    def inputs(
        self,
        batches: BatchMaker,
        mini: RankMiniBatch,
        groups: Mapping[int, Group],
        advantages: Advantages,
    ) -> Iterator[MicroBatchInputs]:
        """Yield the inputs of all forwards for each micro-batch of `mini`, in order."""
        corrupted_inputs = self._corrupted.inputs(mini, groups, advantages)
        teacher_inputs = self.teachers.inputs(batches, mini, groups, advantages)
        policy_inputs = batches(mini, groups, advantages)
        # Not strict: an input that no forward needs is None without end.
        for policy, corrupted, *taught in zip(
            policy_inputs, corrupted_inputs, *teacher_inputs, strict=False
        ):
            yield MicroBatchInputs(policy, corrupted, tuple(taught))

    def run(
        self,
        inputs: MicroBatchInputs,
        number: int,
        load: ExpertLoad | None,
        balance: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, Passes]:
        """Run all forwards of micro-batch `number`.

        Returns:
            The policy's logprobs and entropies, float32 [R], and the results of the others.
        """
        reference = corrupted = None
        if self._reference is not None:
            reference = reference_logprobs(self._reference, inputs.policy)
        if inputs.corrupted is not None:
            corrupted = self._corrupted(inputs.corrupted)
        candidates = self.teachers.candidates()
        with span("forward", micro_batch=number):
            logprobs, entropy = self._policy(*inputs.policy, load, balance, candidates)
        assert entropy is not None, "a forward with gradients gives the entropy"
        passes = Passes(reference, corrupted=corrupted)
        passes = with_teachers(passes, inputs.teachers, inputs.policy[0], logprobs, candidates)
        return logprobs if candidates is None else logprobs[:, 0], entropy, passes
