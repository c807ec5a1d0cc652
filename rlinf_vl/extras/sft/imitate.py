"""Supervised training on conversations (`rlinf-vl sft`): `imitate`, and below it the parts of a
step in the order of their calls.

A step takes the next rows of the sampler's order, which readers have rendered while the step before
trained. They are planned, packed and trained on as sampled groups are, each imitated token with the
advantage 1; the loss is the mean over the tokens of the whole step. No engine is needed, but for
`data.sample_val`.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from rlinf_vl.config.schema import Config
from rlinf_vl.controller.batch import plan_of
from rlinf_vl.controller.dataset_plan import DatasetPlan
from rlinf_vl.controller.loop import RunState, count_bad_steps, interrupted, report_end
from rlinf_vl.controller.protocols import GroupStores, Learner, Pool, WeightSyncer
from rlinf_vl.controller.run_log import RunLog
from rlinf_vl.controller.saver import Saver
from rlinf_vl.controller.shared_gpu import SharedGpu
from rlinf_vl.controller.step_plan import Advantages, StepPlan
from rlinf_vl.controller.validation import Validator
from rlinf_vl.data.unusable import BadRow
from rlinf_vl.errors import RunError
from rlinf_vl.runtime.checkpoints import ACTOR_FOLDER, Folder
from rlinf_vl.runtime.stop_request import Interrupted, StopRequest
from rlinf_vl.types import GroupSummary, Reference, TrajectorySummary

logger = logging.getLogger(__name__)

Groups = list[tuple[GroupSummary, Reference]]


class Readers(GroupStores, Protocol):
    """The readers of rows, which render them: `RowReaders`, `LocalRowReader`."""

    restarts: int
    turnover: int

    def begin(self, split: str, rows: dict[str, int]) -> Any: ...
    def result(self, pending: Any) -> Sequence[tuple[GroupSummary, Reference] | BadRow]: ...
    def entries(self) -> list[dict[str, object]]: ...


class Imitator(Learner, Protocol):
    """A learner that also computes the loss of rows that it does not train on."""

    def total_loss(self, minibatch: Sequence[Any]) -> tuple[float, int]: ...


@dataclass(frozen=True, slots=True)
class Sampling:
    """The engines that sample answers to the validation rows (`data.sample_val`).

    Attributes:
        config: that of the run, with rows read as problems.
    """

    config: Config
    pool: Pool
    sync: WeightSyncer
    gpu: SharedGpu


@dataclass(frozen=True, slots=True)
class _Stores:
    """Readers and engines: each releases the groups that it has stored."""

    readers: Readers
    sampling: Sampling | None

    def release(self, summaries: Sequence[GroupSummary]) -> None:
        self.readers.release(summaries)
        if self.sampling is not None:
            self.sampling.pool.release(summaries)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that readers were given.

    Attributes:
        rows: row by name of the group that it becomes.
        pending: the call of the readers.
    """

    split: str
    rows: Mapping[str, int]
    pending: Any


