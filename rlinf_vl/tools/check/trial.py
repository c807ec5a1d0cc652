"""Calls a user's loss, advantage and trackers once on small inputs, before a run.

A run would call the first two after its first rollout, minutes later, and warn of a tracker only.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from rlinf_vl.algorithms.estimators import (
    Estimator,
    EstimatorInputs,
    advantages,
    estimated,
    takes_inputs,
)
from rlinf_vl.algorithms.losses import LossInputs, formula_of, weighted_loss
from rlinf_vl.config import Config
from rlinf_vl.config.schema.algorithm import ADVANTAGES, LOSSES
from rlinf_vl.config.schema.runner import TRACKERS
from rlinf_vl.observe.tracker import TrackedRun, without_code
from rlinf_vl.user_code import CodeError, is_code, load_code

#: Tokens of each of two answers.
N_TOKENS = 4


class _AnyColumn(dict[str, Any]):
    """Columns of any name, of one value: a run's rows, rewards and engines bring them.

    Attributes:
        was_read: whether one was asked for.
    """

    was_read = False

    def __init__(self, value: Any) -> None:
        self._value = value

    def __missing__(self, name: str) -> Any:
        self.was_read = True
        return self._value


def algorithm_problems(config: Config) -> Iterator[str]:
    """Yield why the user's loss or advantage, if the config names one, fails on small inputs."""
    algorithm, files = config.algorithm, config.runner.code_files
    for key, name, kind, call in (
        ("loss_type", algorithm.loss_type, LOSSES, _try_loss),
        ("adv_type", algorithm.adv_type, ADVANTAGES, _try_advantage),
    ):
        if not is_code(name):
            continue
        try:
            call(load_code(name, {}, files, kind=kind.kind, signature=kind.signature), config)
        except CodeError as error:
            yield f"algorithm.{key}: {error}"
        except Exception as error:  # a user's code may raise anything
            yield (
                f"algorithm.{key}: {name} failed on two answers of {N_TOKENS} tokens: "
                f"{type(error).__name__}: {error}"
            )


def tracker_problems(config: Config) -> Iterator[str]:
    """Yield why a tracker of the user's fails: it is opened for an empty folder, logs a number and
    is closed."""
    runner, sent_config = config.runner, without_code(asdict(config))
    for name in filter(is_code, runner.logger.logger_backends):
        try:
            opener = load_code(
                name, {}, runner.code_files, kind=TRACKERS.kind, signature=TRACKERS.signature
            )
            with tempfile.TemporaryDirectory() as folder:
                project, experiment = runner.logger.project_name, runner.experiment_name
                tracker = opener(TrackedRun(Path(folder), project, experiment, sent_config))
                tracker.log(0, {"reward/mean": 0.5})
                tracker.log_samples(0, "train", [])
                tracker.close()
        except CodeError as error:
            yield f"runner.logger.logger_backends: {error}"
        except Exception as error:
            yield f"runner.logger.logger_backends: {name} failed: {type(error).__name__}: {error}"


def _try_loss(loss: Callable[..., Any], config: Config) -> None:
    """Compute a loss and its gradient.

    Raises:
        ValueError: one of them is not finite, or there is no gradient.
        Exception: what the loss raised.
    """
    algorithm, columns = config.algorithm, _AnyColumn(torch.zeros(2 * N_TOKENS))
    generator = torch.Generator().manual_seed(0)

    def draw() -> torch.Tensor:
        return -torch.rand(2 * N_TOKENS, generator=generator)

    logprobs = draw().requires_grad_()
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=draw(),
        advantages=torch.tensor([1.0, -1.0]).repeat_interleave(N_TOKENS),
        mask=torch.ones(2 * N_TOKENS, dtype=torch.bool),
        segment_ids=torch.arange(2).repeat_interleave(N_TOKENS),
        n_segments=2,
        entropy=-draw(),
        start_logprobs=draw(),
        rollout_logprobs=draw(),
        reference_logprobs=draw(),
        teacher_logprobs=draw(),
        versions=torch.zeros(2 * N_TOKENS, dtype=torch.int32),
        columns=columns,
        clip_low=algorithm.clip_ratio_low,
        clip_high=algorithm.clip_ratio_high,
        clip_c=algorithm.clip_ratio_c,
    )
    try:
        per_token, _ = weighted_loss(inputs, formula_of(loss))
    except Exception:
        if columns.was_read:  # of which the form is unknown here
            return
        raise
    if not per_token.requires_grad:
        raise ValueError("its result has no gradient: compute it from inputs.logprobs")
    per_token.sum().backward()
    values = torch.stack([per_token.detach(), torch.zeros_like(per_token)])
    if logprobs.grad is not None:
        values[1] = logprobs.grad
    if not columns.was_read and not torch.isfinite(values).all():
        raise ValueError(f"its values or gradients are not finite: {values.tolist()}")


def _try_advantage(estimator: Estimator, config: Config) -> None:
    """Compute the advantages of two groups, one of them with equal rewards."""
    rewards = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    group_ids, tokens = [0] * 4 + [1] * 4, torch.arange(1, 9)
    normalize = bool(config.algorithm.normalize_advantages)
    if not takes_inputs(estimator):
        advantages(estimator, rewards, group_ids, tokens, normalize=normalize)
        return
    parts, columns = _AnyColumn(rewards), _AnyColumn(0.0)
    inputs = EstimatorInputs(
        rewards=rewards,
        group_ids=torch.tensor(group_ids),
        problem_ids=["p:0"] * 4 + ["p:1"] * 4,
        tokens=tokens,
        parts=parts,
        columns=[columns] * 8,
        statuses=["stop"] * 8,
        correct=rewards > 0,
        turn_trajectories=torch.arange(8),
        turn_rewards=rewards.clone(),
        turn_tokens=tokens.clone(),
        turn_versions=torch.zeros(8, dtype=torch.int64),
        turn_states=[""] * 8,
        token_rewards=[torch.zeros(n) for n in tokens.tolist()],
        step=1,
        normalize=normalize,
    )
    try:
        estimated(estimator, inputs)
    except Exception:
        if parts.was_read or columns.was_read:  # of which the values are unknown here
            return
        raise
