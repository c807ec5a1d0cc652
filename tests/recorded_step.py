"""A recorded training step of a tiny member, as a sound run records it, for the tests of replays."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import tiny
import torch

from rlinf_vl.config.load import parse_config
from rlinf_vl.config.schema import Config
from rlinf_vl.controller.step_plan import plan_step
from rlinf_vl.models.loading import DTYPES
from rlinf_vl.observe.replay_file import RecordedStep
from rlinf_vl.tools.verify.replay.record import planned, recorded_logprobs, recorded_update
from rlinf_vl.tools.verify.replay.subject import Subject
from rlinf_vl.types import Group, GroupSummary

SHAPES = ([(2, 3)], [], [(1, 1), (3, 2)])
TILES = ([(2, 2)], [], [(2, 2), (2, 2)])
LENGTHS = ([5, 9, 1], [4, 6, 8], [7, 3, 12])


def tiny_run(precision: str = "fp32", **keys) -> Config:
    """The config of a run of tiny members; `keys` with `__` for dots replace some."""
    config = parse_config("toy-grpo-cpu")
    config.actor.fsdp_config.mixed_precision.param_dtype = precision
    config.rollout.model.precision = precision
    config.algorithm.sampling_params.temperature = 0.7
    config.runner.max_tokens_per_mbs = 60
    config.actor.optim.weight_decay = 0.1
    config.actor.model.freeze_vision_tower = False
    for name, value in keys.items():
        *sections, leaf = name.split("__")
        section = config
        for part in sections:
            section = getattr(section, part)
        setattr(section, leaf, value)
    return config


def tiny_subject(model_type: str = "qwen3_vl", seed: int = 0, **sizes) -> Subject:
    model = tiny.tiny_model(seed, family=model_type, **sizes)
    return Subject(
        tiny.tiny_family(model_type),
        model.config,
        {name: weight.detach() for name, weight in model.named_parameters()},
        tiny.banned(),
        tiny.tiles if model_type == "gemma3" else tiny.pixels,
        tiny.IMAGE_TOKENS,
        tiny.PAD,
    )


def tiny_groups(model_type: str = "qwen3_vl", seed: int = 3) -> tuple[Group, ...]:
    """Groups with an image, with none and with two; their rewards differ."""
    rng = np.random.default_rng(seed)
    shapes = TILES if model_type == "gemma3" else SHAPES
    if model_type == "qwen3":
        shapes = ([], [], [])
    groups = []
    for n, (sizes, lengths) in enumerate(zip(shapes, LENGTHS, strict=True)):
        group = tiny.group(rng, sizes, lengths, name=f"g{n}")
        rewards = [1.0, 0.0, 0.25 * n]
        trajectories = [
            replace(t, reward=r, turns=(replace(t.turns[0], reward=r),))
            for t, r in zip(group.trajectories, rewards, strict=True)
        ]
        groups.append(replace(group, trajectories=tuple(trajectories)))
    return tuple(groups)


def recorded_step(
    subject: Subject,
    config: Config,
    groups: tuple[Group, ...],
    *,
    sampling: Callable[[], AbstractContextManager] = nullcontext,
    training: Callable[[], AbstractContextManager] = nullcontext,
    sampler: Subject | None = None,
) -> RecordedStep:
    """The step that a run of the torch engine and the trainer records of these groups.

    `sampling` and `training` make contexts for the run's engine and its trainer; `sampler` has the weights
    of its engine.
    """
    model_type = "gemma3" if subject.pixels is tiny.tiles else subject.config.model_type
    placeholders = tiny.IMAGE_TOKENS.placeholder_ids if model_type != "qwen3" else (-1,)
    with training():
        summaries = [GroupSummary.of(group, placeholders) for group in groups]
        plan = plan_step(
            summaries,
            config.algorithm,
            ranks=1,
            budget=config.runner.max_tokens_per_mbs,
            micro_batch_size=None,
        )
    step = RecordedStep(
        1, "", groups, planned(plan), plan.advantages,
        weights={name: value.numpy() for name, value in subject.weights.items()},
    )  # fmt: skip
    dtype = DTYPES[config.rollout.model.precision]
    with sampling():
        step = recorded_logprobs(sampler or subject, step, config, dtype)
    torch.manual_seed(0)
    with training():
        return recorded_update(subject, step, config)
