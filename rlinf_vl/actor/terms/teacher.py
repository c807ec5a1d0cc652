"""Teachers, whose distribution the policy learns on what it has sampled: `algorithm.distillation`.

A teacher has an image tower of its own, which encodes each image once. Several teachers share a
micro-batch: each gets the trajectories whose row has its label, and no others.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from rlinf_vl.actor.batch_types import Advantages, RankMiniBatch
from rlinf_vl.actor.batches import BatchMaker
from rlinf_vl.actor.privileged import as_teacher_sees
from rlinf_vl.actor.terms.passes import ModelInput, Passes, Term, without_columns
from rlinf_vl.algorithms import divergence, reverse_kl
from rlinf_vl.config.schema import AlgorithmConfig
from rlinf_vl.models.policy import Candidates, PolicyModel
from rlinf_vl.models.transfer import on_device
from rlinf_vl.observe.spans import span
from rlinf_vl.types import Group, MicroBatch


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


class TeacherForwards:
    """The forwards of all teachers."""

    def __init__(self, teachers: Sequence[Teacher], algorithm: AlgorithmConfig) -> None:
        self._teachers = teachers
        self._distillation = algorithm.distillation

    @property
    def models(self) -> list[PolicyModel]:
        """The teachers' models."""
        return [teacher.model for teacher in self._teachers]

    def prepare(self, groups: Collection[Group]) -> None:
        """Encode the images of these groups that no step before had. Collective."""
        for teacher in self._teachers:
            teacher.batches.prepare([group for group in groups if self._teaches(teacher, group)])

    def candidates(self) -> Candidates | None:
        """Return an object for the policy's likeliest tokens, which its own forward fills in.

        None if teachers are compared on the sampled tokens only, or there is none.
        """
        k = self._distillation.top_k
        return Candidates(k) if self._teachers and k else None

    def inputs(
        self,
        batches: BatchMaker,
        mini: RankMiniBatch,
        groups: Mapping[int, Group],
        advantages: Advantages,
    ) -> list[Iterator[TeacherInput]]:
        """Return, for each teacher, its inputs for the micro-batches of `mini`, in order.

        `batches` makes the policy's micro-batches.
        """
        if self._distillation.privileged_template is not None and self._teachers:
            placeholder_ids = batches.collate.image_tokens.placeholder_ids
            trained = {item.group for items in mini.micro_batches for item in items}
            groups = {n: as_teacher_sees(groups[n], placeholder_ids) for n in trained}
        return [self._inputs_of(teacher, mini, groups, advantages) for teacher in self._teachers]

    def _teaches(self, teacher: Teacher, group: Group) -> bool:
        """Return whether a teacher teaches a group."""
        label = self._distillation.label_of(group.labels)
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


def with_teachers(
    passes: Passes,
    inputs: Sequence[TeacherInput],
    batch: MicroBatch,
    logprobs: torch.Tensor,
    candidates: Candidates | None,
) -> Passes:
    """Run the teachers' forwards of a micro-batch, and return `passes` with their logprobs.

    With `candidates`, `logprobs` are the policy's, [R, 1 + K]: of the sampled tokens, then of the
    candidates. The teachers are asked for the same tokens.
    """
    if not inputs:
        return passes
    teacher_logprobs = torch.zeros_like(logprobs, requires_grad=False)
    for taught in inputs:
        tokens = taught.tokens_of(batch, logprobs.device)
        chosen = candidates
        if candidates is not None and candidates.ids is not None:
            chosen = Candidates(candidates.k, candidates.ids[tokens])
        with torch.no_grad(), span("teacher"):
            teacher_logprobs[tokens], _ = taught.model(
                *without_columns(taught.model_input), candidates=chosen
            )
    if candidates is None:
        return replace(passes, teacher=teacher_logprobs)
    return replace(
        passes,
        teacher=teacher_logprobs[:, 0],
        candidates=(logprobs[:, 1:], teacher_logprobs[:, 1:]),
    )


def loss_terms(
    logprobs: torch.Tensor, entropy: torch.Tensor, passes: Passes, algorithm: AlgorithmConfig
) -> Iterator[Term]:
    """Yield the KL to the teacher of each token, in nats: over candidates, or on sampled tokens."""
    if passes.candidates is not None:
        policy_candidates, teacher_candidates = passes.candidates
        kl = reverse_kl(policy_candidates, teacher_candidates)
        yield "actor/teacher_kl", algorithm.distillation.weight, kl
    elif passes.teacher is not None:  # its KL is in the advantages already (`guided_advantages`)
        mask = torch.ones_like(logprobs, dtype=torch.bool)
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
