"""Measure a config's own engine and trainer in this process, and fit `Rates` to the seconds.

| measured | fitted |
|---|---|
| groups of several numbers and lengths | seconds of a group, of a step of decoding, of a response |
| the tower on the groups' images | FLOPs a second of the tower |
| updates on few and many groups | seconds of a micro-batch's operations, FLOPs a second |
| AdamW alone; a weight sync | bytes a second of the optimizer; seconds of a sync |
| copies, and an exchange of two processes | bytes a second of memory, and from rank to rank |
| changed weights, encoded, copied and written | bytes a second of a weight sync of changes |
| plans, and records of a step's trajectories | seconds of a step beside its phases; of a record |
| groups and updates beside neighbours | how much slower a slot is while all cores compute |

Groups are the config's own, with images, environment and rewards.
On a CPU seconds are those of the processor: other programs on the machine do not change them. On a
GPU they are those of the clock. The fitted rates belong to products of the model's own shapes.
"""

import math
import os
import pickle
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from rlinf_vl.actor.trainer import Trainer
from rlinf_vl.calibrate.exchange import exchange_rate
from rlinf_vl.calibrate.neighbours import full_slowdown
from rlinf_vl.config.schema import Config
from rlinf_vl.controller.batch import plan_of
from rlinf_vl.controller.tasks import make_tasks
from rlinf_vl.controller.trajectory_writer import TrajectoryWriter, image_token
from rlinf_vl.local.learner import LocalLearner, LocalSync
from rlinf_vl.local.pool import LocalPool
from rlinf_vl.local.supervise import settled_process
from rlinf_vl.preflight.calibration import Calibration, fit
from rlinf_vl.preflight.decoding import Lengths
from rlinf_vl.preflight.model import Model
from rlinf_vl.preflight.rates import Rates
from rlinf_vl.preflight.step_time import OPTIMIZER_BYTES, engine_shape
from rlinf_vl.types import Group, GroupSummary
from rlinf_vl.weights.changes import Delta

#: Numbers of groups that are generated, shares of a step's.
SHARES = (1 / 16, 1 / 4, 1 / 2, 1.0)
REPEATS = 3
SPLITS = {"train": "the full length", "val": "a quarter of it"}
#: Rows of the data set from which groups are made.
ROWS = 256


@dataclass(frozen=True)
class _Generated:
    """Groups that were generated, and the seconds that it took."""

    split: str
    summaries: list[GroupSummary]
    groups: list[Group]
    seconds: float

    @property
    def decoded(self) -> list[float]:
        """Groups, steps of decoding, and tokens that were decoded in them."""
        lengths = [t.response_tokens for s in self.summaries for t in s.trajectories]
        return [float(len(self.summaries)), float(max(lengths)), float(sum(lengths))]


