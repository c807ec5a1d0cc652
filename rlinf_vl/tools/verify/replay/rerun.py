"""Records a step of a finished or failed run: trains again from the newest checkpoint before it, in
this process, and stops where the step's update begins.

Steps are deterministic: samples depend on the seed, the step, the row and the sample's number. What
the run itself recorded of the step (`trajectories/step_N.parquet`) takes the place of what is
sampled again.
"""

import json
import logging
import math
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from omegaconf import OmegaConf

from rlinf_vl.config.load import parse_config
from rlinf_vl.config.schema import Config
from rlinf_vl.controller.batch import plan_of
from rlinf_vl.controller.dataset_plan import find_usable_rows
from rlinf_vl.controller.loop import train
from rlinf_vl.driver.entry import prepare_toys
from rlinf_vl.driver.local.learner import LocalLearner
from rlinf_vl.driver.local.parts import LocalParts
from rlinf_vl.errors import ConfigError
from rlinf_vl.extras.export.run_code import refuse_code_of_run
from rlinf_vl.observe.progress import RunProgress
from rlinf_vl.observe.replay_file import RecordedStep, model_files
from rlinf_vl.observe.status import StatusFile
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.runtime.checkpoints import Folder, checkpoint_home, checkpoints
from rlinf_vl.runtime.files import read_lines
from rlinf_vl.runtime.stop_request import StopRequest
from rlinf_vl.tools.verify.replay.record import planned
from rlinf_vl.types import Group, GroupSummary, Message, TokenSequence, Trajectory, Turn

log = logging.getLogger(__name__)


class _Reached(Exception):
    """The step's update would begin now."""


@dataclass
class _Captured:
    """The step as it is sampled again."""

    groups: list[Group] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    engine_weights: dict[str, int] = field(default_factory=dict)
    #: By the ids of a rendered prompt.
    messages: dict[bytes, list[Message]] = field(default_factory=dict)


class _StoppingLearner(LocalLearner):
    """A learner that raises `_Reached` in place of one step's update."""

    last_step = 0

    def fetch_groups(self, minibatches: Sequence[Any], groups: Sequence[Group]) -> list[int]:
        self.step_groups = list(groups)
        return super().fetch_groups(minibatches, groups)

    def update(
        self,
        step: int,
        minibatches: Sequence[Any],
        advantages: Sequence[Any],
        recorded: Collection[int],
        kl_scale: float,
        on_start: Callable[[], None],
        /,
    ) -> Any:
        if step == self.last_step:
            raise _Reached
        return super().update(step, minibatches, advantages, recorded, kl_scale, on_start)


class _ReplayParts(LocalParts):
    """The parts of a run that stops in a step."""

    def make_learner(self, total_steps: int) -> _StoppingLearner:
        return _StoppingLearner(self.config, self.model_path, self.device, total_steps)


