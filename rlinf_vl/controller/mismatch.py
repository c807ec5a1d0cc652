"""The mismatch guard: does the engine sample from the model that the trainer holds, and does it see the images?

A handful of fresh trajectories is scored by the trainer, once as they are and once with blank images. If the engine's
logprobs fit the blank ones better, the engine is blind; if they fit neither, its weights are not the trainer's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlinf_vl.controller.step_plan import item_of, trainable
from rlinf_vl.errors import RunError
from rlinf_vl.packing.planner import Item
from rlinf_vl.types import GroupSummary

#: Trajectories scored per class of image count.
PER_CLASS = 4
#: Mean |rollout - train logprob| that the arithmetic explains, in nats, by the lower precision of the two sides.
NOISE = {"fp32": 1e-3, "bf16": 0.08, "fp16": 0.04}


@dataclass(frozen=True, slots=True)
class Score:
    """One trajectory: sums over its sampled tokens of |rollout - train logprob|, as it is and with blank images."""

    images: int
    tokens: int
    difference: float
    blank_difference: float


class EngineMismatch(RunError):
    """The engine does not sample from the trainer's policy; going on would train on noise."""


def image_class(images: int) -> str:
    """The classes that are looked at apart: an engine can fail on the second image only."""
    return {0: "no_image", 1: "one_image"}.get(images, "more_images")


def pick(summaries: Sequence[GroupSummary]) -> list[Item]:
    """The trajectories to score: of each image class, one of each of the first groups that have any to give."""
    taken: dict[str, int] = {}
    items = []
    for g, summary in enumerate(summaries):
        kind = image_class(summary.images)
        usable = trainable(summary)
        if usable and taken.get(kind, 0) < PER_CLASS:
            taken[kind] = taken.get(kind, 0) + 1
            items.append(item_of(g, usable[0], summary))
    return items


def judge(scores: Sequence[Score], precision: str) -> dict[str, float]:
    """Metrics of the comparison, token means in nats: `mismatch/{no_image,one_image,more_images}`, and
    `mismatch/blank_images`, what it would be if the engine saw nothing.

    Args:
        precision: the lower one of the engine's and the trainer's compute: a key of `NOISE`.

    Raises:
        EngineMismatch: the engine is blind, has other weights, or one side's logprobs are no numbers; the message says which
            and shows the figures.
    """
    metrics = {}
    for kind in ("no_image", "one_image", "more_images"):
        chosen = [s for s in scores if image_class(s.images) == kind]
        if not chosen:
            continue
        tokens = sum(s.tokens for s in chosen)
        seen = metrics[f"mismatch/{kind}"] = sum(s.difference for s in chosen) / tokens
        blank = sum(s.blank_difference for s in chosen) / tokens
        label = kind.replace("_", " ")
        if not math.isfinite(seen):
            raise EngineMismatch(
                f"the logprobs of the engine or of the trainer are not finite on prompts with {label}: the mean difference is "
                f"{seen}. Weights or activations have overflowed: see actor/grad_norm, go back to a checkpoint with a lower "
                "actor.optim.lr, and prefer bf16 to fp16"
            )
        if kind != "no_image" and seen > NOISE[precision] and blank < seen / 2:
            raise EngineMismatch(
                f"the engine is blind: on prompts with {label} its logprobs are {blank:.3g} nats from the trainer's with "
                f"blank images, but {seen:.3g} from the trainer's with the images. Are pixels handed to the engine, and "
                "is its vision tower loaded?"
            )
        if seen > 4 * NOISE[precision]:
            raise EngineMismatch(
                f"the engine's weights are stale or not the trainer's: on prompts with {label} its logprobs are {seen:.3g} "
                f"nats from the trainer's on average, where {precision} explains {NOISE[precision]:.3g} (with blank images "
                f"{blank:.3g}). Did the last weight sync reach it, vision cache included?"
            )
    with_images = [s for s in scores if s.images]
    if with_images:
        tokens = sum(s.tokens for s in with_images)
        metrics["mismatch/blank_images"] = sum(s.blank_difference for s in with_images) / tokens
    return metrics
