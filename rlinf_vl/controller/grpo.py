"""GRPO (Shao et al. 2024) for vision-language models: the whole loop.

The controller sees numbers (`GroupSummary`) and references, never a pixel or a token: groups go from the rollout workers
to the actor ranks through the object store, and so do weights on their way back.
"""

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import ray

from rlinf_vl.actor.batches import RankMiniBatch
from rlinf_vl.actor.group import ActorGroup, ActorsLost
from rlinf_vl.config.schema import Config
from rlinf_vl.controller.mismatch import NOISE, Score, judge, pick
from rlinf_vl.controller.recorder import TrajectoryLog
from rlinf_vl.controller.shared_gpu import SharedGpu
from rlinf_vl.controller.step_plan import StepPlan, plan_step
from rlinf_vl.controller.weight_sync import WeightSync
from rlinf_vl.data.bad_rows import BadRows, check_faults
from rlinf_vl.data.sampler import EpochSampler
from rlinf_vl.errors import ConfigError, RunError
from rlinf_vl.models.families import family_of
from rlinf_vl.observe.lines import EventLog, StepLines
from rlinf_vl.observe.metrics import summarize_rollout
from rlinf_vl.observe.progress import RunProgress
from rlinf_vl.observe.spans import span
from rlinf_vl.observe.tracker import make_trackers
from rlinf_vl.packing.planner import plan_micro_batches
from rlinf_vl.rollout.pool import RolloutPool
from rlinf_vl.rollout.worker import Task
from rlinf_vl.runtime.launch import Reservation
from rlinf_vl.runtime.run_folder import (
    ACTOR_FOLDER,
    CheckpointFailed,
    load_state,
    save_checkpoint,
    write_baselines,
)
from rlinf_vl.runtime.stop_request import Interrupted, StopRequest
from rlinf_vl.transport import resolve_weight_sync
from rlinf_vl.types import GroupSummary

log = logging.getLogger(__name__)


class TooManyRestarts(RunError):
    """Actor ranks keep dying."""


class TooManyBadSteps(RunError):
    """The gradient stays not finite."""


