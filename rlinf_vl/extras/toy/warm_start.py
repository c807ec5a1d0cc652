"""The warm start of an embedded task's model: supervised training on its demonstrations.

`build_toy_checkpoint` writes a model with random weights, lets `imitate`, the loop of `rlinf-vl
sft`, train it in this process, and writes the weights over the random ones.
"""

import logging
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import Progress, TextColumn

from rlinf_vl.config.imitation import set_imitation
from rlinf_vl.config.schema import (
    ActorConfig,
    ActorModelConfig,
    ClusterConfig,
    Config,
    DataConfig,
    FsdpConfig,
    MixedPrecisionConfig,
    OptimConfig,
    RolloutConfig,
    RunnerConfig,
)
from rlinf_vl.config.schema.rollout import RolloutModelConfig
from rlinf_vl.config.schema.runner import LoggerConfig, TrajectoriesConfig
from rlinf_vl.controller.dataset_plan import DatasetPlan
from rlinf_vl.data.bad_rows import BadRows
from rlinf_vl.data.sampler import EpochSampler
from rlinf_vl.driver.local.parts import LocalParts
from rlinf_vl.extras.sft.demonstrations import imitated_group
from rlinf_vl.extras.sft.imitate import Groups, imitate
from rlinf_vl.extras.toy import model as toy_model
from rlinf_vl.extras.toy import task
from rlinf_vl.models.processing import PixelCache
from rlinf_vl.rollout.episode.observation import observe
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.rollout.episode.row_check import processor_of, renderer_of
from rlinf_vl.runtime.stop_request import StopRequest
from rlinf_vl.types import GroupSummary, ImageRef, Message, Problem

logger = logging.getLogger(__name__)

#: Steps over which the learning rate rises at the start.
WARMUP_STEPS, WEIGHT_DECAY = 30, 0.01
#: Tokens of the longest demonstration, and of a micro-batch.
SEQ_LENGTH, MICRO_BATCH_TOKENS = 1024, 4096


def build_toy_checkpoint(
    out_dir: str | os.PathLike[str],
    seed: int = task.DEFAULT_SEED,
    progress: bool = True,
    *,
    toy: str = "toy",
    steps: int | None = None,
) -> None:
    """Write a toy checkpoint into a folder.

    It has weights, config, tokenizer, image settings and a README.

    Args:
        out_dir: the folder, created if missing.
        seed: seed of the random weights and of the demonstrations.
        progress: whether to show a progress bar on the terminal.
        toy: name of the task.
        steps: supervised steps of the warm start; None for the number of the task (half a minute on
            one core for `toy`).
    """
    toy_task = task.toy_of(toy)
    steps = toy_task.steps if steps is None else steps
    folder = Path(out_dir)
    model = toy_model.write_untrained(toy_task, folder, seed)
    if steps:
        loss, weights = warm_start(
            toy_task, str(folder), steps=steps, seed=seed, show_progress=progress
        )
        model.load_state_dict(weights, strict=False)
        toy_model.save_toy_model(model, folder)
        build_facts = f"Seed {seed}, {steps} steps of warm start, last loss {loss:.3f}"
    else:
        build_facts = f"Seed {seed}, random weights"
    toy_model.write_readme(toy_task, model, folder, build_facts)
    logger.info("%s checkpoint made: %s", toy, build_facts)


def warm_start(
    toy: task.Toy, model_path: str, *, steps: int, seed: int, show_progress: bool
) -> tuple[float, dict[str, torch.Tensor]]:
    """Train the model in a folder on the task's demonstrations, in this process.

    Returns:
        The loss of the last step (the mean over answer tokens, in nats), and the weights by name.
    """
    with tempfile.TemporaryDirectory() as folder, WarmStartBar(toy.name, show_progress) as bar:
        run_dir, stop = Path(folder), StopRequest()
        config = recipe(toy, model_path, folder, steps, seed)
        # On one thread: their number changes the order of sums, and so the weights.
        with LocalParts(config, model_path, run_dir, bar, stop) as parts:
            parts.connect(steps)
            learner = parts.learner
            rng = np.random.default_rng([seed, steps])
            pixels = learner.rank.trainer.batches.pixel_cache
            readers = DemonstrationReader(config, model_path, toy, rng, pixels)
            parts.at_end(readers.stop)
            rows = range(steps * toy.batch_size)
            data = DatasetPlan(
                EpochSampler(rows, toy.batch_size, shuffle=False, seed=seed),
                val_rows=[],
                answers=Counter(),
                total_steps=steps,
                bad_rows=BadRows(run_dir, 0, {"train": len(rows)}),
            )
            metrics = imitate(config, readers, learner, data, parts.home, stop, log=parts.log)
            trained = learner.rank.trainer.weights(torch.float32)
            weights = {name: value.clone() for name, value in trained}
    return metrics["actor/loss"], weights


