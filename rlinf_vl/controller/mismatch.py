"""The guard against an engine that samples from another policy, or does not see the images.

The trainer scores a handful of fresh trajectories, once as they are and once with blank images. If
the engine's logprobs fit the blank ones better, the engine is blind; if they fit neither, its
weights are not the trainer's. Only trajectories are compared that were sampled from the weights
that the trainer has; where generation runs ahead, some are sampled for this check.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlinf_vl.actor.batch_types import RankMiniBatch
from rlinf_vl.config.schema import Config
from rlinf_vl.controller.protocols import Learner
from rlinf_vl.controller.run_log import RunLog
from rlinf_vl.controller.step_plan import item_of, trainable
from rlinf_vl.errors import RunError
from rlinf_vl.packing.planner import Item, plan_micro_batches
from rlinf_vl.rollout.submission import Task
from rlinf_vl.types import GroupSummary

#: Trajectories scored per image class (`image_class`).
PER_CLASS = 4
#: Mean |rollout - train logprob| that the arithmetic explains, in nats, by the lower precision of
#: engine and trainer.
NOISE = {"fp32": 1e-3, "bf16": 0.08, "fp16": 0.04}


@dataclass(frozen=True, slots=True)
class Score:
    """The score of one trajectory: sums over its sampled tokens of |rollout - train logprob| in
    nats, with its images and with blank ones."""

    images: int
    tokens: int
    difference: float
    blank_difference: float


class EngineMismatch(RunError):
    """The engine does not sample from the trainer's policy; going on would train on noise."""


class MismatchGuard:
    """The check of a process's first step, step 1 and every `runner.mismatch_check_interval` steps.
    Call `extra_tasks`, `plan`, then `check`."""

    def __init__(self, config: Config, learner: Learner, log: RunLog) -> None:
        trained = config.actor.fsdp_config.mixed_precision.param_dtype
        self._learner = learner
        self._log = log
        self._interval = (
            config.runner.mismatch_check_interval if config.rollout.return_logprobs else -1
        )
        self._budget = config.runner.max_tokens_per_mbs
        self._precision = max(trained, config.rollout.model.precision, key=NOISE.__getitem__)
        self._checked = False

    def _due(self, step: int) -> bool:
        return self._interval > 0 and (not self._checked or step % self._interval == 0)

    def extra_tasks(
        self, step: int, tasks: Sequence[Task], summaries: Sequence[GroupSummary]
    ) -> list[Task]:
        """Return tasks to sample for the check, one answer each; none if groups of this step are
        from the weights that the trainer has."""
        if not self._due(step) or pick(summaries, step - 1):
            return []
        chosen = [tasks[item.group] for item in pick(summaries)]
        # No corruption: the trainer scores the images as they are.
        return [
            replace(t, group_id=f"check-{t.group_id}", seeds=t.seeds[:1], corruption=None)
            for t in chosen
        ]

    def plan(self, step: int, summaries: Sequence[GroupSummary]) -> list[tuple[RankMiniBatch, ...]]:
        """Return the trajectories that each rank scores, as one mini-batch; none on a step without
        a check."""
        items = pick(summaries, step - 1) if self._due(step) else []
        if not items:
            return []
        plan = plan_micro_batches(
            items, ranks=self._learner.data_size, budget=self._budget, prices=self._learner.prices
        )
        return [tuple(RankMiniBatch(micro, plan.run_vision, 1) for micro in plan.micro_batches)]

    def check(
        self,
        step: int,
        summaries: Sequence[GroupSummary],
        planned: Sequence[tuple[RankMiniBatch, ...]],
    ) -> dict[str, float]:
        """Let the ranks score the `planned` mini-batches, and compare; returns the metrics. Raises
        `EngineMismatch`."""
        if not planned:
            return {}
        with self._log.timed("check"):
            rows = [row for minibatch in planned for row in self._learner.score(minibatch)]
        scores = [
            Score(summaries[g].images, n, difference, blank) for g, n, difference, blank in rows
        ]
        metrics = judge(scores, self._precision)
        self._checked = True
        # A resumed run checks once more, but its metrics must be those of a run never stopped.
        return metrics if step == 1 or step % self._interval == 0 else {}


def image_class(images: int) -> str:
    """Return the class of an image count. An engine can fail on the second image only, so each
    class is judged apart."""
    return {0: "no_image", 1: "one_image"}.get(images, "more_images")


def pick(summaries: Sequence[GroupSummary], version: int | None = None) -> list[Item]:
    """Return the trajectories to score: of each image class, one from each of the first `PER_CLASS`
    groups that have a trainable one; with `version`, only of groups sampled from these weights
    alone."""
    picked: Counter[str] = Counter()
    items = []
    for g, summary in enumerate(summaries):
        kind = image_class(summary.images)
        usable = trainable(summary)
        if version is not None and (summary.min_version, summary.max_version) != (version, version):
            continue
        if usable and picked[kind] < PER_CLASS:
            picked[kind] += 1
            items.append(item_of(g, usable[0], summary))
    return items


def judge(scores: Sequence[Score], precision: str) -> dict[str, float]:
    """Return the metrics of the comparison, token means in nats: `mismatch/CLASS`, and
    `mismatch/blank_images`, which it would be if the engine saw nothing.

    Args:
        precision: the lower one of engine and trainer, a key of `NOISE`.

    Raises:
        EngineMismatch: the engine is blind, has other weights, or logprobs are not finite; with the
            figures.
    """
    metrics = {}
    noise = NOISE[precision]
    for kind in ("no_image", "one_image", "more_images"):
        chosen = [score for score in scores if image_class(score.images) == kind]
        if not chosen:
            continue
        tokens = sum(score.tokens for score in chosen)
        difference = metrics[f"mismatch/{kind}"] = (
            sum(score.difference for score in chosen) / tokens
        )
        blank = sum(score.blank_difference for score in chosen) / tokens
        label = kind.replace("_", " ")
        if not math.isfinite(difference):
            raise EngineMismatch(
                "the logprobs of the engine or of the trainer are not finite on prompts with "
                f"{label}: the mean difference is {difference}. Weights or activations have "
                "overflowed: see actor/grad_norm, go back to a checkpoint with a lower "
                "actor.optim.lr, and prefer bf16 to fp16"
            )
        # Half as far at most: noise alone may bring the blank images a little nearer.
        if kind != "no_image" and difference > noise and blank < difference / 2:
            raise EngineMismatch(
                f"the engine is blind: on prompts with {label} its logprobs are {blank:.3g} nats "
                f"from the trainer's with blank images, but {difference:.3g} from the trainer's "
                "with the images. Are pixels handed to the engine, and is its vision tower loaded?"
            )
        if difference > 4 * noise:
            raise EngineMismatch(
                f"the engine's weights are stale or not the trainer's: on prompts with {label} its "
                f"logprobs are {difference:.3g} nats from the trainer's on average, where "
                f"{precision} explains {noise:.3g} (with blank images {blank:.3g}). Did the last "
                "weight sync reach it, vision cache included?"
            )
    if with_images := [score for score in scores if score.images]:
        tokens = sum(score.tokens for score in with_images)
        metrics["mismatch/blank_images"] = (
            sum(score.blank_difference for score in with_images) / tokens
        )
    return metrics
