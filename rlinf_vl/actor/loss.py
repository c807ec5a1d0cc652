"""Compute the loss of one micro-batch from `algorithm.*`, and its part of the step's metrics."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlinf_vl.actor.rejection import reject
from rlinf_vl.actor.terms import Passes, guided_advantages, loss_terms
from rlinf_vl.algorithms import (
    aggregate,
    divergence,
    importance_weights,
    interpolated_logprobs,
)
from rlinf_vl.algorithms.losses import LossInputs, MiniBatchTokens, formula_of, weighted_loss
from rlinf_vl.config.schema import AlgorithmConfig
from rlinf_vl.errors import RunError
from rlinf_vl.models.transfer import on_device
from rlinf_vl.observe.metrics import MetricSums
from rlinf_vl.types import MicroBatch


def needs_start(algorithm: AlgorithmConfig) -> bool:
    """Return whether every mini-batch's loss needs logprobs of the weights before the step.

    These are the weights before the first optimizer step.
    """
    rejection = algorithm.rejection
    return (
        algorithm.old_policy == "start" or rejection.level is not None or rejection.veto is not None
    )


class _Columns(Mapping[str, torch.Tensor]):
    """The columns of the sampled tokens; one is copied to the device when a loss reads it."""

    def __init__(self, columns: dict[str, np.ndarray], device: torch.device) -> None:
        self._columns = columns
        self._device = device

    def __getitem__(self, name: str) -> torch.Tensor:
        return on_device(self._columns[name], self._device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


def micro_batch_loss(
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    start_logprobs: torch.Tensor | None,
    passes: Passes,
    batch: MicroBatch,
    algorithm: AlgorithmConfig,
    denominator: int,
    loss_code: Callable[..., torch.Tensor] | None = None,
    version: int = 0,
    weight_means: Sequence[float] | None = None,
    minibatch: MiniBatchTokens | None = None,
) -> tuple[torch.Tensor, MetricSums]:
    """Return this micro-batch's part of the mini-batch loss (a scalar) and of the metrics.

    Args:
        logprobs, entropy: float32 [R], differentiable, of the current weights.
        start_logprobs: float32 [R], detached, of the weights before the first optimizer step. None:
            no forward was made with them, because `algorithm.old_policy` and `algorithm.rejection`
            need none (`needs_start`); then nothing is compared with the engine.
        passes: results of the other forwards over the same tokens, for `loss_terms`.
        denominator: the mini-batch's, a count over all its micro-batches and ranks.
        loss_code: the function that `algorithm.loss_type` names where that is code.
        version: of the weights before the first optimizer step.
        minibatch: all tokens of the mini-batch, if the loss asks for them.
        weight_means: by trajectory, what its importance weights are divided by; None: nothing.

    Raises:
        RunError: that code fails.
    """
    assert start_logprobs is not None or not needs_start(algorithm), "no forward with the start's"
    n_tokens, device = len(logprobs), logprobs.device
    mask = torch.ones(n_tokens, dtype=torch.bool, device=device)
    segments = segments_of(batch, algorithm, device)
    trainer_logprobs = logprobs.detach() if start_logprobs is None else start_logprobs
    rollout_logprobs, n_compared = _engine_logprobs(batch, trainer_logprobs)
    versions = on_device(batch.versions, device)
    ratio_base = trainer_logprobs
    if algorithm.old_policy != "start":
        ratio_base = _stale_logprobs(
            logprobs.detach(), rollout_logprobs, (version - versions).clamp(min=0), algorithm
        )
    weights = _engine_correction(ratio_base, rollout_logprobs, mask, algorithm, segments)
    loss_mask, sums = reject(
        trainer_logprobs, rollout_logprobs, mask, algorithm.rejection, **segments
    )
    advantages = on_device(batch.advantages, device)
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=ratio_base,
        advantages=guided_advantages(advantages, ratio_base, passes, algorithm),
        mask=loss_mask,
        weights=_normalized(weights, weight_means, batch),
        entropy=entropy,
        start_logprobs=start_logprobs,
        rollout_logprobs=rollout_logprobs,
        reference_logprobs=passes.reference,
        teacher_logprobs=passes.teacher,
        versions=versions,
        version=version,
        columns=_Columns(batch.columns, device),
        minibatch=minibatch,
        is_part=True,
        **_bounds(algorithm),
        **segments,
    )
    per_token, stats = _policy_loss(inputs, algorithm.loss_type, loss_code)
    for name, (total, count) in inputs.measurements.items():
        sums.add(f"loss/{name}", total, count)
    # Terms of weight 0 are reported only.
    for name, weight, values in loss_terms(logprobs, entropy, passes, algorithm):
        per_token = per_token + weight * values if weight else per_token
        sums.add(name, values.detach().sum(), n_tokens)
    assert algorithm.loss_agg_func is not None
    mode = algorithm.loss_agg_func.removesuffix("-norm")  # its constant length is in `denominator`
    loss = aggregate(per_token, loss_mask, mode=mode, denominator=denominator, **segments)
    if n_tokens:
        _add_clip_metrics(sums, inputs, stats)
        _add_engine_metrics(sums, inputs, weights, n_compared, algorithm.importance_sampling_clip)
    return loss, sums


def _normalized(
    weights: torch.Tensor | None, weight_means: Sequence[float] | None, batch: MicroBatch
) -> torch.Tensor | None:
    """Return the importance weights, divided by the means of their trajectories, if there are any."""
    if weights is None or weight_means is None:
        return weights
    means = torch.tensor(weight_means, dtype=weights.dtype, device=weights.device)
    return weights / means[on_device(batch.trajectories, weights.device)]


def segments_of(
    batch: MicroBatch, algorithm: AlgorithmConfig, device: torch.device
) -> dict[str, Any]:
    """Return the sequences of the sampled tokens, by their names in `aggregate`."""
    sequences = batch.turns if algorithm.turns_are_sequences else batch.trajectories
    n_segments = int(sequences.max()) + 1 if len(sequences) else 0
    return {"segment_ids": on_device(sequences, device), "n_segments": n_segments}


def engine_weights(
    batch: MicroBatch, start_logprobs: torch.Tensor, algorithm: AlgorithmConfig
) -> torch.Tensor | None:
    """Return the importance weights of a micro-batch's tokens, before they are normalized; None
    without `algorithm.importance_sampling_fix`."""
    rollout_logprobs, _ = _engine_logprobs(batch, start_logprobs)
    mask = torch.ones_like(start_logprobs, dtype=torch.bool)
    segments = segments_of(batch, algorithm, start_logprobs.device)
    return _engine_correction(start_logprobs, rollout_logprobs, mask, algorithm, segments)


def _engine_logprobs(
    batch: MicroBatch, trainer_logprobs: torch.Tensor
) -> tuple[torch.Tensor | None, Any]:
    """Return the engine's logprobs, if it gave any, and how many tokens they can be compared on.

    Tokens sampled on another image than they are trained on get the trainer's: their logprobs
    differ by intent, so nothing is corrected or compared.
    """
    n_compared: Any = len(trainer_logprobs)
    if batch.rollout_logprobs is None:
        return None, n_compared
    rollout_logprobs = on_device(batch.rollout_logprobs, trainer_logprobs.device)
    if batch.corrupted is not None:
        corrupted = on_device(batch.corrupted, trainer_logprobs.device)
        rollout_logprobs = torch.where(corrupted, trainer_logprobs, rollout_logprobs)
        n_compared = n_compared - corrupted.sum()
    return rollout_logprobs, n_compared


def _stale_logprobs(
    current_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor | None,
    staleness: torch.Tensor,
    algorithm: AlgorithmConfig,
) -> torch.Tensor:
    """Return the denominator of the loss's ratio where `algorithm.old_policy` is not the start."""
    assert rollout_logprobs is not None, "validation asks for rollout.return_logprobs"
    if algorithm.old_policy == "interpolated":
        return interpolated_logprobs(current_logprobs, rollout_logprobs, staleness)
    return rollout_logprobs


