"""The stages of a smoke run, in order, and what each of them shows.

A run begins with the engines' turn on shared GPUs, trains one step, and gives its weights to the
engines. The stages do the same with the same parts, and look at each of them. A stage that fails
ends those that need it; the others run.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rlinf_vl.config.parts import load_part
from rlinf_vl.config.schema import Config
from rlinf_vl.config.validate import validate_config
from rlinf_vl.controller.batch import Rollout, rollout
from rlinf_vl.controller.dataset_plan import DatasetPlan, find_usable_rows
from rlinf_vl.controller.loop import RunState, update
from rlinf_vl.controller.mismatch import NOISE, EngineMismatch, MismatchGuard, Score, judge
from rlinf_vl.controller.saver import Saver
from rlinf_vl.controller.schedules import SCHEDULES
from rlinf_vl.driver.parts import Parts, Scores
from rlinf_vl.errors import RunError
from rlinf_vl.runtime.checkpoints import ACTOR_FOLDER, checkpoint_home
from rlinf_vl.runtime.gpus import gpu_memory
from rlinf_vl.tools.check import doctor
from rlinf_vl.tools.check.inputs import RULES
from rlinf_vl.tools.check.smoke.checkpoint import RandomCheckpoint, write_checkpoint
from rlinf_vl.tools.check.smoke.inputs import STEPS, smoke_config
from rlinf_vl.tools.check.smoke.memory import GIB, MemoryWatch
from rlinf_vl.types import GroupSummary


class SmokeFailed(RunError):
    """A part of the run does not do what it must."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage.

    Attributes:
        run: does it, and returns what was found.
        needs: stages without which it can't run.
        phases: phases of the memory ledger that it goes through.
        hint: the way out where it fails.
    """

    name: str
    run: Callable[[], str]
    needs: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    hint: str = ""


class KeptGroups:
    """Stores of groups that keep those that were trained on, so that they can be scored again."""

    def release(self, summaries: Sequence[GroupSummary]) -> None: ...


class Stages:
    """The stages of one smoke run, in `all`.

    Attributes:
        preflight: GiB by phase of the ledger, on GPUs.
    """

    checkpoint: RandomCheckpoint
    config: Config
    parts: Parts
    _data: DatasetPlan

    def __init__(
        self,
        config: Config,
        folder: Path,
        device: str,
        memory: MemoryWatch,
        make_parts: Callable[[Config, str], Parts],
    ) -> None:
        """
        Args:
            config: the user's.
            folder: of all files of the smoke run.
            device: "cuda" or "cpu".
            make_parts: makes the parts of the smoke run's config and model, in a context that ends
                with the smoke run.
        """
        self.preflight: dict[str, float] = {}
        self._given_config, self._folder, self._device = config, folder, device
        self._memory, self._make_parts = memory, make_parts
        self._batches: dict[int, Rollout] = {}
        self._moved = math.nan  # mean |old - new logprob| of the step, in nats
        self._saved: Saver | None = None
        self._fingerprints: list[int] = []

    @property
    def all(self) -> list[Stage]:
        """The stages in their order."""
        on_gpu = self._device == "cuda"
        ledger_stage = [Stage("preflight", self.estimate, ("weights",))] if on_gpu else []
        return [
            Stage("weights", self.write_weights),
            *ledger_stage,
            Stage("engines", self.start_engines, ("weights",), hint=ENGINE_HINT),
            Stage("ranks", self.load_ranks, ("engines",), ("load",), MEMORY_HINT),
            Stage("generate", self.generate, ("ranks",), ("generate",), ENGINE_HINT),
            Stage("sleep", self.sleep, ("ranks",)),
            Stage("logprobs", self.compare_logprobs, ("generate", "sleep")),
            Stage("train", self.train, ("generate", "sleep"), ("images", "train"), MEMORY_HINT),
            Stage("sync", self.sync, ("sleep",), ("sync",), SYNC_HINT),
            Stage("follow", self.follow, ("sync", "train")),
            Stage("save", self.save, ("ranks",), hint=DISK_HINT),
            Stage("load", self.load, ("save",), ("resume",), MEMORY_HINT),
        ]

    # --- before anything is started ---------------------------------------------------------------

    def write_weights(self) -> str:
        """Write the random checkpoint, and make the config of the smoke run."""
        self.checkpoint = write_checkpoint(self._given_config, self._folder / "model")
        self.config = smoke_config(self._given_config, self.checkpoint, self._folder, self._device)
        validate_config(self.config, RULES)
        doctor.refuse(self.config)
        return str(self.checkpoint)

    def estimate(self) -> str:
        """Ask the memory ledger about the smoke run on this machine's GPUs."""
        sizes = gpu_memory() or (0,)
        peaks, verdict = load_part("memory-by-phase")(self.config, len(sizes), min(sizes))
        self.preflight = {phase: peak / GIB for phase, peak in peaks.items()}
        return verdict

    # --- the start --------------------------------------------------------------------------------

    def start_engines(self) -> str:
        """Start Ray, the engines and the processes of the ranks, and check the rows."""
        parts = self._make_parts(self.config, self.config.rollout.model.model_path)
        parts.start_pool()
        parts.begin_learner()
        self._data = find_usable_rows(self.config, self._folder, parts.pool, parts.progress)
        parts.log.open(0, STEPS, {})
        self.parts = parts
        return parts.description

    def load_ranks(self) -> str:
        """Load and shard the policy."""
        parts, config = self.parts, self.config
        parts.connect(self._data.total_steps)
        self._scheduler = SCHEDULES[config.runner.schedule](
            config, parts.pool, self._data, parts.log, parts.log.timed("sync")(parts.sync)
        )
        self._guard = MismatchGuard(config, parts.learner, parts.log)
        trained = config.actor.fsdp_config.mixed_precision.param_dtype
        precision = max(trained, config.rollout.model.precision, key=NOISE.__getitem__)
        self._precision = precision
        quantized = config.actor.model.is_lora and config.actor.model.lora.quantization != "none"
        # A quantized policy computes with other weights than the model's files have, and an engine
        # may have lost its own while the ranks started.
        stale = quantized or parts.gpu.loses_weights
        first_sync = partial(self._scheduler.sync, 0) if stale else None
        parts.gpu.to_engines(parts.learner, first_sync)
        self._scheduler.resume(0, ())
        return f"a step is divided among {parts.learner.data_size}, checkpoint loaded and sharded"

    # --- one step ---------------------------------------------------------------------------------

    def generate(self) -> str:
        """Answer prompts with one image, two and none."""
        batch = self._roll_out(1)
        n_answers = sum(len(summary.trajectories) for summary in batch.summaries)
        n_images = sum(summary.images for summary in batch.summaries)
        rate = batch.metrics["rollout/tokens_per_second"]
        length = batch.metrics["rollout/response_length_mean"]
        return (
            f"{n_answers} answers to {len(batch.summaries)} prompts with {n_images} images, "
            f"{length:.0f} tokens each, {rate:,.0f} tokens/s"
        )

    def sleep(self) -> str:
        """Give the GPU to the ranks."""
        awake_bytes, start = self._memory.used(), time.perf_counter()
        self.parts.gpu.to_ranks(self.parts.learner)
        seconds = time.perf_counter() - start
        if not self.parts.gpu.shared:
            return "engines have slots of their own, and stay awake"
        asleep_bytes = self._memory.used()
        return f"{awake_bytes / GIB:.2f} → {asleep_bytes / GIB:.2f} GiB in {seconds:.2f} s"

    def compare_logprobs(self) -> str:
        """Compare the engines' logprobs with the ranks', with images and without."""
        figures = self._compare(1)
        return f"mean difference of engine and trainer in nats: {figures}"

    def train(self) -> str:
        """Train one step."""
        parts, batch = self.parts, self._batches[1]
        self._score(batch)  # groups that were never scored may have other kernels to compile
        metrics = update(
            1, batch, self.config, KeptGroups(), parts.learner, parts.log, lambda: None
        )
        norm = metrics["actor/grad_norm"]
        if not math.isfinite(norm) or norm == 0:
            raise SmokeFailed(
                f"the gradient's norm is {norm}, so that nothing was trained; see the losses' "
                "formulas in docs/algorithms.md, and prefer bf16 to fp16"
            )
        if batch.to_score:
            parts.learner.fetch_groups(batch.to_score, batch.groups)
            self._moved = mean_difference(self._score(batch))
        parts.pool.release(batch.summaries)
        return (
            f"loss {metrics['actor/loss']:.3g}, gradient {norm:.3g}, "
            f"{metrics['actor/tokens_per_second']:,.0f} tokens/s; logprobs moved by "
            f"{self._moved:.3g} nats"
        )

    def sync(self) -> str:
        """Give the GPU and the trained weights to the engines, and wake them."""
        parts, start = self.parts, time.perf_counter()
        metrics = parts.gpu.to_engines(parts.learner, partial(self._scheduler.sync, 1))
        total, synced = time.perf_counter() - start, parts.log.timings["time/sync"]
        return (
            f"{metrics['sync/bytes'] / 2**20:,.1f} MiB in {synced:.2f} s, sleep and wake around it "
            f"{total - synced:.2f} s"
        )

    def follow(self) -> str:
        """Answer with the trained weights, and compare again."""
        batch = self._roll_out(2)
        versions = sorted({v for s in batch.summaries for v in (s.min_version, s.max_version)})
        if versions != [1]:
            raise SmokeFailed(
                f"after the sync of version 1 the engines stamp their tokens with {versions}: they "
                "did not take it. See the workers' log lines above"
            )
        self.parts.gpu.to_ranks(self.parts.learner)
        figures = self._compare(2)
        difference = mean_difference(self._score(batch))
        if difference > self._moved / 2:
            raise SmokeFailed(
                f"the engines' weights are stale: the step moved the trainer's logprobs by "
                f"{self._moved:.3g} nats, and after the sync the engines' are {difference:.3g} nats "
                f"away; {SYNC_HINT}"
            )
        return f"tokens have version 1; mean difference in nats: {figures}"

    # --- checkpoints ------------------------------------------------------------------------------

    def save(self) -> str:
        """Write a checkpoint as a run does."""
        parts, runner = self.parts, self.config.runner
        parts.gpu.to_ranks(parts.learner)
        self._fingerprints = parts.fingerprints()
        home = checkpoint_home(self.config, self._folder)
        saver = Saver(runner, home, parts.learner, parts.log, None)
        saver.save(RunState(step=1).content(parts.log.timings), last=True)
        assert saver.newest is not None
        self._saved = saver
        nbytes = sum(f.stat().st_size for f in saver.newest.rglob("*") if f.is_file())
        seconds = parts.log.timings["time/checkpoint_write"]
        return f"{nbytes / 2**20:,.1f} MiB, {nbytes / 2**20 / seconds:,.0f} MiB/s, {saver.newest.parent}"

    def load(self) -> str:
        """Train another step, read the checkpoint, and compare all weights with those saved."""
        parts = self.parts
        assert self._saved is not None and self._saved.newest is not None
        trained = "nothing was trained in between"
        if (batch := self._batches.get(2)) is not None:
            update(2, batch, self.config, parts.pool, parts.learner, parts.log, lambda: None)
            if parts.fingerprints() == self._fingerprints:
                raise SmokeFailed("a further step has changed neither weights nor optimizer")
            trained = "after a further step"
        parts.learner.load(str(self._saved.newest / ACTOR_FOLDER), 1)
        ranks = [
            rank
            for rank, pair in enumerate(zip(parts.fingerprints(), self._fingerprints, strict=True))
            if pair[0] != pair[1]
        ]
        if ranks:
            raise SmokeFailed(
                f"weights or optimizer of actor ranks {ranks} are not those that were saved; the "
                f"checkpoint is not to be trusted: try another disk ({self._saved.newest.parent})"
            )
        return f"every rank's weights and optimizer equal those saved, {trained}"

    # --- what several stages do -------------------------------------------------------------------

    def _roll_out(self, step: int) -> Rollout:
        parts = self.parts
        parts.log.begin_step(step)
        batch = rollout(
            step, self._scheduler, self.config, parts.pool, parts.learner, self._guard, parts.log
        )
        self._batches[step] = batch
        return batch

    def _score(self, batch: Rollout) -> list[Score]:
        """Score the groups that the guard chose, which the ranks have fetched."""
        rows: Scores = []
        for minibatch in batch.to_score:
            rows += self.parts.learner.score(minibatch)
        return scores_of(rows, batch)

    def _compare(self, step: int) -> str:
        """Compare engines and ranks on the step's groups; returns the figures.

        Raises:
            SmokeFailed: they differ, or images make no difference; with the likely cause.
        """
        batch = self._batches[step]
        scores = self._score(batch)
        if not scores:
            raise SmokeFailed("no answer could be compared: all are empty, or failed")
        try:
            metrics = judge(scores, self._precision)
        except EngineMismatch as error:
            raise SmokeFailed(self._wrong_temperature(batch, step) or str(error)) from error
        with_images = [score for score in scores if score.images]
        blank = metrics.get("mismatch/blank_images", math.nan)
        if with_images and not blank > 2 * mean_difference(with_images):
            raise SmokeFailed(
                f"with blank images the trainer's logprobs are as near to the engines' ({blank:.3g} "
                "nats) as with the images: nothing shows that either sees them. Is the vision "
                "tower loaded, and are its features put in place?"
            )
        names = {
            "mismatch/no_image": "no image",
            "mismatch/one_image": "one",
            "mismatch/more_images": "two",
            "mismatch/blank_images": "blanked",
        }
        return ", ".join(f"{names[key]} {value:.2g}" for key, value in metrics.items())

    def _wrong_temperature(self, batch: Rollout, step: int) -> str:
        """Return the reason if another temperature explains the engines' logprobs, else ""."""
        algorithm, noise = self.config.algorithm, 4 * NOISE[self._precision]
        temperature = algorithm.sampling_params.temperature
        for candidate in {1.0, temperature**2, algorithm.val_sampling_params.temperature} - {
            temperature,
            0.0,
        }:
            rows: Scores = []
            for minibatch in batch.to_score:
                rows += self.parts.score_at(minibatch, candidate)
            if mean_difference(scores_of(rows, batch)) < noise:
                return (
                    f"the engines' logprobs in step {step} are those of temperature {candidate:g}, and "
                    f"algorithm.sampling_params.temperature is {temperature:g}: the engine does not "
                    "apply it. Is it in the request's sampling parameters?"
                )
        return ""


def scores_of(rows: Scores, batch: Rollout) -> list[Score]:
    """Return what ranks scored, with the number of images of each group."""
    return [Score(batch.scored[g].images, n, gap, blank) for g, n, gap, blank in rows]


def mean_difference(scores: Sequence[Score]) -> float:
    """Return the mean |rollout − train logprob| of all tokens, in nats."""
    return sum(score.difference for score in scores) / max(1, sum(s.tokens for s in scores))


ENGINE_HINT = (
    "the engine's own words are above. With SGLang, try rollout.sglang.server_args.disable_cuda_graph"
    "=true, then rollout.sglang.server_args.attention_backend=triton"
)
MEMORY_HINT = "if memory is short, `rlinf-vl preflight CONFIG` says what to lower"
SYNC_HINT = "try rollout.weight_sync=object_store, which needs nothing of GPUs or shared memory"
DISK_HINT = "make room, or set runner.checkpoint_dir to a larger disk"
