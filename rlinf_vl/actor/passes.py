"""The passes over a micro-batch beside the policy's own: by the reference, by a teacher, and by the policy on corrupted images.

All see the rows that the policy sees, packed alike, so they cost one forward each. The reference shares the policy's image
features; a teacher has a tower of its own, which encodes each image once; corrupted images are new in each step, and go through the
tower in each micro-batch.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import torch

from rlinf_vl.actor.batches import BatchMaker
from rlinf_vl.actor.messages import Advantages, RankMiniBatch
from rlinf_vl.actor.terms import Passes
from rlinf_vl.config.schema import AlgorithmConfig
from rlinf_vl.data.corruption import Corruption
from rlinf_vl.models.families import VisionFeatures
from rlinf_vl.models.lora import adapters_off
from rlinf_vl.models.policy import Candidates, PolicyModel
from rlinf_vl.observe.spans import span
from rlinf_vl.types import Group, ImageRef, MicroBatch

#: A micro-batch, and the features of its images if they are not to be made of its pixels.
Fed = tuple[MicroBatch, VisionFeatures | None]


@dataclass(slots=True)
class View:
    """One micro-batch on its way through all passes: `before` the policy's own, `after` it."""

    own: Fed
    corrupted: Fed | None
    lesson: Fed | None
    further: "FurtherPasses"

    def before(self) -> Passes:
        """By the reference, and by the policy on corrupted images: with gradients only if their entropy is in the loss."""
        reference = corrupted = None
        if (model := self.further.reference) is not None:
            reference = reference_logprobs(model, self.own)
        if self.corrupted is not None:
            graded = self.further.algorithm.papo.entropy_weight > 0
            with torch.set_grad_enabled(graded), span("corrupted images"):
                corrupted = self.further.policy(*_routed_anew(self.corrupted))
        return Passes(reference, corrupted=corrupted)

    def after(self, passes: Passes, logprobs: torch.Tensor, candidates: Candidates | None) -> Passes:
        """By the teacher too, of the policy's candidates as well, whose logprobs stand in `logprobs` [R, 1 + K]."""
        if self.lesson is None or self.further.teacher is None:
            return passes
        with torch.no_grad(), span("teacher"):
            taught, _ = self.further.teacher(*_routed_anew(self.lesson), candidates=candidates)
        if candidates is None:
            return replace(passes, teacher=taught)
        return replace(passes, teacher=taught[:, 0], candidates=(logprobs[:, 1:], taught[:, 1:]))


@torch.no_grad()
def reference_logprobs(reference: PolicyModel, fed: Fed) -> torch.Tensor:
    """float32 [R], of a model that may be the policy, whose adapters are then off."""
    with span("reference"), adapters_off(reference.model):
        return reference(*_routed_anew(fed))[0]


def _routed_anew(fed: Fed) -> Fed:
    """Another model, or another image: it chooses its experts by itself."""
    batch, features = fed
    return replace(batch, routes=None), features


class FurtherPasses:
    def __init__(
        self,
        policy: PolicyModel,
        reference: PolicyModel | None,
        teacher: PolicyModel | None,
        lessons: BatchMaker | None,
        algorithm: AlgorithmConfig,
    ) -> None:
        """`reference`: whose KL is in the loss. `lessons` makes the teacher's micro-batches."""
        self.policy = policy
        self.reference = reference
        self.teacher = teacher
        self.algorithm = algorithm
        self._lessons = lessons
        self._corrupted: BatchMaker | None = None  # of the step

    def prepare(self, batches: BatchMaker, groups: Collection[Group], seed: int) -> None:
        """Begin a step on these groups: `batches` makes the policy's micro-batches, `seed` draws what corrupts. Collective."""
        if self._lessons is not None:
            self._lessons.prepare(groups)
        papo = self.algorithm.papo
        if papo.weight or papo.entropy_weight:
            corrupt, pixels = Corruption(papo.kind, papo.strength), batches.pixels

            def corrupted(image: ImageRef) -> Any:
                return pixels(corrupt(image, seed))

            collate = replace(batches.collate, pixels=corrupted)
            self._corrupted = BatchMaker(self.policy, collate, None, batches.max_patches)

    def candidates(self) -> Candidates | None:
        """Room for the tokens that the policy's own pass names for the teacher; None: the sampled ones do."""
        k = self.algorithm.distillation.top_k
        return Candidates(k) if self.teacher is not None and k else None

    def over(
        self, batches: BatchMaker, mini: RankMiniBatch, groups: Mapping[int, Group], advantages: Advantages
    ) -> Iterator[View]:
        """The micro-batches of `mini`, in order, as every pass is fed them."""
        fed = (maker and maker(mini, groups, advantages) for maker in (self._corrupted, self._lessons))
        others = (repeat(None) if one is None else one for one in fed)
        for own, corrupted, lesson in zip(batches(mini, groups, advantages), *others, strict=False):
            yield View(own, corrupted, lesson, self)