def _bounds(algorithm: AlgorithmConfig) -> dict[str, Any]:
    """Return the settings that bound the ratio, by their name in `LossInputs`."""
    return {
        "clip_low": algorithm.clip_ratio_low,
        "clip_high": algorithm.clip_ratio_high,
        "clip_c": algorithm.clip_ratio_c,
    }


def _engine_correction(
    ratio_base: torch.Tensor,
    rollout_logprobs: torch.Tensor | None,
    mask: torch.Tensor,
    algorithm: AlgorithmConfig,
    segments: Any,
) -> torch.Tensor | None:
    """Return the importance weights of `algorithm.importance_sampling_fix`; None without it."""
    if not algorithm.importance_sampling_fix:
        return None
    assert rollout_logprobs is not None, "validation asks for rollout.return_logprobs"
    clip, level = algorithm.importance_sampling_clip, algorithm.importance_sampling_level
    return importance_weights(
        ratio_base, rollout_logprobs, mask, clip=clip, level=level, **segments
    )


def _policy_loss(
    inputs: LossInputs, loss_type: str, code: Callable[..., torch.Tensor] | None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of each token, and its statistics; RunError: the user's code fails."""
    try:
        return weighted_loss(inputs, formula_of(code or loss_type))
    except Exception as error:  # a user's code may raise anything
        if code is None:
            raise
        raise RunError(
            f"algorithm.loss_type: {loss_type} failed: {type(error).__name__}: {error}"
        ) from error


def _add_clip_metrics(
    sums: MetricSums, inputs: LossInputs, stats: Mapping[str, torch.Tensor]
) -> None:
    """Add what the loss clipped, and how far the policy has moved, over the trained tokens."""
    n_trained = inputs.mask.sum()
    for name in ("clip_fraction", "dual_clip_fraction", "approx_kl"):
        if name in stats and (name != "dual_clip_fraction" or inputs.clip_c is not None):
            sums.add(f"actor/{name}", stats[name] * n_trained, n_trained)


def _add_engine_metrics(
    sums: MetricSums,
    inputs: LossInputs,
    weights: torch.Tensor | None,
    n_compared: Any,
    clip: float,
) -> None:
    """Add how far the engine's logprobs are from the trainer's, and the weights that correct it,
    before they are normalized."""
    start_logprobs, rollout_logprobs = inputs.start_logprobs, inputs.rollout_logprobs
    if rollout_logprobs is not None and start_logprobs is not None:
        difference = rollout_logprobs - start_logprobs
        all_tokens = torch.ones_like(inputs.mask)
        k3 = divergence(start_logprobs, rollout_logprobs, all_tokens, "k3")
        sums.add("actor/rollout_train_kl", difference.sum(), n_compared)
        sums.add("actor/rollout_train_k3", k3.sum(), n_compared)
        sums.add("actor/rollout_train_abs_diff_mean", difference.abs().sum(), n_compared)
        sums.maximum("actor/rollout_train_abs_diff_max", difference.abs().max())
    if weights is not None:
        sums.add("actor/tis_mean", weights.sum(), len(weights))
        sums.add("actor/tis_square", weights.square().sum(), len(weights))
        sums.add("actor/tis_clip_fraction", (weights >= clip).sum(), len(weights))