def imitate(
    config: Config,
    readers: Readers,
    learner: Imitator,
    data: DatasetPlan,
    home: Folder,
    stop: StopRequest,
    *,
    log: RunLog,
    sampling: Sampling | None = None,
    start: Folder | None = None,
) -> dict[str, float]:
    """Train to the last step, from the newest checkpoint in `home` or else from `start`; returns
    the last metrics.

    Args:
        learner: started; on GPUs that it shares with engines, it is the learner's turn.
        sampling: None: validation rows have a loss and no accuracy.

    Raises:
        Interrupted: the run was asked to stop, and has written a checkpoint.
        ActorsLost: a rank died, and the learner can't go on; call again with a new one.
        RunError: the run can't go on.
    """
    runner, total = config.runner, data.total_steps
    saver = Saver(runner, home, learner, log, start)
    state = resume(saver.newest, readers, learner, data, log)
    step_of_rows = partial(begin_step, config=config, readers=readers, data=data)
    validate = partial(
        validation, state, config, readers, learner, data, log=log, sampling=sampling
    )
    stores = _Stores(readers, sampling)
    validates = bool(data.val_rows) and runner.val_check_interval > 0
    try:
        if state.step == 0 and runner.val_before_train and validates:
            stores.release(log.end_step(0, validate()))
        report_end(state.step, total, runner)
        if state.step >= total:
            return state.metrics
        batch = step_of_rows(state.step + 1)
        for step in range(state.step + 1, total + 1):
            stop.check()
            log.begin_step(step)
            with log.timed("step"):
                with log.timed("read"):
                    groups = read(batch, readers, data, log)
                rows, sampler_state = batch.rows, data.sampler.state_dict()
                # Read beside the training of this step.
                if step < total:
                    batch = step_of_rows(step + 1)
                metrics = update(step, rows, groups, config, readers, learner, data, log)
                metrics |= data.counts
                metrics["data/bad_rows"] = data.bad_rows.counts()["train"]
                metrics["actor/restarts"] = log.count("actors_restarted")
                # From here on the step is trained: a stop is to save the state behind it.
                state.step, state.sampler, state.metrics = step, sampler_state, metrics
                count_bad_steps(state, saver.newest, log)
                if validates and data.is_due(runner.val_check_interval, step):
                    metrics |= validate()
                if data.is_due(runner.save_interval, step):
                    saver.save(state.content(log.timings), last=step == total)
            saver.collect()
            stores.release(log.end_step(step, metrics | log.timings))
            log.show_workers(learner, readers)
    except Interrupted as request:
        interrupted(request, state, total, saver, stores, log, start)
        raise
    finally:
        saver.close()
    return state.metrics


def resume(
    checkpoint: Folder | None, readers: Readers, learner: Learner, data: DatasetPlan, log: RunLog
) -> RunState:
    """Put learner, sampler and log into the state of the checkpoint; None: of the start."""
    state = RunState.read(checkpoint)
    data.sampler.load_state_dict(state.sampler)
    log.open(state.step, data.total_steps, state.metrics)
    log.show_workers(learner, readers)
    if checkpoint is not None:
        learner.load(str(checkpoint / ACTOR_FOLDER), state.step)
        log.event("resumed", f"resumed from {checkpoint}", logging.INFO)
    return state


def begin_step(step: int, config: Config, readers: Readers, data: DatasetPlan) -> Batch:
    """Let the readers read the rows of a step."""
    _, numbers = data.sampler.next_rows(config.data.rollout_batch_size)
    rows = {f"train-{step}-{k}": row for k, row in enumerate(numbers)}
    return Batch("train", rows, readers.begin("train", rows))


def read(batch: Batch, readers: Readers, data: DatasetPlan, log: RunLog) -> Groups:
    """Wait for the batch's conversations. Rows that can't be read any more are recorded and left
    out.

    Raises:
        TooManyBadRows: that many are bad now.
        RunError: none of the batch can be read.
    """
    results = readers.result(batch.pending)
    groups = [result for result in results if not isinstance(result, BadRow)]
    unreadable = [result for result in results if isinstance(result, BadRow)]
    data.bad_rows.add(batch.split, unreadable, log.step)
    data.bad_rows.check()
    if not groups:
        first = unreadable[0]
        raise RunError(
            f"step {log.step}: none of {len(unreadable)} rows can be read any more; row {first.id}: "
            f"{first.reason}"
        )
    return groups