def measure(
    config: Config, model_path: str, report: Callable[[str], None] = lambda text: None
) -> Calibration:
    """Measure and fit. The config's placement is not used: one engine and one rank are measured.

    Args:
        model_path: of the checkpoint (the toy's).
        report: is told what is being measured.
    """
    name = config.rollout.model.model_path
    config = _single(config)
    with settled_process(config) as device:
        clock = _clock(device)
        model = Model(config, model_path)
        report("starting the engine")
        pool = LocalPool(config, model_path, device, lambda: None)
        try:
            rows = _usable_rows(config, pool)
            generated = _generate(config, pool, rows, clock, report)
            report("loading the policy")
            learner = LocalLearner(config, model_path, device, total_steps=100)
            try:
                sync_s = _sync_seconds(config, pool, learner, clock)
                trained = _train(config, learner, generated, clock, report)
                report("planning and recording")
                full = max(generated, key=lambda one: (one.split == "train", len(one.groups)))
                plan_s, record_s = _controller_seconds(config, model_path, learner, full, clock)
                cores = len(os.sched_getaffinity(0)) if device == "cpu" else 0
                report("measuring beside neighbours")
                text = model.shape.get_text_config()
                slowdown = full_slowdown(
                    partial(_round_seconds, config, pool, learner, rows, clock),
                    cores,
                    text.hidden_size,
                    getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
                )
            finally:
                learner.stop()
        finally:
            pool.stop()
    report("measuring memory and exchange")
    memory = _copy_rate(device)
    node, collective_s = exchange_rate() if device == "cpu" else (0.0, 0.0)
    lengths = _lengths(generated, trained)
    (group_s, step_s, token_s), decode_left = fit(
        [one.decoded for one in generated], [one.seconds for one in generated]
    )
    (batch_s, train_token_s), train_left = fit(
        [[one.micro_batches, one.tokens] for one in trained],
        [one.seconds - one.optimizer for one in trained],
    )
    budget, mode = config.runner.max_tokens_per_mbs, config.actor.fsdp_config.gradient_checkpointing
    trace, shape = model.step(budget, mode=mode), engine_shape(config, model)
    work = trace.work
    flops = (work.products + work.grouped) / budget
    optimizer_s = statistics.median(one.optimizer / one.steps for one in trained)
    image_tokens = [one.image_tokens for one in trained if one.images > 0]
    image_s = sum(one.images for one in trained) / max(1, sum(image_tokens))
    none = math.inf  # what the fitted rates include already
    rates = Rates(
        source=f"calibrate with {name} on {device}",
        products=flops / max(train_token_s, 1e-12),
        grouped=flops / max(train_token_s, 1e-12),
        attention=none,
        tower=shape.tower / image_s if image_s else none,
        memory=none,
        operation_s=batch_s / trace.operations,
        overlaps_host=False,
        decode_products=2 * shape.active / max(token_s, 1e-12),
        decode_memory=none,
        decode_step_s=0.0,
        decode_layer_s=step_s / shape.layers,
        decode_row_s=0.0,
        prefill_products=none,
        node=node or memory,
        network=node or memory,
        host=memory,
        disk=1e9,
        collective_s=collective_s,
        optimizer_memory=OPTIMIZER_BYTES * model.weights.trained / max(optimizer_s, 1e-9),
        sync_s=sync_s,
        wake_s=0.0,
        group_s=group_s,
        step_s=plan_s,
        record_s=record_s,
        cores=cores,
        full_slowdown=slowdown,
        changes=_changes_rate(device),
    )
    return Calibration(rates, lengths, name, device, max(decode_left, train_left))


