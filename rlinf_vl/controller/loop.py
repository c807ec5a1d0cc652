"""The GRPO loop (Shao et al. 2024): `train`, and below it the parts of a step in the order of their
calls.

The loop sees numbers (`GroupSummary`) and references, never a pixel or a token: groups travel from
the rollout workers to the actor ranks through the object store, and weights travel back.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Self

from rlinf_vl.actor.rank import group_numbers
from rlinf_vl.config.schema import Config, RunnerConfig
from rlinf_vl.controller.batch import Rollout, count_bad_rows, estimator_of, rollout
from rlinf_vl.controller.dataset_plan import DatasetPlan
from rlinf_vl.controller.mismatch import EngineMismatch, MismatchGuard
from rlinf_vl.controller.protocols import GroupStores, Learner, Pool, WeightSyncer
from rlinf_vl.controller.run_log import RunLog
from rlinf_vl.controller.saver import Saver
from rlinf_vl.controller.scheduler import RolloutScheduler
from rlinf_vl.controller.schedules import SCHEDULES
from rlinf_vl.controller.shared_gpu import SharedGpu
from rlinf_vl.controller.step_plan import with_kl
from rlinf_vl.controller.validation import Validator
from rlinf_vl.errors import RunError
from rlinf_vl.runtime.checkpoints import ACTOR_FOLDER, Folder, load_state
from rlinf_vl.runtime.stop_request import Interrupted, StopRequest

logger = logging.getLogger(__name__)
#: Steps in a row without a finite gradient after which a run stops.
MAX_BAD_STEPS = 3


class TooManyBadSteps(RunError):
    """The gradient was not finite in `MAX_BAD_STEPS` steps in a row."""


@dataclass(slots=True)
class RunState:
    """The state of a run after `step`, the last one done. A checkpoint has it in `controller.json`.

    Attributes:
        sampler: position of the `EpochSampler`.
        open: groups that were requested and are not trained, each the fields of an `OpenGroup`.
        accuracies: by step, the metric of its validation that `runner.best_metric` names.
        first_shares: by kind, of the first validation with that vision control (`seeing.gains`).
        validating: the step's validation has not ended.
        bad_steps: steps in a row up to this one whose gradient was not finite.
        metrics: those of this step. A checkpoint is written before its step is logged, and a crash
            may come between the two.
    """

    step: int = 0
    sampler: dict[str, Any] = field(default_factory=lambda: {"epoch": 0, "rows": 0})
    open: Sequence[Sequence[int]] = ()
    accuracies: dict[int, float] = field(default_factory=dict)
    first_shares: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    validating: bool = False
    bad_steps: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, checkpoint: Folder | None) -> Self:
        """Return the state in a checkpoint; None: that of a run that has not begun."""
        if checkpoint is None:
            return cls()
        state = cls(
            **{
                name: value
                for name, value in load_state(checkpoint).items()
                if name in cls.__slots__
            }
        )
        # JSON's keys are strings.
        return replace(
            state,
            accuracies={int(step): x for step, x in state.accuracies.items()},
            first_shares={
                kind: {int(row): shares for row, shares in by_row.items()}
                for kind, by_row in state.first_shares.items()
            },
        )

    def advance(
        self, step: int, metrics: dict[str, float], data: DatasetPlan, scheduler: RolloutScheduler
    ) -> None:
        """Note that a step was trained: a stop is to save the state behind it from now on."""
        self.step = step
        self.open = scheduler.buffer.open_groups()
        self.sampler = data.sampler.state_dict()
        self.metrics = metrics

    def content(self, timings: dict[str, float]) -> dict[str, Any]:
        """Return the content of `controller.json`, with the step's seconds so far among the
        metrics."""
        return asdict(replace(self, metrics=self.metrics | timings))


def train(
    config: Config,
    pool: Pool,
    learner: Learner,
    data: DatasetPlan,
    home: Folder,
    stop: StopRequest,
    *,
    gpu: SharedGpu,
    sync: WeightSyncer,
    log: RunLog,
    start: Folder | None = None,
) -> dict[str, float]:
    """Train to the last step, from the newest checkpoint in `home` or else from `start`; returns
    the last metrics.

    Args:
        pool, learner: started; on GPUs that they share, it is the learner's turn.
        sync: sends the learner's weights to all engines, as the version of the step that made them.
        start: a checkpoint of another run; None: begin with the learner's weights.

    Raises:
        Interrupted: the run was asked to stop, and has written a checkpoint.
        ActorsLost: a rank died, and the learner can't go on; call again with a new one.
        RunError: the run can't go on: `TooManyBadSteps`, `EngineMismatch`, `TooManyBadRows`, …
    """
    runner, total = config.runner, data.total_steps
    # `timed` is a context manager of contextlib, and so a decorator, too.
    scheduler = SCHEDULES[runner.schedule](config, pool, data, log, log.timed("sync")(sync))
    saver = Saver(runner, home, learner, log, start)
    state = resume(config, saver.newest, pool, learner, data, gpu, scheduler, log)
    guard = MismatchGuard(config, learner, log)
    validator = Validator(config, pool, data, log, state.accuracies, state.first_shares)
    try:
        validate_start(state, validator, runner)
        report_end(state.step, total, runner)
        for step in range(state.step + 1, total + 1):
            stop.check()
            log.begin_step(step)
            with log.timed("step"):
                batch = rollout(step, scheduler, config, pool, learner, guard, log)
                metrics = batch_metrics(step, batch, data, pool, log)
                # The guard scores on the ranks, which need the GPU for it.
                gpu.to_ranks(learner)
                log.recorder.keep_weights(step, learner.replay_weights)
                metrics |= check_engines(step, batch, guard, pool, log)
                # Engines get the weights that a validation is about, whatever the interval says.
                synced = data.is_due(runner.weight_sync_interval, step) or validator.is_due(step)
                waits = sync_waits(gpu, validator, scheduler)
                on_start = partial(sync.begin, step) if synced and not waits else lambda: None
                metrics |= update(step, batch, config, pool, learner, log, on_start)
                state.advance(step, metrics, data, scheduler)
                log.ledger.append(step, batch.ledger)
                count_bad_steps(state, saver.newest, log)
                # The validation must end before engines get other weights.
                validator.finish()
                send = partial(scheduler.sync, step) if synced else None
                metrics |= gpu.to_engines(learner, send)
                if validator.is_due(step):
                    metrics |= validator.begin(step)
                state.validating = validator.running
                if data.is_due(runner.save_interval, step):
                    saver.save(state.content(log.timings), last=step == total)
            saver.collect()
            validator.end_step(step, metrics | log.timings)
            log.show_workers(learner, pool)
    except Interrupted as request:
        validator.give_up()
        state.validating = False
        interrupted(request, state, total, saver, pool, log, start)
        raise
    finally:
        validator.close()
        scheduler.buffer.close()
        saver.close()
    return state.metrics


def validate_start(state: RunState, validator: Validator, runner: RunnerConfig) -> None:
    """Validate before the first step, if that is asked for, or a validation was cut off."""
    if state.validating or (state.step == 0 and runner.val_before_train):
        state.metrics |= validator.begin(state.step)
        validator.end_step(state.step, state.metrics)


def report_end(step: int, total: int, runner: RunnerConfig) -> None:
    """Log that no step is left, if so, and the key that would give more."""
    if step >= total:
        key = "max_steps" if total == runner.max_steps else "max_epochs"
        logger.info("nothing left: step %d of %d; raise runner.%s", step, total, key)


def batch_metrics(
    step: int, batch: Rollout, data: DatasetPlan, pool: Pool, log: RunLog
) -> dict[str, float]:
    """Return the metrics of a step's groups, of their rows and of the actors so far."""
    metrics = {"data/bad_rows": count_bad_rows("train", batch.generated, data, step)}
    return (
        metrics
        | batch.metrics
        | data.counts
        | {
            "rollout/workers": len(pool.workers),
            "rollout/worker_restarts": pool.restarts,
            "actor/restarts": log.count("actors_restarted"),
        }
    )


