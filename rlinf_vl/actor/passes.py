"""Forwards beside the policy's own: of the reference, of teachers, and on corrupted images.

All take the policy's rows, packed alike, so they cost one forward each. The reference shares the
policy's image features. A teacher has a tower of its own, which encodes each image once. Several
teachers share a micro-batch: each gets the trajectories whose row has its label, and no others. Corrupted
images are new in each step, and go through the policy's tower in each micro-batch.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import numpy as np
import torch

from rlinf_vl.actor.batch_types import Advantages, RankMiniBatch
from rlinf_vl.actor.batches import BatchMaker
from rlinf_vl.actor.privileged import as_teacher_sees
from rlinf_vl.actor.terms import Passes
from rlinf_vl.config.schema import AlgorithmConfig
from rlinf_vl.data.corruption import Corruption
from rlinf_vl.models.family import VisionFeatures
from rlinf_vl.models.lora import adapters_off
from rlinf_vl.models.mixture import ExpertLoad
from rlinf_vl.models.policy import Candidates, PolicyModel
from rlinf_vl.models.transfer import on_device
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
        teachers: of each teacher.
    """

    policy: ModelInput
    corrupted: ModelInput | None
    teachers: "tuple[TeacherInput, ...]"
    forwards: "AuxiliaryForwards"

    def run(
        self, number: int, load: ExpertLoad | None, balance: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, Passes]:
        """Run all forwards of micro-batch `number`.

        Returns:
            The policy's logprobs and entropies, float32 [R], and the results of the others.
        """
        passes, candidates = self.before_policy(), self.forwards.candidates()
        with span("forward", micro_batch=number):
            logprobs, entropy = self.forwards.policy(*self.policy, load, balance, candidates)
        assert entropy is not None, "a forward with gradients gives the entropy"
        passes = self.after_policy(passes, logprobs, candidates)
        return logprobs if candidates is None else logprobs[:, 0], entropy, passes

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
        """Run the teachers' forwards, and return `passes` with their logprobs.

        With `candidates`, `logprobs` are the policy's, [R, 1 + K]: of the sampled tokens, then of
        the candidates. The teachers are asked for the same tokens.
        """
        if not self.teachers:
            return passes
        teacher_logprobs = torch.zeros_like(logprobs, requires_grad=False)
        for teacher in self.teachers:
            tokens = teacher.tokens_of(self.policy[0], logprobs.device)
            chosen = candidates
            if candidates is not None and candidates.ids is not None:
                chosen = Candidates(candidates.k, candidates.ids[tokens])
            with torch.no_grad(), span("teacher"):
                teacher_logprobs[tokens], _ = teacher.model(
                    *_without_columns(teacher.model_input), candidates=chosen
                )
        if candidates is None:
            return replace(passes, teacher=teacher_logprobs)
        return replace(
            passes,
            teacher=teacher_logprobs[:, 0],
            candidates=(logprobs[:, 1:], teacher_logprobs[:, 1:]),
        )


@dataclass(frozen=True, slots=True)
class Teacher:
    """A frozen model whose distribution the policy learns.

    Attributes:
        labels: of the rows that it teaches; none: all rows.
    """

    model: PolicyModel
    batches: BatchMaker
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TeacherInput:
    """The input of a teacher's forward: the trajectories of a micro-batch that it teaches.

    Attributes:
        places: the numbers of these trajectories in the policy's micro-batch; None: all.
    """

    model: PolicyModel
    model_input: ModelInput
    places: list[int] | None = None

    def tokens_of(self, batch: MicroBatch, device: torch.device) -> slice | torch.Tensor:
        """Return which sampled tokens of the policy's micro-batch the forward is about."""
        if self.places is None:
            return slice(None)
        return on_device(np.flatnonzero(np.isin(batch.trajectories, self.places)), device)


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
        teachers: Sequence[Teacher],
        algorithm: AlgorithmConfig,
    ) -> None:
        """Store the models.

        `reference` is None where its KL is not in the loss.
        """
        self.policy = policy
        self.reference = reference
        self.teachers = teachers
        self.algorithm = algorithm
        self._corrupted_batches: BatchMaker | None = None  # made anew in each step

    def prepare(self, batches: BatchMaker, groups: Collection[Group], seed: int) -> None:
        """Prepare a step on these groups. Collective.

        `batches` makes the policy's micro-batches; `seed` seeds the corruption of images.
        """
        for teacher in self.teachers:
            teacher.batches.prepare([group for group in groups if self._teaches(teacher, group)])
        papo = self.algorithm.papo
        if papo.weight or papo.entropy_weight:
            corrupt, pixels = Corruption(papo.kind, papo.strength), batches.pixels

            def corrupted_pixels(image: ImageRef) -> Any:
                return pixels(corrupt(image, seed))

            collate = replace(batches.collate, pixels=corrupted_pixels)
            self._corrupted_batches = BatchMaker(self.policy, collate, None, batches.max_tokens)

    def candidates(self) -> Candidates | None:
        """Return an object for the policy's likeliest tokens, which its own forward fills in.

        None if teachers are compared on the sampled tokens only, or there is none.
        """
        k = self.algorithm.distillation.top_k
        return Candidates(k) if self.teachers and k else None

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
        taught_groups = groups
        if self.algorithm.distillation.privileged_template is not None and self.teachers:
            placeholder_ids = batches.collate.image_tokens.placeholder_ids
            trained = {item.group for items in mini.micro_batches for item in items}
            taught_groups = {n: as_teacher_sees(groups[n], placeholder_ids) for n in trained}
        teacher_inputs = [
            self._inputs_of(teacher, mini, taught_groups, advantages) for teacher in self.teachers
        ]
        policy_inputs = batches(mini, groups, advantages)
        # Not strict: an input that no forward needs is None without end.
        for policy, corrupted, *taught in zip(
            policy_inputs, corrupted_inputs, *teacher_inputs, strict=False
        ):
            yield MicroBatchInputs(policy, corrupted, tuple(taught), self)

    def _teaches(self, teacher: Teacher, group: Group) -> bool:
        """Return whether a teacher teaches a group."""
        label = self.algorithm.distillation.label_of(group.labels)
        return not teacher.labels or label in teacher.labels

    def _inputs_of(
        self,
        teacher: Teacher,
        mini: RankMiniBatch,
        groups: Mapping[int, Group],
        advantages: Advantages,
    ) -> Iterator[TeacherInput]:
        """Yield a teacher's input for each micro-batch of `mini`, in order.

        Where it teaches none of a micro-batch's trajectories, the input is filler: its forward
        takes part in the collectives of all ranks.
        """
        if not teacher.labels:
            for model_input in teacher.batches(mini, groups, advantages):
                yield TeacherInput(teacher.model, model_input)
            return
        places: list[list[int]] = []
        taught_micro_batches = []
        for items in mini.micro_batches:
            taught = [
                n for n, item in enumerate(items) if self._teaches(teacher, groups[item.group])
            ]
            places.append(taught)
            taught_micro_batches.append(tuple(items[n] for n in taught))
        taught_mini = replace(mini, micro_batches=tuple(taught_micro_batches))
        model_inputs = teacher.batches(taught_mini, groups, advantages)
        for model_input, taught in zip(model_inputs, places, strict=True):
            yield TeacherInput(teacher.model, model_input, taught)