def _single(config: Config) -> Config:
    """Return the config for one engine and one rank in this process."""
    placement = {"actor,rollout": "0"}
    cluster = replace(config.cluster, backend="local", component_placement=placement)
    actor = replace(config.actor, context_parallel_size=1)
    runner = replace(config.runner, schedule="sync", mismatch_check_interval=-1)
    # The second split has the same rows, and answers of a quarter of the length.
    params = config.algorithm.sampling_params
    short = replace(params, max_new_tokens=max(1, (params.max_new_tokens or 4) // 4))
    algorithm = replace(config.algorithm, val_sampling_params=short)
    data = replace(config.data, val_data_paths=config.data.train_data_paths)
    return replace(
        config, cluster=cluster, actor=actor, runner=runner, algorithm=algorithm, data=data
    )


def _clock(device: str) -> Callable[[], float]:
    """Return the clock that measures: of the processor on a CPU, of the wall on a GPU."""
    if device == "cpu":
        return time.process_time

    def wall() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return wall


def _usable_rows(config: Config, pool: LocalPool) -> list[int]:
    """Return numbers of rows that can be used, of both splits."""
    n_rows = min(*pool.start().values(), max(ROWS, config.data.rollout_batch_size))
    rows_by_split = [pool.filter_rows(split, range(n_rows)).kept for split in SPLITS]
    return [row for row in rows_by_split[0] if row in rows_by_split[1]]


def _generate(
    config: Config,
    pool: LocalPool,
    rows: list[int],
    clock: Callable[[], float],
    report: Callable[[str], None],
) -> list[_Generated]:
    """Generate groups in several numbers, with responses of full and of a quarter of the length."""
    group_size, generated, step = config.algorithm.group_size, list[_Generated](), 0
    sizes = sorted({max(1, round(share * config.data.rollout_batch_size)) for share in SHARES})
    pool.submit(make_tasks("train", rows[:1], group_size, 0, 0)).results()  # the first is slower
    for split in ("train", "val"):  # of the full length, and of a quarter (`_single`)
        for size in sizes:
            report(f"generating {size} groups of {SPLITS[split]}")
            for _ in range(REPEATS):
                step += 1
                first = step * sizes[-1] % max(1, len(rows) - size)
                tasks = make_tasks(split, rows[first : first + size], group_size, step, step)
                start = clock()
                results = pool.submit(tasks).results()
                seconds = clock() - start
                summaries = [result.summary for result in results]
                one = _Generated(split, summaries, [result.group for result in results], seconds)
                if one.decoded[1] > 0:
                    generated.append(one)
    return generated


@dataclass(frozen=True)
class _Trained:
    """An update: its work, and the seconds of its parts."""

    micro_batches: int
    tokens: float
    steps: int
    seconds: float
    optimizer: float
    images: float
    image_tokens: float


def _train(
    config: Config,
    learner: LocalLearner,
    generated: Sequence[_Generated],
    clock: Callable[[], float],
    report: Callable[[str], None],
) -> list[_Trained]:
    """Update the policy on groups that were generated."""
    trained = []
    trainer = learner.rank.trainer
    image_tokens = trainer.batches.collate.image_tokens
    for step, one in enumerate(generated):
        report(f"training on {len(one.groups)} groups")
        # Rewards that differ, so that every group is trained on, as a policy that learns has them.
        summaries = [_with_rewards(summary) for summary in one.summaries]
        plan = plan_of(step, summaries, config, learner)
        learner.fetch_groups(plan.minibatches, one.groups)
        start = clock()
        trainer.batches.prepare(one.groups)
        images = clock() - start
        start = clock()
        learner.update(step, plan.minibatches, plan.advantages, (), plan.kl_scale, lambda: None)
        seconds = clock() - start
        steps = len(plan.minibatches)
        grids = {i.hash: grid for group in one.groups for i, grid in group.images}
        trained.append(
            _Trained(
                micro_batches=sum(len(mini[0].micro_batches) for mini in plan.minibatches),
                tokens=sum(_packed_tokens(summary) for summary in summaries),
                steps=steps,
                seconds=seconds,
                optimizer=steps * _optimizer_seconds(trainer, clock),
                images=images if step else 0.0,  # the first is slower
                image_tokens=int(sum(image_tokens(np.stack(list(grids.values()))))) if grids else 0,
            )
        )
    return trained[1:]


def _controller_seconds(
    config: Config,
    model_path: str,
    learner: LocalLearner,
    one: _Generated,
    clock: Callable[[], float],
) -> tuple[float, float]:
    """Return the seconds of planning a step, and of recording its trajectories."""
    summaries = [_with_rewards(summary) for summary in one.summaries]
    n_recorded = config.runner.trajectories.train_groups
    recorded = dict(enumerate(one.groups if n_recorded < 0 else one.groups[:n_recorded]))
    # Without trackers: nothing is sent anywhere.
    logger = replace(config.runner.logger, logger_backends=[])
    quiet = replace(config, runner=replace(config.runner, logger=logger))
    planning, recording = [], []
    with TemporaryDirectory() as folder:
        token = image_token(config, model_path)
        writer = TrajectoryWriter(quiet, Path(folder), model_path, token)
        for step in range(1, REPEATS + 2):
            start = clock()
            plan = plan_of(step, summaries, config, learner)
            planning.append(clock() - start)
            start = clock()
            writer.write(step, [("train", recorded, plan.advantages, ())])
            recording.append(clock() - start)
    # The first is slower: it imports, and opens the tokenizer.
    return statistics.median(planning[1:]), statistics.median(recording[1:])


def _round_seconds(
    config: Config,
    pool: LocalPool,
    learner: LocalLearner,
    rows: list[int],
    clock: Callable[[], float],
) -> float:
    """Return the seconds in which half of a step's groups are generated and trained on."""
    size = max(1, config.data.rollout_batch_size // 2)
    start = clock()
    tasks = make_tasks("train", rows[:size], config.algorithm.group_size, 0, 0)
    results = pool.submit(tasks).results()
    plan = plan_of(0, [_with_rewards(result.summary) for result in results], config, learner)
    learner.fetch_groups(plan.minibatches, [result.group for result in results])
    learner.update(0, plan.minibatches, plan.advantages, (), plan.kl_scale, lambda: None)
    return clock() - start


def _with_rewards(summary: GroupSummary) -> GroupSummary:
    trajectories = tuple(
        replace(t, reward=float(i % 2)) for i, t in enumerate(summary.trajectories)
    )
    return replace(summary, trajectories=trajectories)


def _packed_tokens(summary: GroupSummary) -> float:
    """Return the tokens of a group in packed rows, where its prompt stands once."""
    response_tokens = sum(t.tokens - summary.prompt_tokens for t in summary.trajectories)
    return summary.prompt_tokens + response_tokens


def _optimizer_seconds(trainer: Trainer, clock: Callable[[], float]) -> float:
    """Return the seconds of an optimizer step, of gradients of 0."""
    weights = [p for p in trainer.policy.parameters() if p.requires_grad]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    start = clock()
    trainer.optimizer.step()
    seconds = clock() - start
    trainer.optimizer.zero_grad(set_to_none=True)
    return seconds


def _sync_seconds(
    config: Config, pool: LocalPool, learner: LocalLearner, clock: Callable[[], float]
) -> float:
    """Return the seconds of a weight sync within this process; the first, which checks, is left."""
    sync, seconds = LocalSync(config, learner, pool.engine), []
    for version in range(1, 4):
        start = clock()
        sync(version)
        seconds.append(clock() - start)
    return min(seconds[1:])


def _copy_rate(device: str) -> float:
    """Return the bytes a second that a copy reads and writes."""
    source = torch.zeros(2**26, dtype=torch.uint8, device=device)
    target, clock, seconds = torch.empty_like(source), _clock(device), []
    for _ in range(5):
        start = clock()
        target.copy_(source)
        seconds.append(clock() - start)
    return 2 * source.nbytes / max(min(seconds), 1e-6)


def _changes_rate(device: str) -> float:
    """Return the bytes a second of float32 weights, all changed, from a process to another.

    The copies between the processes are those of a pickle, there and back.
    """
    old = torch.zeros(2**24, dtype=torch.int32, device=device)
    new, target, clock, seconds = old + 1, torch.zeros_like(old), _clock(device), []
    pieces = (("weight", (len(new),), 0, len(new)),)
    for _ in range(REPEATS):
        start = clock()
        sent_changes = Delta.between(
            old, torch.cat([new]), number=0, base=0, dtype="float32", pieces=pieces
        )
        received_changes: Delta = pickle.loads(pickle.dumps(sent_changes, pickle.HIGHEST_PROTOCOL))
        for _, _, places, values in received_changes.parts(device):
            target[places] = values
        seconds.append(clock() - start)
    return new.nbytes / max(min(seconds), 1e-6)


def _lengths(generated: Sequence[_Generated], trained: Sequence[_Trained]) -> Lengths:
    """Return the mean lengths of the groups with responses of the full length."""
    full = [one for one in generated if one.split == "train"]
    summaries = [summary for one in full for summary in one.summaries]
    responses = [t.response_tokens for s in summaries for t in s.trajectories]
    prompts = statistics.fmean(s.prompt_tokens for s in summaries)
    images = sum(one.image_tokens for one in trained) / sum(len(one.groups) for one in generated)
    # Of several turns, what lies between answers counts as a part of the prompt.
    between = statistics.fmean(
        t.tokens - s.prompt_tokens - t.response_tokens for s in summaries for t in s.trajectories
    )
    longest = statistics.fmean(
        max(t.response_tokens for s in one.summaries for t in s.trajectories) for one in full
    )
    return Lengths(
        prompts, min(images, prompts), statistics.fmean(responses) + max(0.0, between), longest
    )
