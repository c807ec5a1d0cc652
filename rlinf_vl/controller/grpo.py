"""GRPO (Shao et al. 2024) for vision-language models: the whole loop.

The controller sees numbers (`GroupSummary`) and references, never a pixel or a token: groups go from the rollout workers
to the actor ranks through the object store, and so do weights on their way back.
"""

import hashlib
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import ray

from rlinf_vl.actor.batches import RankMiniBatch
from rlinf_vl.actor.group import ActorGroup
from rlinf_vl.config.schema import Config
from rlinf_vl.controller.launch import Placement
from rlinf_vl.controller.mismatch import NOISE, Score, judge, pick
from rlinf_vl.controller.run_folder import (
    ACTOR_FOLDER,
    find_checkpoint,
    load_state,
    save_checkpoint,
    set_checkpoints_aside,
)
from rlinf_vl.controller.step_plan import plan_step
from rlinf_vl.controller.weight_sync import WeightSync
from rlinf_vl.data.sampler import EpochSampler
from rlinf_vl.observe.metrics import summarize_rollout
from rlinf_vl.observe.progress import RunProgress
from rlinf_vl.observe.tracker import make_trackers
from rlinf_vl.packing.planner import plan_micro_batches
from rlinf_vl.rollout.pool import RolloutPool
from rlinf_vl.rollout.worker import Task
from rlinf_vl.weights import choose

log = logging.getLogger(__name__)