def check_engines(
    step: int, batch: Rollout, guard: MismatchGuard, pool: Pool, log: RunLog
) -> dict[str, float]:
    """Compare the engines' logprobs with the ranks'; record the step if they are too far apart."""
    try:
        return guard.check(step, batch.scored, batch.to_score)
    except EngineMismatch as error:
        record_failure(step, batch, pool, log, error)
        raise


def record_failure(
    step: int, batch: Rollout, pool: Pool, log: RunLog, error: EngineMismatch
) -> None:
    """Record the groups that the mismatch guard has scored, and release the step's groups."""
    scored = set(group_numbers(mini for minis in batch.to_score for mini in minis))
    advantages = batch.plan.advantages
    pool.release(log.record_failure(step, batch.summaries, batch.groups, advantages, scored, error))


def interrupted(
    request: Interrupted,
    state: RunState,
    total: int,
    saver: Saver,
    pool: GroupStores,
    log: RunLog,
    start: Folder | None,
) -> None:
    """Log the last step unless that is done, write a checkpoint, and report how to resume."""
    log.step = state.step
    if state.step and log.last_step != state.step:
        pool.release(log.end_step(state.step, state.metrics | log.timings))
    saver.collect(wait=True)
    if state.step != RunState.read(saver.newest).step:
        saver.save(state.content(log.timings), last=state.step == total)
        saver.collect(wait=True)
    # A checkpoint of another run is not in this run's folder, where `auto` looks.
    resume_dir = "auto" if saver.newest != start else start
    hint = (
        f"resume from {saver.newest} with runner.resume_dir={resume_dir}"
        if saver.newest
        else "nothing was trained yet"
    )
    log.event("interrupted", f"{request}; {hint}")


