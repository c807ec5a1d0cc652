"""The batch of a step: groups that were generated for it, checked, planned, and fetched by the
ranks that train on them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rlinf_vl.actor.batch_types import RankMiniBatch
from rlinf_vl.algorithms.estimators import Estimator
from rlinf_vl.config.schema import Config
from rlinf_vl.config.schema.algorithm import ADVANTAGES
from rlinf_vl.controller.dataset_plan import DatasetPlan
from rlinf_vl.controller.mismatch import MismatchGuard
from rlinf_vl.controller.protocols import Learner, Pool
from rlinf_vl.controller.run_log import RunLog
from rlinf_vl.controller.scheduler import RolloutScheduler
from rlinf_vl.controller.step_plan import StepPlan, plan_step
from rlinf_vl.data.bad_rows import check_faults, no_verdicts
from rlinf_vl.errors import RunError
from rlinf_vl.observe.metrics import summarize_rollout
from rlinf_vl.observe.sets import train_set_metrics
from rlinf_vl.types import GroupSummary, Reference
from rlinf_vl.user_code import is_code, load_code


@dataclass(frozen=True, slots=True)
class Rollout:
    """The finished groups of a step, and the plan of which rank trains and scores what.

    Attributes:
        scored: summaries, and after them those of the groups that were sampled for the mismatch
            guard.
        to_score: the mismatch guard's mini-batch, if it checks this step.
        generated: summaries, and after them those of the groups that were dropped.
        ledger: the step's line of `ledger.jsonl`.
    """

    summaries: list[GroupSummary]
    groups: list[Reference]
    plan: StepPlan
    scored: list[GroupSummary]
    to_score: list[tuple[RankMiniBatch, ...]]
    metrics: dict[str, float]
    generated: list[GroupSummary]
    ledger: dict[str, list]


def rollout(
    step: int,
    scheduler: RolloutScheduler,
    config: Config,
    pool: Pool,
    learner: Learner,
    guard: MismatchGuard,
    log: RunLog,
) -> Rollout:
    """Wait for the step's groups, plan, and let the ranks fetch them. A fetched group outlives its
    worker; one that is lost before that is sampled again."""
    with log.timed("generate"):
        selection = scheduler.select_groups(step)
        dropped = [result.summary for _, result in selection.dropped]
        tasks, results = map(list, zip(*selection.selected, strict=True))
        n_trained = len(tasks)
        # With older weights in the engines there is nothing that the guard could compare.
        if scheduler.buffer.engine_version == step - 1:
            tasks += guard.extra_tasks(step, tasks, [summary for summary, _ in results])
        results += pool.submit(tasks[n_trained:]).results() if tasks[n_trained:] else []
        while True:
            scored, groups = map(list, zip(*results, strict=True))
            summaries = scored[:n_trained]
            generated = summaries + dropped
            check_errors(generated, log, config.reward.max_ungradable)
            plan = plan_of(step, summaries, config, learner)
            to_score = guard.plan(step, scored)
            lost = learner.fetch_groups([*plan.minibatches, *to_score], groups)
            if not lost:
                break
            log.event("groups_lost", f"{len(lost)} groups died with their worker; sampled again")
            # Else the submission that the lost groups belong to would sample them again, too.
            pool.cancel([tasks[k].group_id for k in lost])
            for k, result in zip(
                lost, pool.submit([tasks[k] for k in lost]).results(), strict=True
            ):
                results[k] = result
    # The ranks have fetched these groups: if a worker dies now, they are not to be sampled again.
    pool.acknowledge([summary.id for summary in summaries])
    pool.release(dropped + scored[n_trained:])
    # Where generation runs ahead, the time waited for it is not the time that it took.
    seconds = selection.seconds or log.timings["time/generate"]
    metrics = selection.metrics | plan.metrics | summarize_rollout(generated, seconds)
    metrics |= train_set_metrics(generated, config.data.val_group_by)
    return Rollout(
        summaries, groups[:n_trained], plan, scored, to_score, metrics, generated, selection.ledger
    )


def plan_of(
    step: int, summaries: Sequence[GroupSummary], config: Config, learner: Learner
) -> StepPlan:
    runner = config.runner
    return plan_step(
        summaries,
        config.algorithm,
        # Of the step alone, so that a resumed run shuffles as if it had never stopped.
        shuffle_key=f"minibatches {runner.seed} {step}",
        ranks=learner.data_size,
        budget=runner.max_tokens_per_mbs,
        micro_batch_size=None
        if runner.enable_dynamic_batch_size
        else config.actor.micro_batch_size,
        prices=learner.prices,
        estimator=estimator_of(config),
        reward_weights=config.reward.weights,
        step=step,
    )


def estimator_of(config: Config) -> Estimator | None:
    """Return the user's code that `algorithm.adv_type` names; None if it names a built-in."""
    name = config.algorithm.adv_type
    if not is_code(name):
        return None
    return load_code(
        name, {}, config.runner.code_files, kind=ADVANTAGES.kind, signature=ADVANTAGES.signature
    )


def check_errors(
    summaries: Sequence[GroupSummary], log: RunLog, max_ungradable: float = 1.0
) -> None:
    """Record the trajectories that failed by no fault of their rows.

    Args:
        max_ungradable: largest share of answers without a verdict; the default is a validation's,
            which counts them as wrong.

    Raises:
        RunError: most of a rollout failed so, every trajectory failed, or too many answers have no
            verdict.
    """
    if line := no_verdicts(summaries, max_ungradable):
        log.event("no_verdict", line)
    if faults := check_faults(summaries):
        log.event("trajectories_failed", faults)
    if not any(summary.valid for summary in summaries):
        errors = Counter(trajectory.error for s in summaries for trajectory in s.trajectories)
        [(reason, count)] = errors.most_common(1)
        raise RunError(
            f"step {log.step}: every trajectory failed, {count} of {errors.total()} with: {reason}"
        )


def count_bad_rows(
    split: str, summaries: Sequence[GroupSummary], data: DatasetPlan, step: int
) -> int:
    """Record the rows that failed, and return how many of the split have failed so far; raises
    `TooManyBadRows`."""
    data.bad_rows.add_failed(split, summaries, step)
    data.bad_rows.check()
    return data.bad_rows.counts()[split]