class GrpoController:
    """Keeps rollout workers and actor ranks in step. Build it, `fit`, `stop`."""

    def __init__(
        self,
        config: Config,
        model_path: str,
        placement: Reservation,
        run_dir: Path,
        progress: RunProgress,
        stop_request: StopRequest | None = None,
        checkpoint: Path | None = None,
    ) -> None:
        """`run_dir` holds this run's history only, up to the step of the `checkpoint` that it starts from or beyond."""
        self.config, self.model_path, self.placement = config, model_path, placement
        self.run_dir, self.progress = run_dir, progress
        self.stop_request = stop_request or StopRequest()
        self.step = 0  # the last one done
        self.current_step = 0  # the one that what happens now belongs to: while it is trained, the next one
        self.saved_step = 0  # that of the last checkpoint written or read
        self.metrics, self.timings, self.checked = {}, {}, False
        self.events = EventLog(run_dir)
        self.last_good = checkpoint
        progress.phase("starting rollout workers and actor ranks")
        self.pool = RolloutPool(
            config,
            model_path,
            placement.device,
            placement.rollout,
            report=lambda message: self.events.add(self.current_step, "worker_replaced", message),
            check=self.stop_request.check,
        )
        self.actors = ActorGroup(config, model_path, placement.device, placement.actor)
        self.trajectories = TrajectoryLog(
            config,
            run_dir,
            model_path,
            family_of(config.rollout.model.model_type).image_token,
            release=self.pool.release,
            report=lambda message: self.events.add(self.current_step, "recording_ended", message),
        )
        self._prepare_data(rows=self.pool.start())
        self.gpu = SharedGpu(self.pool, shared=placement.collocated, offload=config.actor.enable_offload)
        self._start_actors()
        self._resume()
        progress.begin(self.total_steps, self.step)

    # --- the loop -----------------------------------------------------------------------------------------------------

    def fit(self) -> dict[str, float]:
        """Train to the last step, whatever dies on the way; returns the last step's metrics.

        Raises:
            Interrupted: the run was asked to stop, and has written a checkpoint.
            TooManyRestarts, TooManyBadSteps, EngineMismatch, …: it can't go on.
        """
        self.stop_request.graceful, lost = True, None
        while True:
            try:
                if lost is not None:
                    self._restart_actors(lost)
                return self.train()
            except ActorsLost as error:
                lost = error
            except Interrupted as stop:
                self._stop_early(stop)
                raise

    def train(self) -> dict[str, float]:
        """Step after step, from where the run stands."""
        if self.step == 0:
            self.metrics, self.timings = self.validate(), {}
            if self.metrics:
                self.trajectories.end_step(0)
                self.trackers.log(0, self.metrics)
        if self.step >= self.total_steps:
            key = "max_steps" if self.total_steps == self.config.runner.max_steps else "max_epochs"
            log.info("nothing left: step %d of %d; raise runner.%s", self.step, self.total_steps, key)
        while self.step < self.total_steps:
            self.stop_request.check()
            self.current_step, self.metrics, self.timings = self.step + 1, {}, {}
            with self.timed("step"):
                self.train_step()
                if self.due(self.config.runner.val_check_interval):
                    self.metrics |= self.validate()
                if self.due(self.config.runner.save_interval):
                    self.save()
            self.log_step()
        return self.metrics

    def train_step(self) -> None:
        """One rollout, its optimizer steps, and the new weights on their way. The step counts once the weights are new."""
        epoch, rows = self.sampler.next_batch()
        tasks = self.tasks("train", rows, self.config.algorithm.group_size, self.current_step)
        summaries, groups, plan, guard = self.rollout(tasks)
        recorded = self.trajectories.choose("train", self.current_step, len(groups))
        self._count_bad("train", summaries)
        self.metrics |= {"data/epoch": epoch, "rollout/worker_restarts": self.pool.restarts}
        self.metrics |= {"actor/restarts": self.events.count("actors_restarted")} | plan.metrics
        self.metrics |= summarize_rollout(summaries, self.timings["time/generate"])
        self.gpu.to_ranks(self.actors)
        self.check_engine(summaries, guard)
        with self.timed("train"):
            self.metrics |= self.actors.update(self.current_step, plan.minibatches, plan.advantages, recorded)
        self.step = self.current_step
        self.record("train", summaries, groups, recorded, plan)
        self.position = {"step": self.step, "sampler": self.sampler.state_dict()}
        self.ledger.append(self.step, {"groups": [task.group_id for task in tasks], "rows": rows})
        self.metrics["actor/tokens_per_second"] = sum(sum(s.tokens) for s in summaries) / self.timings["time/train"]
        self.count_bad_steps()
        self.gpu.to_engines(
            self.actors, self.sync_weights if self.due(self.config.runner.weight_sync_interval) else None
        )

    def rollout(
        self, tasks: list[Task]
    ) -> tuple[list[GroupSummary], list[ray.ObjectRef], StepPlan, tuple[RankMiniBatch, ...]]:
        """Have the tasks answered, decide who trains what, and let the actor ranks fetch it: from then on nothing is lost
        with a rollout worker. Groups that were lost before are sampled again."""
        with self.timed("generate"):
            results = self.pool.submit(tasks).results()
            while True:
                summaries, groups = map(list, zip(*results, strict=True))
                self.check_errors(summaries)
                plan, guard = self.plan(summaries), self.guard(summaries)
                lost = self.actors.fetch_groups([*plan.minibatches, *([guard] if guard else [])], groups)
                if not lost:
                    return summaries, groups, plan, guard
                self.events.add(
                    self.current_step, "groups_lost", f"{len(lost)} groups died with their worker; sampled again"
                )
                for k, result in zip(lost, self.pool.submit([tasks[k] for k in lost]).results(), strict=True):
                    results[k] = result

    def plan(self, summaries: list[GroupSummary]) -> StepPlan:
        """Who trains what, in which micro-batch."""
        algorithm, runner = self.config.algorithm, self.config.runner
        return plan_step(
            summaries,
            ranks=self.actors.world_size,
            n_minibatches=algorithm.n_minibatches,
            budget=runner.max_tokens_per_mbs,
            micro_batch_size=None if runner.enable_dynamic_batch_size else self.config.actor.micro_batch_size,
            normalize_advantages=algorithm.normalize_advantages,
            aggregation=algorithm.loss_agg_func,
            share_prompts=self.config.actor.share_prompts,
            prices=self.prices,
        )

    def sync_weights(self) -> None:
        """Have every engine take the actors' weights. Their version is the step that made them."""
        with self.timed("sync"):
            self.weight_sync(version=self.step)

    def validate(self) -> dict[str, float]:
        """Accuracy on the validation rows, one sample each, drawn from the same streams every time."""
        if not self.val_rows or self.config.runner.val_check_interval < 0:
            return {}
        with self.timed("validate"):
            results = self.pool.submit(self.tasks("val", self.val_rows, 1, self.step)).results()
        summaries, groups = map(list, zip(*results, strict=True))
        self.record("val", summaries, groups, self.trajectories.choose("val", self.step, len(groups)))
        self.check_errors(summaries)
        self._count_bad("val", summaries)
        correct = [c for s in summaries for c, error in zip(s.correct, s.errors, strict=True) if error is None]
        lengths = [n for s in summaries for n in s.response_tokens]
        accuracy = sum(correct) / max(1, len(correct))
        self.best = max(self.best, {"val/accuracy": accuracy, "step": self.step}, key=lambda best: best["val/accuracy"])
        log.info("step %d: val/accuracy %.3f on %d problems", self.step, accuracy, len(correct))
        return {
            "val/accuracy": accuracy,
            "val/problems": len(correct),
            "val/errors": len(results) - len(correct),
            "val/ungradable": sum(s.ungradable for s in summaries),
            "val/response_length_mean": sum(lengths) / max(1, len(lengths)),
        }

    def save(self) -> None:
        """Write a checkpoint that a run can be resumed from. Where that fails, training goes on from what it has; only the
        last one of a run must not fail."""
        state = self.position | {"best": self.best, "bad_steps": self.bad_steps}
        state["metrics"] = self.metrics | self.timings  # of this step, which is logged after it was saved
        try:
            with self.timed("checkpoint"):
                self.last_good = save_checkpoint(
                    self.run_dir, self.step, self.actors.save, state, self.config.runner.keep_last
                )
        except CheckpointFailed as error:
            self.events.add(self.step, "checkpoint_failed", str(error))
            if self.step == self.total_steps:
                raise
        else:
            self.saved_step = self.step
            log.info("saved %s", self.last_good)

    def log_step(self) -> None:
        """The step's figures, to everybody who wants them."""
        self.metrics |= self.timings
        self.trajectories.end_step(self.step)
        self.trackers.log(self.step, self.metrics)
        if self.pool.restarts != self.shown_restarts:
            self._show_workers()
        self.progress.update(self.step, self.metrics)

    def record(
        self,
        split: str,
        summaries: list[GroupSummary],
        groups: list[ray.ObjectRef],
        chosen: list[int],
        plan: StepPlan | None = None,
    ) -> None:
        """Nobody needs these groups any more: have the chosen ones written down, as the ranks saw them if they were trained on,
        and let the others go."""
        self.pool.release([summary for g, summary in enumerate(summaries) if g not in chosen])
        advantages = {g: plan.advantages[g] for g in chosen} if plan else None
        logprobs = self.actors.recorded_logprobs() if plan and chosen else []
        self.trajectories.record(
            self.step, split, {g: groups[g] for g in chosen}, [summaries[g] for g in chosen], advantages, logprobs
        )

    def stop(self) -> None:
        """End engines and process group in order, at the end of a run that went well."""
        self.trajectories.close()
        self.pool.stop()
        self.actors.stop()

    # --- its parts ----------------------------------------------------------------------------------------------------

    def tasks(self, split: str, rows: list[int], samples: int, step: int) -> list[Task]:
        """One task per row. Random streams depend on the seed, the step (training only), the row and the sample, nothing else."""
        when = step if split == "train" else "val"
        return [
            Task(
                group_id=f"{split}-{step}-{k}",
                split=split,
                row=row,
                seeds=tuple(_seed(self.config.runner.seed, split, when, k, row, i) for i in range(samples)),
            )
            for k, row in enumerate(rows)
        ]

    def due(self, interval: int) -> bool:
        """Whether what happens every `interval` steps (0: never) and after the last one happens now."""
        return interval > 0 and (self.step % interval == 0 or self.step == self.total_steps)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Show a phase of the step while it lasts, and add its seconds to `time/<phase>`."""
        start = time.perf_counter()
        self.progress.phase(phase)
        with span(phase, step=self.current_step):
            yield
        self.timings[f"time/{phase}"] = time.perf_counter() - start

    def guard(self, summaries: list[GroupSummary]) -> tuple[RankMiniBatch, ...]:
        """Who scores what for the mismatch guard: on a run's first step, on this process's first, and on every so many."""
        interval = self.config.runner.mismatch_check_interval
        items = pick(summaries)
        if interval < 1 or not items or not self.config.rollout.return_logprobs:
            return ()
        if self.checked and self.current_step % interval:
            return ()
        plan = plan_micro_batches(
            items, ranks=self.actors.world_size, budget=self.config.runner.max_tokens_per_mbs, prices=self.prices
        )
        return tuple(RankMiniBatch(micro, plan.run_vision, 1) for micro in plan.micro_batches)

    def check_engine(self, summaries: list[GroupSummary], guard: tuple[RankMiniBatch, ...]) -> None:
        """Let the mismatch guard judge; raises `EngineMismatch`."""
        if not guard:
            return
        with self.timed("check"):
            rows = self.actors.score(guard)
        scores = [Score(summaries[g].images, tokens, seen, blank) for g, tokens, seen, blank in rows]
        trained = self.config.actor.fsdp_config.mixed_precision.param_dtype
        found = judge(scores, max(trained, self.config.rollout.model.precision, key=NOISE.__getitem__))
        if self.current_step == 1 or self.current_step % self.config.runner.mismatch_check_interval == 0:
            self.metrics |= found  # a resumed run checks once more, but its metrics are those of one never stopped
        self.checked = True

    def count_bad_steps(self) -> None:
        """Optimizer steps that were skipped because their gradient was not finite; raises `TooManyBadSteps`."""
        if not self.metrics.get("actor/skipped_steps"):
            self.bad_steps = 0
            return
        self.bad_steps += 1
        self.events.add(self.step, "step_skipped", "the gradient is not finite; its optimizer step was skipped")
        if self.bad_steps >= self.config.runner.max_bad_steps:
            raise TooManyBadSteps(
                f"{self.bad_steps} steps in a row had a gradient that is not finite (runner.max_bad_steps); the last good "
                f"checkpoint is {self.last_good or 'none'}. Resume from it with a lower actor.optim.lr or actor.optim.clip_grad"
            )

    def _count_bad(self, split: str, summaries: list[GroupSummary]) -> None:
        """Rows that couldn't be used; raises `TooManyBadRows`."""
        self.bad_rows.add_failed(split, summaries, self.current_step)
        self.bad_rows.check()
        if split == "train":
            self.metrics["data/bad_rows"] = self.bad_rows.counts()[split]

    def check_errors(self, summaries: list[GroupSummary]) -> None:
        """Record what failed in the engine or the environment; RunError where that is most of a rollout, or where no
        trajectory came out well."""
        if told := check_faults(summaries):
            self.events.add(self.current_step, "trajectories_failed", told)
        if all(error for s in summaries for error in s.errors):
            raise RunError(
                f"step {self.current_step}: every trajectory failed; the first reason: {summaries[0].errors[0]}"
            )

    def _prepare_data(self, rows: dict[str, int]) -> None:
        """Choose the rows of each split that are used, the order of the training rows, and how many steps that makes."""
        data, runner = self.config.data, self.config.runner
        val = rows.get("val", 0) if data.val_samples < 0 else min(data.val_samples, rows.get("val", 0))
        totals = {"train": rows["train"], "val": val}
        self.bad_rows = BadRows(self.run_dir, data.max_bad_rows, totals)
        self.answers: dict[str, Counter[str]] = {}
        self.train_rows, self.val_rows = self._usable("train", rows["train"]), self._usable("val", val)
        write_baselines(self.run_dir, self.answers["val"])
        steps = self._sampler().batches_per_epoch * runner.max_epochs
        self.total_steps = steps if runner.max_steps < 0 else min(steps, runner.max_steps)

    def _sampler(self) -> EpochSampler:
        data = self.config.data
        return EpochSampler(self.train_rows, data.rollout_batch_size, shuffle=data.shuffle, seed=data.seed)

    def _usable(self, split: str, n: int) -> list[int]:
        """Rows of a split to use: those with too long a prompt are left out where the config says so, bad ones always.

        Raises:
            ConfigError: too few are left. TooManyBadRows: too many are bad.
        """
        data = self.config.data
        found = self.pool.filter_rows(
            split, list(range(n)), lambda done: self.progress.phase(f"checking rows of {split}", done, n)
        )
        kept, too_long, bad = found.kept, len(found.too_long), found.bad
        self.answers[split] = found.answers
        log.info("%s: %d rows, %d of them longer than data.max_prompt_length, %d bad", split, n, too_long, len(bad))
        if bad:
            self.bad_rows.add(split, [bad[row] for row in sorted(bad)])
            log.warning("bad rows of %s, left out (%s):\n%s", split, self.bad_rows.path, self.bad_rows.table(split))
            self.bad_rows.check()
        if len(kept) < (needed := data.rollout_batch_size if split == "train" else min(n, 1)):
            why = [f"{len(bad)} are bad (see {self.bad_rows.path.name})"] if bad else []
            if too_long:
                lengths = f"{found.fewest} to {found.most}"
                limit = f"data.max_prompt_length={data.max_prompt_length}"
                why.append(
                    f"{too_long} have prompts of {lengths} tokens, above {limit}: raise that, and runner.seq_length"
                )
            short = f"data.rollout_batch_size={needed} needs more" if split == "train" else "nothing could be validated"
            raise ConfigError(
                f"data.{split}_data_paths: of {n} rows {len(kept)} can be used; {short}. {'; '.join(why) or 'There are no more'}"
                f"{'; or lower data.rollout_batch_size' if split == 'train' and kept else ''}"
            )
        return kept

    def _start_actors(self) -> None:
        """Processes are there; load the model, while the engines sleep, and agree on how its weights travel."""
        self.progress.phase("sharding the policy")
        self.gpu.to_ranks()
        self.prices = self.actors.start(self.total_steps)
        placement = self.placement
        self.weight_sync = WeightSync(
            resolve_weight_sync(
                self.config.rollout.weight_sync, placement.device, placement.collocated, placement.beside_actors
            ),
            self.actors,
            self.pool,
            device=placement.device,
            engine_ranks=self.config.rollout.tensor_parallel_size,
            heartbeat_timeout=self.config.runner.heartbeat_timeout,
        )
        self._show_workers()

    def _show_workers(self) -> None:
        self.shown_restarts = self.pool.restarts
        restarts = self.events.count("actors_restarted")
        self.progress.workers([*self.actors.entries(restarts), *self.pool.entries()])

    def _restart_actors(self, error: ActorsLost) -> None:
        """New actor ranks in the place of lost ones, and the run back at its last complete checkpoint."""
        limit = self.config.runner.max_restarts
        if self.events.count("actors_restarted") >= limit:
            raise TooManyRestarts(
                f"{error}. The actor ranks were started again {limit} times before (runner.max_restarts); the last "
                f"complete checkpoint is {self.last_good or 'none'}"
            ) from error
        back = f"the run goes back to {self.last_good or 'its start: it has no checkpoint yet'}"
        self.events.add(self.current_step, "actors_restarted", f"{error}; the actor ranks start again, {back}")
        self.actors.kill()
        self.pool.forget_weights()
        if self.weight_sync.busy:
            self.pool.replace_all("they may wait for weights that will not come")
        self.pool.release()
        self.trackers.close()
        config, placement = self.config, self.placement
        self.actors = ActorGroup(config, self.model_path, placement.device, placement.actor)
        self._start_actors()
        self._resume(again=True)

    def _resume(self, again: bool = False) -> None:
        """Go to the last good checkpoint, or to the start, and have every engine take those weights."""
        self.step, self.best, self.bad_steps = 0, {"val/accuracy": -1.0, "step": 0}, 0
        self.sampler = self._sampler()
        logged: dict[str, float] = {}
        if self.last_good is not None:
            state = load_state(self.last_good)
            self.actors.load(str(self.last_good / ACTOR_FOLDER), state["step"])
            self.step, self.best, self.bad_steps = state["step"], state["best"], state["bad_steps"]
            self.sampler.load_state_dict(state["sampler"])
            logged = state["metrics"]
            self.events.add(self.step, "resumed", f"resumed from {self.last_good}", logging.INFO)
        self.current_step = self.saved_step = self.step
        self.gpu.to_engines(self.actors, self.sync_weights if self.step or again else None)
        self.position = {"step": self.step, "sampler": self.sampler.state_dict()}
        resume_step = self.step or -1  # a run that goes back to its start validates, and so logs step 0, once more
        self.trajectories.go_on_from(resume_step)
        self.ledger = StepLines(self.run_dir / "ledger.jsonl", resume_step)
        self.trackers = make_trackers(
            self.run_dir,
            self.config.runner.logger.logger_backends,
            project_name=self.config.runner.logger.project_name,
            experiment_name=self.config.runner.experiment_name,
            config=asdict(self.config),
            resume_step=resume_step,
        )
        if logged and self.trackers.last_step != self.step:
            self.trackers.log(self.step, logged)  # what was saved, but not yet logged when the run ended

    def _stop_early(self, stop: Interrupted) -> None:
        """The run was asked to stop: keep what it has computed."""
        self.current_step = self.step
        if self.trackers.last_step != self.step and self.step:
            self.log_step()
        if self.step != self.saved_step:
            self.save()
        kept = "nothing was trained yet"
        if self.last_good:
            where = "auto" if self.last_good.is_relative_to(self.run_dir) else self.last_good
            kept = f"resume from {self.last_good} with runner.resume_dir={where}"
        self.events.add(self.step, "interrupted", f"{stop}; {kept}")


def _seed(*parts: object) -> int:
    """A 64-bit number from anything printable."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")