def resume(
    config: Config,
    checkpoint: Folder | None,
    pool: Pool,
    learner: Learner,
    data: DatasetPlan,
    gpu: SharedGpu,
    scheduler: RolloutScheduler,
    log: RunLog,
) -> RunState:
    """Put learner, sampler, log and engines into the state of the checkpoint; None: of the
    start."""
    state = RunState.read(checkpoint)
    data.sampler.load_state_dict(state.sampler)
    log.open(state.step, data.total_steps, {} if state.validating else state.metrics)
    # A step's line is logged when its validation has ended: with a line there is none to repeat.
    state.validating &= log.last_step != state.step
    log.show_workers(learner, pool)
    if checkpoint is not None:
        learner.load(str(checkpoint / ACTOR_FOLDER), state.step)
        log.event("resumed", f"resumed from {checkpoint}", logging.INFO)
    quantized = config.actor.model.is_lora and config.actor.model.lora.quantization != "none"
    # Engines start with the weights of step 0, as the model's files have them; a quantized policy
    # computes with others. They may have lost them while the ranks started.
    stale = state.step > 0 or log.count("actors_restarted") > 0 or quantized or gpu.loses_weights
    gpu.to_engines(learner, partial(scheduler.sync, state.step) if stale else None)
    scheduler.resume(state.step, state.open)
    return state


def update(
    step: int,
    batch: Rollout,
    config: Config,
    pool: GroupStores,
    learner: Learner,
    log: RunLog,
    on_start: Callable[[], None],
) -> dict[str, float]:
    """Train on the batch, record some of its groups, and release the others. `on_start` is called
    when the ranks have been told to train."""
    plan, metrics = batch.plan, dict[str, float]()
    chosen = log.recorder.choose("train", step, len(batch.groups))
    with log.timed("train"):
        if config.algorithm.kl_placement == "reward":
            kl = learner.reference_kl(plan.minibatches)
            plan = with_kl(plan, batch.summaries, config.algorithm, kl, estimator_of(config), step)
            metrics |= plan.metrics
        update_metrics, logprobs = learner.update(
            step, plan.minibatches, plan.advantages, chosen, plan.kl_scale, on_start
        )
    metrics |= update_metrics
    metrics["actor/tokens_per_second"] = (
        sum(t.tokens for s in batch.summaries for t in s.trajectories) / log.timings["time/train"]
    )
    pool.release(
        log.recorder.record(
            "train", step, batch.summaries, batch.groups, chosen, plan.advantages, logprobs
        )
    )
    return metrics


def sync_waits(gpu: SharedGpu, validator: Validator, scheduler: RolloutScheduler) -> bool:
    """Return whether a sync must not be queued behind the update that makes its weights.

    It waits for the GPU, for the validation of other weights, or for groups that must be from one
    version.
    """
    return gpu.shared or validator.running or scheduler.waits_before_sync


def count_bad_steps(state: RunState, checkpoint: Folder | None, log: RunLog) -> None:
    """Count the steps in a row whose gradient was not finite (their optimizer steps were skipped);
    raises `TooManyBadSteps`."""
    if not state.metrics.get("actor/skipped_steps"):
        state.bad_steps = 0
        return
    state.bad_steps += 1
    log.event("step_skipped", "the gradient is not finite; its optimizer step was skipped")
    if state.bad_steps >= MAX_BAD_STEPS:
        raise TooManyBadSteps(
            f"{state.bad_steps} steps in a row had a gradient that is not finite; "
            f"the last good checkpoint is {checkpoint or 'none'}. Resume "
            "from it with a lower actor.optim.lr or actor.optim.clip_grad"
        )