def record_run(
    run_dir: Path,
    step: int,
    *,
    shape_only: bool = False,
    trust_run_code: bool = False,
) -> RecordedStep:
    """Record a step of the run in a folder.

    Args:
        shape_only: without weights; a replay then draws random ones.

    Raises:
        ConfigError: the folder has no run, the run did not get so far, or it brings code that is
            not trusted.
    """
    file = run_dir / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"{run_dir} has no config.yaml: name the folder of a run")
    refuse_code_of_run(OmegaConf.load(file), run_dir, trust_run_code)  # pyright: ignore[reportArgumentType]
    config = parse_config(str(file))
    lines, _ = read_lines(run_dir / "metrics.jsonl")
    metrics = {int(line["step"]): line for line in lines}
    newest = max(metrics, default=0)
    if not 1 <= step <= newest + 1:
        raise ConfigError(
            f"--step {step}: {run_dir} has steps 1 to {newest}, and may have failed in {newest + 1}"
        )
    earlier = [
        (number, folder)
        for number, folder in checkpoints(checkpoint_home(config, run_dir))
        if number < step
    ]
    start = earlier[-1][1] if earlier else None
    log.info("recording step %d of %s from %s", step, run_dir, start or "the first weights")
    captured, summaries_plan, total_steps, model_path = _rerun(config, step, start)
    groups, train_logprobs, is_same = recorded_groups(run_dir, step, captured.groups)
    plan = summaries_plan(groups)
    messages = {
        g: captured.messages[group.prefix.astype(np.int32).tobytes()]
        for g, group in enumerate(groups)
        if group.prefix.astype(np.int32).tobytes() in captured.messages
    }
    step_metrics = metrics.get(step, {}) if is_same else {}
    return RecordedStep(
        step,
        file.read_text(encoding="utf-8"),
        tuple(groups),
        planned(plan),
        plan.advantages,
        train_logprobs=train_logprobs,
        metrics={k: v for k, v in step_metrics.items() if isinstance(v, int | float)},
        messages=messages,
        engine_weights={} if shape_only else captured.engine_weights,
        weights={} if shape_only else captured.weights,
        weights_source=f"computed again from {start or 'the first weights'}",
        model_path=model_path,
        model_files=model_files(Path(model_path)),
        total_steps=total_steps,
        random_weights=shape_only,
        run=str(run_dir.resolve()),
    )


def _rerun(config: Config, step: int, start: Folder | None) -> tuple[_Captured, Any, int, str]:
    """Train up to a step's update; returns what was captured there, a function from groups to the
    plan, the run's steps, and the model's path."""
    captured = _Captured()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="replay-")))
        config = _local(config, folder)
        run_dir = folder / "run"
        run_dir.mkdir()
        model_path = prepare_toys(config)
        progress = RunProgress(StatusFile(run_dir))
        stop = StopRequest()
        parts = stack.enter_context(_ReplayParts(config, model_path, run_dir, progress, stop))
        stack.enter_context(_noted_prompts(captured.messages))
        pool = parts.start_pool()
        data = find_usable_rows(config, run_dir, pool, progress)
        parts.connect(data.total_steps)
        learner = parts.learner
        learner.last_step = step
        with suppress(_Reached):
            train(
                config, pool, learner, data, run_dir, stop,
                gpu=parts.gpu, sync=parts.sync, log=parts.log, start=start,
            )  # fmt: skip
        captured.groups = learner.step_groups[: config.data.rollout_batch_size]
        captured.weights = learner.rank.trainer.replay_weights(math.inf)
        for name in captured.weights:
            fingerprint = pool.engine.fingerprint([name])
            if fingerprint is not None:
                captured.engine_weights[name] = fingerprint
        placeholders = learner.rank.trainer.batches.collate.image_tokens.placeholder_ids

        def plan(groups: Sequence[Group]) -> Any:
            summaries = [GroupSummary.of(group, placeholders) for group in groups]
            return plan_of(step, summaries, config, learner)

        return captured, plan, data.total_steps, model_path


def _local(config: Config, folder: Path) -> Config:
    """Return the config of a run in this process that samples and trains as the given one, and
    writes into `folder`."""
    config.cluster.backend = "local"
    config.cluster.device = "cpu"
    config.cluster.component_placement = {"actor,rollout": 0}
    config.rollout.rollout_backend = "torch"
    config.actor.context_parallel_size = 1
    config.actor.enable_offload = False
    config.actor.fsdp_config.strategy = "fsdp2"
    config.actor.fsdp_config.cpu_offload = False
    runner = config.runner
    runner.output_dir, runner.experiment_name = str(folder), "run"
    runner.checkpoint_dir = runner.resume_dir = None
    runner.save_interval = runner.val_check_interval = runner.mismatch_check_interval = -1
    runner.val_before_train = False
    runner.logger.logger_backends = []
    runner.trajectories.max_gb = 0
    return config