class GrpoController:
    """Keeps rollout workers and actor ranks in step. Build it, `fit`, `stop`."""

    def __init__(
        self, config: Config, model_path: str, placement: Placement, run_dir: Path, progress: RunProgress
    ) -> None:
        self.config, self.run_dir, self.progress = config, run_dir, progress
        self.step, self.timings, self.checked = 0, {}, False
        way = choose(config.rollout.weight_sync, placement.device, placement.collocated, placement.beside_actors)
        progress.phase("starting rollout workers and actor ranks")
        self.pool = RolloutPool(config, model_path, placement.device, placement.rollout)
        self.actors = ActorGroup(config, model_path, placement.device, placement.actor)
        self._prepare_data(rows=ray.get(self.pool.start())[0])
        progress.phase("sharding the policy")
        self.prices = ray.get(self.actors.start(self.total_steps))[0]
        self.weight_sync = WeightSync(
            way, self.actors, self.pool, device=placement.device, engine_ranks=config.rollout.tensor_parallel_size
        )
        self.shares_gpu = placement.collocated and placement.device == "cuda"
        self._resume()
        self.trackers = make_trackers(
            run_dir,
            config.runner.logger.logger_backends,
            project_name=config.runner.logger.project_name,
            experiment_name=config.runner.experiment_name,
            config=asdict(config),
            resume_step=self.step or None,
        )
        progress.begin(self.total_steps, self.step)

    # --- the loop -----------------------------------------------------------------------------------------------------

    def fit(self) -> dict[str, float]:
        """Train to the last step; returns the last step's metrics."""
        metrics = self.validate() if self.step == 0 else {}
        if metrics:
            self.trackers.log(0, metrics)
        while self.step < self.total_steps:
            self.step += 1
            self.timings = {}
            with self.timed("step"):
                metrics = self.train_step()
                if self.due(self.config.runner.val_check_interval):
                    metrics |= self.validate()
                if self.due(self.config.runner.save_interval):
                    self.save()
            self.trackers.log(self.step, metrics | self.timings)
            self.progress.update(self.step, metrics | self.timings)
        return metrics

    def train_step(self) -> dict[str, float]:
        """One rollout, its optimizer steps, and the new weights on their way."""
        algorithm, runner = self.config.algorithm, self.config.runner
        epoch, rows = self.sampler.next_batch()
        with self.timed("generate"):
            results = self.pool.generate(self.tasks("train", rows, algorithm.group_size))
        summaries, groups = zip(*results, strict=True)
        metrics = {"data/epoch": epoch, "rollout/worker_restarts": self.pool.restarts} | summarize_rollout(
            summaries, self.timings["time/generate"]
        )
        self.stop_if_all_failed(summaries)
        plan = plan_step(
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
        with self.engines_asleep():
            metrics |= plan.metrics | self.check_engine(summaries, groups)
            with self.timed("train"):
                metrics |= self.actors.update(plan.minibatches, groups, plan.advantages)
        self.pool.release(summaries)
        metrics["actor/tokens_per_second"] = sum(sum(s.tokens) for s in summaries) / self.timings["time/train"]
        if self.due(runner.weight_sync_interval):
            with self.timed("sync"):
                self.sync_weights()
        return metrics

    def sync_weights(self) -> None:
        """Have every engine take the actors' weights. Their version is the step that made them."""
        self.weight_sync(version=self.step)

    def validate(self) -> dict[str, float]:
        """Accuracy on the validation rows, one sample each, drawn from the same streams every time."""
        if not self.val_rows or self.config.runner.val_check_interval < 0:
            return {}
        with self.timed("validate"):
            results = self.pool.generate(self.tasks("val", self.val_rows, 1))
        summaries = [summary for summary, _ in results]
        self.pool.release(summaries)
        correct = [c for s in summaries for c, error in zip(s.correct, s.errors, strict=True) if error is None]
        lengths = [n for s in summaries for n in s.response_tokens]
        accuracy = sum(correct) / max(1, len(correct))
        log.info("step %d: val/accuracy %.3f on %d problems", self.step, accuracy, len(correct))
        return {
            "val/accuracy": accuracy,
            "val/problems": len(correct),
            "val/errors": len(results) - len(correct),
            "val/response_length_mean": sum(lengths) / max(1, len(lengths)),
        }

    def save(self) -> None:
        """Write a checkpoint that a run can be resumed from."""
        with self.timed("checkpoint"):
            state = {"step": self.step, "sampler": self.sampler.state_dict()}
            folder = save_checkpoint(self.run_dir, self.step, self.actors.save, state, self.config.runner.keep_last)
        log.info("saved %s", folder)

    def stop(self) -> None:
        """End engines and process group in order, at the end of a run that went well."""
        self.pool.stop()
        self.actors.stop()

    # --- its parts ----------------------------------------------------------------------------------------------------

    def tasks(self, split: str, rows: list[int], samples: int) -> list[Task]:
        """One task per row. Random streams depend on the seed, the step (training only), the row and the sample, nothing else."""
        when = self.step if split == "train" else "val"
        return [
            Task(
                group_id=f"{split}-{self.step}-{k}",
                split=split,
                row=row,
                seeds=tuple(_seed(self.config.runner.seed, split, when, k, row, i) for i in range(samples)),
            )
            for k, row in enumerate(rows)
        ]

    def due(self, interval: int) -> bool:
        return interval > 0 and (self.step % interval == 0 or self.step == self.total_steps)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        self.progress.phase(phase)
        yield
        self.timings[f"time/{phase}"] = time.perf_counter() - start

    @contextmanager
    def engines_asleep(self) -> Iterator[None]:
        """Where engines and trainer share GPUs, each gives its memory to the other in turn."""
        offload = self.shares_gpu and self.config.actor.enable_offload
        if self.shares_gpu:
            self.pool.release_memory()
        if offload:
            self.actors.onload()
        yield
        if offload:
            self.actors.offload()
        if self.shares_gpu:
            self.pool.restore_memory()

    def check_engine(self, summaries, groups) -> dict[str, float]:
        """The mismatch guard, on the run's first step and every so many after it; raises `EngineMismatch`."""
        interval = self.config.runner.mismatch_check_interval
        items = pick(summaries)
        if interval < 1 or not items or not self.config.rollout.return_logprobs:
            return {}
        if self.checked and self.step % interval:
            return {}
        self.checked = True
        plan = plan_micro_batches(
            items, ranks=self.actors.world_size, budget=self.config.runner.max_tokens_per_mbs, prices=self.prices
        )
        shares = [RankMiniBatch(micro, plan.run_vision, 1) for micro in plan.micro_batches]
        with self.timed("check"):
            rows = self.actors.score(shares, groups)
        scores = [Score(summaries[g].images, tokens, seen, blank) for g, tokens, seen, blank in rows]
        trained = self.config.actor.fsdp_config.mixed_precision.param_dtype
        return judge(scores, max(trained, self.config.rollout.model.precision, key=NOISE.__getitem__))

    def stop_if_all_failed(self, summaries) -> None:
        if all(error for s in summaries for error in s.errors):
            raise RuntimeError(f"step {self.step}: every trajectory failed; the first reason: {summaries[0].errors[0]}")

    def _prepare_data(self, rows: dict[str, int]) -> None:
        """Choose the rows of each split that are used, the order of the training rows, and how many steps that makes."""
        data, runner = self.config.data, self.config.runner
        self.train_rows = self._usable("train", rows["train"])
        val = rows.get("val", 0) if data.val_samples < 0 else min(data.val_samples, rows.get("val", 0))
        self.val_rows = self._usable("val", val)
        self.sampler = EpochSampler(self.train_rows, data.rollout_batch_size, shuffle=data.shuffle, seed=data.seed)
        steps = self.sampler.batches_per_epoch * runner.max_epochs
        self.total_steps = steps if runner.max_steps < 0 else min(steps, runner.max_steps)

    def _usable(self, split: str, n: int) -> list[int]:
        """Rows of a split to use, those with too long a prompt left out where the config says so."""
        if not n or not self.config.data.filter_prompt_by_length:
            return list(range(n))
        kept, too_long, bad = self.pool.filter_rows(split, list(range(n)))
        log.info(
            "%s: %d rows, %d of them longer than data.max_prompt_length, %d unreadable", split, n, too_long, len(bad)
        )
        for row, reason in list(bad.items())[:5]:
            log.warning("%s row %d left out: %s", split, row, reason)
        return kept

    def _resume(self) -> None:
        folder = find_checkpoint(self.run_dir, self.config.runner.resume_dir)
        if folder is None:
            set_checkpoints_aside(self.run_dir)
            return
        state = load_state(folder)
        self.actors.load(str(folder / ACTOR_FOLDER))
        self.step = state["step"]
        self.sampler.load_state_dict(state["sampler"])
        self.sync_weights()
        log.info("resumed from %s", folder)


def _seed(*parts: object) -> int:
    """A 64-bit number from anything printable."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")