def recipe(toy: task.Toy, model_path: str, run_dir: str, steps: int, seed: int) -> Config:
    """Return the config of a warm start."""
    config = Config(
        cluster=ClusterConfig(device="cpu", backend="local"),
        runner=RunnerConfig(
            output_dir=run_dir,
            experiment_name="warm-start",
            seed=seed,
            seq_length=SEQ_LENGTH,
            max_tokens_per_mbs=MICRO_BATCH_TOKENS,
            max_steps=steps,
            val_check_interval=-1,
            logger=LoggerConfig(logger_backends=[]),
            trajectories=TrajectoriesConfig(max_gb=0),
        ),
        rollout=RolloutConfig(model=RolloutModelConfig(model_path=model_path)),
        data=DataConfig(rollout_batch_size=toy.batch_size),
        actor=ActorConfig(
            model=ActorModelConfig(
                freeze_vision_tower=False, freeze_projector=False, freeze_router=False
            ),
            fsdp_config=FsdpConfig(
                gradient_checkpointing="none",
                mixed_precision=MixedPrecisionConfig(param_dtype="fp32", reduce_dtype="fp32"),
            ),
            optim=OptimConfig(
                lr=toy.learning_rate,
                lr_warmup_steps=WARMUP_STEPS,
                lr_cooldown_steps=toy.cooldown_steps,
                adam_beta2=0.98,
                weight_decay=WEIGHT_DECAY,
            ),
        ),
    )
    set_imitation(config)
    return config


class DemonstrationReader:
    """The `Readers` of a warm start: draws a task's demonstrations, in a thread beside training.

    Row number n is the n-th conversation of the random stream, so rows are read in order. With
    `pixels`, the learner's cache, the thread also makes the images' pixels, for which training
    would wait.
    """

    restarts = turnover = 0

    def __init__(
        self,
        config: Config,
        model_path: str,
        toy: task.Toy,
        rng: np.random.Generator,
        pixels: PixelCache | None = None,
    ) -> None:
        self._demonstrate = toy.demonstrate
        self._rng = rng
        self._pixels = pixels
        self._processor = processor_of(config, model_path)
        self._renderer = RenderedOnce(renderer_of(config, self._processor))
        self._thread = ThreadPoolExecutor(1)

    def begin(self, split: str, rows: Mapping[str, int]) -> Future[Groups]:
        """Begin to draw as many conversations, by name of the group that each becomes."""

        def read() -> Groups:
            groups: Groups = []
            for name in rows:
                problems = as_problems(name, self._demonstrate(self._rng))
                group = imitated_group(self._renderer, problems, name)
                summary = GroupSummary.of(group, self._processor.placeholder_ids)
                groups.append((summary, group))
                if self._pixels is not None:
                    for image, _ in group.images:
                        self._pixels(image)
            return groups

        return self._thread.submit(read)

    def result(self, pending: Future[Groups]) -> Groups:
        """Wait for what was begun; returns the groups in the order of the names."""
        return pending.result()

    def release(self, summaries: Sequence[GroupSummary]) -> None:
        """Do nothing: a group is freed when nobody refers to it."""

    def entries(self) -> list[dict[str, object]]:
        """Return no process: there is none but this one."""
        return []

    def stop(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)


class RenderedOnce:
    """A renderer that encodes conversations of equal texts once.

    The pictures of a task have one size, so they become equal tokens.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._rendered: dict[str, tuple[np.ndarray, list[tuple[int, int]], np.ndarray]] = {}

    def conversation(
        self, messages: Sequence[Message], images: Sequence[ImageRef], imitated: Sequence[int]
    ) -> tuple[np.ndarray, list[tuple[int, int]], np.ndarray]:
        """Encode a conversation: `Renderer.conversation`."""
        texts = str(messages)
        for image in images:
            texts = texts.replace(image.url, "")
        if texts not in self._rendered:
            self._rendered[texts] = self._renderer.conversation(messages, images, imitated)
        return self._rendered[texts]


def as_problems(name: str, conversations: Sequence[Sequence[Message]]) -> list[Problem]:
    """Return conversations that differ in their last message, in the form of `as_problem`."""
    first = as_problem(name, conversations[0])
    problems = [first]
    for messages in conversations[1:]:
        answer = as_problem(name, messages[-1:]).messages
        problems.append(replace(first, messages=first.messages[:-1] + answer))
    return problems


def as_problem(name: str, messages: Sequence[Message]) -> Problem:
    """Return a demonstration in the form that rows of conversations have: contents are lists of
    parts, pictures are references, and each of the assistant's messages is imitated."""
    observation = observe(messages, Problem(name, (), ""))
    conversation: list[Any] = []
    for message in observation.messages:
        content: Any = message["content"]
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        weight = {"weight": 1} if message["role"] == "assistant" else {}
        conversation.append({"role": message["role"], "content": content} | weight)
    return Problem(name, tuple(conversation), "", images=observation.images)


class WarmStartBar:
    """A progress bar with the loss, in the place of a run's progress."""

    def __init__(self, toy: str, show: bool) -> None:
        self._bar = Progress(
            *Progress.get_default_columns(),
            TextColumn("{task.fields[loss]}"),
            disable=not show,
        )
        self._row = self._bar.add_task(f"{toy} warm start", loss="")

    def __enter__(self) -> "WarmStartBar":
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def begin(self, total_steps: int, start_step: int = 0) -> None:
        self._bar.update(self._row, total=total_steps, completed=start_step)

    def update(self, step: int, metrics: Mapping[str, float], alarms: Iterable[str] = ()) -> None:
        self._bar.update(self._row, completed=step, loss=f"loss {metrics['actor/loss']:.3f}")

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """Do nothing: the phases of a step last milliseconds."""

    def workers(self, workers: Sequence[Mapping[str, Any]]) -> None:
        """Do nothing: there is no process but this one."""