@contextmanager
def _noted_prompts(messages_by_ids: dict[bytes, list[Message]]) -> Iterator[None]:
    """Note the messages of every prompt that is rendered in the block, by the prompt's ids."""
    render = Renderer.prompt

    def prompt(self: Renderer, messages: Sequence[Message], images: Any, tools: Any = ()) -> Any:
        ids, grids = render(self, messages, images, tools)
        if not tools:
            messages_by_ids[ids.astype(np.int32).tobytes()] = list(messages)
        return ids, grids

    Renderer.prompt = prompt  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        Renderer.prompt = render


def recorded_groups(
    run_dir: Path, step: int, groups: Sequence[Group]
) -> tuple[list[Group], dict[tuple[int, int], np.ndarray], bool]:
    """Put what a run recorded of a step in the place of what was sampled again.

    Returns:
        The groups; the trainer's logprobs of the recorded ones; and whether the recorded ones have
        the tokens that were sampled again, so that the others are the run's, too.
    """
    file = run_dir / "trajectories" / f"step_{step}.parquet"
    train_logprobs: dict[tuple[int, int], np.ndarray] = {}
    if not file.is_file():
        return list(groups), train_logprobs, True
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in pq.read_table(file).to_pylist():
        if row["split"] == "train":
            rows.setdefault(row["group_id"], []).append(row)
    merged, is_same = [], True
    for g, group in enumerate(groups):
        own_rows = sorted(rows.get(group.id, []), key=lambda row: row["sample"])
        trajectories = list(group.trajectories)
        if len(own_rows) != len(trajectories):
            merged.append(group)
            continue
        for i, row in enumerate(own_rows):
            trajectory = recorded_trajectory(group, trajectories[i], row)
            if trajectory is None:
                continue
            ids = [sequence.ids for sequence in trajectory.sequences]
            sampled = [sequence.ids for sequence in trajectories[i].sequences]
            is_same &= all(map(np.array_equal, ids, sampled))
            trajectories[i] = trajectory
            if row["train_logprobs"] is not None:
                values = np.asarray(row["train_logprobs"], np.float32)
                train_logprobs[g, i] = values[np.asarray(row["response_mask"], bool)]
        merged.append(replace(group, trajectories=tuple(trajectories)))
    if not is_same:
        log.warning(
            "step %d is not sampled again as it was (another engine or other threads); groups that "
            "the run did not record differ from its own",
            step,
        )
    return merged, train_logprobs, is_same


def recorded_trajectory(
    group: Group, sampled: Trajectory, row: Mapping[str, Any]
) -> Trajectory | None:
    """Return a trajectory as it was recorded; None if it has several sequences, or images that came
    with later turns."""
    layout = json.loads(row["turns"])
    if len(layout["sequences"]) != 1 or len(sampled.sequences) != 1:
        return None
    sequence, n = sampled.sequences[0], group.prefix_length
    response = np.asarray(row["response_ids"], np.int32)
    mask = np.asarray(row["response_mask"], bool)
    later_images = len(sequence.images) != len(dict(group.images)) and len(layout["turns"]) > 1
    if later_images:
        return None
    logprobs = None
    if row["rollout_logprobs"] is not None:
        values = np.asarray(row["rollout_logprobs"], np.float32)
        logprobs = np.concatenate([np.zeros(n, np.float32), values])
    recorded = TokenSequence(
        np.concatenate([group.prefix, response]).astype(np.int32),
        np.concatenate([np.zeros(n, bool), mask]),
        logprobs,
        np.concatenate([np.full(n, -1), np.asarray(row["weight_versions"])]).astype(np.int32),
        sequence.images,
    )
    if np.array_equal(recorded.ids, sequence.ids):
        recorded = replace(recorded, columns=sequence.columns)
    elif sequence.columns:
        return None  # the experts of other tokens would be lost
    turns = tuple(
        Turn(0, turn["start"] + n, turn["end"] + n, turn["finish_reason"], turn["reward"])
        for turn in layout["turns"]
    )
    return replace(sampled, sequences=(recorded,), turns=turns, reward=row["reward"])