def update(
    step: int,
    rows: Mapping[str, int],
    groups: Groups,
    config: Config,
    readers: Readers,
    learner: Learner,
    data: DatasetPlan,
    log: RunLog,
) -> dict[str, float]:
    """Train on the step's conversations, record some of them, and release the others."""
    plan = fetch("train", rows, groups, config, readers, learner, data, log)
    summaries, references = map(list, zip(*groups, strict=True))
    chosen = log.recorder.choose("train", step, len(groups))
    advantages = demonstrated(summaries)
    with log.timed("train"):
        metrics, logprobs = learner.update(
            step, plan.minibatches, advantages, chosen, 0.0, lambda: None
        )
    tokens = sum(trajectory.tokens for s in summaries for trajectory in s.trajectories)
    metrics["actor/tokens_per_second"] = tokens / log.timings["time/train"]
    readers.release(
        log.recorder.record("train", step, summaries, references, chosen, advantages, logprobs)
    )
    return plan.metrics | metrics


def demonstrated(summaries: Sequence[GroupSummary]) -> Advantages:
    """Return the advantage 1 for each turn of each conversation."""
    return tuple(tuple(map(_demonstrated_turns, summary.trajectories)) for summary in summaries)


def _demonstrated_turns(trajectory: TrajectorySummary) -> tuple[float, ...]:
    return (1.0,) * trajectory.turns


def fetch(
    split: str,
    rows: Mapping[str, int],
    groups: Groups,
    config: Config,
    readers: Readers,
    learner: Learner,
    data: DatasetPlan,
    log: RunLog,
) -> StepPlan:
    """Plan which rank gets which conversation, and let the ranks fetch theirs. One that is lost
    with its reader is read again, in place.

    Raises as `read`."""
    while True:
        plan = plan_of(log.step, [summary for summary, _ in groups], config, learner)
        lost = learner.fetch_groups(plan.minibatches, [reference for _, reference in groups])
        if not lost:
            return plan
        log.event("groups_lost", f"{len(lost)} conversations died with their reader; read again")
        lost_rows = {groups[k][0].id: rows[groups[k][0].id] for k in lost}
        second = Batch(split, lost_rows, readers.begin(split, lost_rows))
        by_name = {group[0].id: group for group in groups if group[0].id not in lost_rows}
        by_name |= {group[0].id: group for group in read(second, readers, data, log)}
        groups[:] = [by_name[name] for name in rows if name in by_name]


def validation(
    state: RunState,
    config: Config,
    readers: Readers,
    learner: Imitator,
    data: DatasetPlan,
    *,
    log: RunLog,
    sampling: Sampling | None,
) -> dict[str, float]:
    """Return the loss on the validation rows, and with `sampling` the accuracy of sampled
    answers."""
    with log.timed("val_loss"):
        metrics = validation_loss(config, readers, learner, data, log)
    if sampling is None:
        # By which `runner.keep_best` chooses: the higher, the better.
        state.accuracies[state.step] = -metrics["val/loss"]
        return metrics
    validator = Validator(sampling.config, sampling.pool, data, log, state.accuracies)
    metrics |= sampling.gpu.to_engines(learner, partial(sampling.sync, state.step))
    metrics |= validator.begin(state.step)
    sampling.gpu.to_ranks(learner)
    return metrics


def validation_loss(
    config: Config, readers: Readers, learner: Imitator, data: DatasetPlan, log: RunLog
) -> dict[str, float]:
    """Return the mean loss over all imitated tokens of the validation rows."""
    total, n_tokens, size = 0.0, 0, config.data.rollout_batch_size
    for first in range(0, len(data.val_rows), size):
        numbers = data.val_rows[first : first + size]
        rows = {f"val-loss-{k}": row for k, row in enumerate(numbers, first)}
        groups = read(Batch("val", rows, readers.begin("val", rows)), readers, data, log)
        plan = fetch("val", rows, groups, config, readers, learner, data, log)
        (minibatch,) = plan.minibatches
        batch_total, batch_tokens = learner.total_loss(minibatch)
        total += batch_total
        n_tokens += batch_tokens
        readers.release([summary for summary, _ in groups])
    loss = total / max(1, n_tokens)
    logger.info("step %d: val/loss %.4f on %d tokens", log.step, loss, n_tokens)
    return {"val/loss": loss, "val/tokens": float(n_tokens)}
