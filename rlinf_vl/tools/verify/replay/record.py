"""Records a step: from a run's folder, or of groups at hand."""

from dataclasses import replace

import numpy as np
import torch

from rlinf_vl.actor.rank import step_metrics
from rlinf_vl.config.schema import Config
from rlinf_vl.controller.step_plan import StepPlan
from rlinf_vl.observe.replay_file import PlannedMiniBatch, RecordedStep
from rlinf_vl.tools.verify.replay.forced import ForcedStep
from rlinf_vl.tools.verify.replay.quantities import Quantity
from rlinf_vl.tools.verify.replay.subject import Subject
from rlinf_vl.tools.verify.replay.trained import TrainedStep, process_group, rank_minibatch
from rlinf_vl.types import Group, TokenSequence
from rlinf_vl.weights.buckets import fingerprint


def planned(plan: StepPlan) -> tuple[PlannedMiniBatch, ...]:
    """Return the mini-batches of a plan, the micro-batches of its ranks one after the other."""
    minibatches = []
    for ranks in plan.minibatches:
        micro_batches = [items for rank in ranks for items in rank.micro_batches]
        numbers = [tuple((item.group, item.index) for item in items) for items in micro_batches]
        used = tuple(items for items in numbers if items)
        minibatches.append(PlannedMiniBatch(used, ranks[0].denominator))
    return tuple(minibatches)


def recorded_logprobs(
    subject: Subject, step: RecordedStep, config: Config, dtype: torch.dtype
) -> RecordedStep:
    """Return the step with the logprobs and the fingerprints that the torch engine has with the
    subject's weights."""
    temperature = config.algorithm.sampling_params.temperature
    sent_weights = subject.weights.items()
    trace = ForcedStep(subject, step, temperature, dtype).run(sent_weights, ())
    computed = trace.get(Quantity.of("logprobs"))

    def sampled(sequence: TokenSequence, owner: tuple[int, int, int]) -> TokenSequence:
        if owner not in computed:
            return sequence
        logprobs = np.zeros(len(sequence.ids), np.float32)
        logprobs[sequence.loss_mask] = computed[owner]
        versions = np.where(sequence.loss_mask, step.version, -1).astype(np.int32)
        return replace(sequence, logprobs=logprobs, versions=versions)

    groups = []
    for g, group in enumerate(step.groups):
        trajectories = []
        for i, t in enumerate(group.trajectories):
            sequences = tuple(sampled(s, (g, i, k)) for k, s in enumerate(t.sequences))
            trajectories.append(replace(t, sequences=sequences))
        groups.append(replace(group, trajectories=tuple(trajectories)))
    weights: dict[str, int] = {}
    for name, value in trace.get(Quantity.of("engine weights")).items():
        own_dtype = torch.float32 if subject.family.stays_float32(str(name)) else dtype
        weights[str(name)] = fingerprint([torch.from_numpy(value).to(own_dtype)])
    return replace(step, groups=tuple(groups), engine_weights=weights)


def recorded_update(subject: Subject, step: RecordedStep, config: Config) -> RecordedStep:
    """Return the step with the old logprobs and the metrics that the trainer has of it."""
    with process_group():
        trained = TrainedStep(subject, step, config)
        trained.start(traced=False)
        groups: dict[int, Group] = dict(enumerate(step.groups))
        minibatches = [rank_minibatch(mini, step) for mini in step.minibatches]
        sums, logprobs = trained.trainer.update(
            groups, minibatches, step.advantages, recorded=groups, version=step.version
        )
    by_number = {(g, i): x for g, rows in logprobs.items() for i, x in rows.items()}
    return replace(step, train_logprobs=by_number, metrics=step_metrics([sums.state()]))
