"""Compute the loss of one micro-batch from `algorithm.*`, and its part of the step's metrics."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from rlinf_vl.actor.rejection import reject
from rlinf_vl.actor.terms import Passes, extra_terms, guided_advantages
from rlinf_vl.algorithms import (
    aggregate,
    divergence,
    importance_weights,
    interpolated_logprobs,
)
from rlinf_vl.algorithms.losses import LossInputs, formula_of, weighted_loss
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
) -> tuple[torch.Tensor, MetricSums]:
    """Return this micro-batch's part of the mini-batch loss (a scalar) and of the metrics.

    Args:
        logprobs, entropy: float32 [R], differentiable, of the current weights.
        start_logprobs: float32 [R], detached, of the weights before the first optimizer step. None:
            no forward was made with them, because `algorithm.old_policy` and `algorithm.rejection`
            need none (`needs_start`); then nothing is compared with the engine.
        passes: results of the other forwards over the same tokens, for `extra_terms`.
        denominator: the mini-batch's, a count over all its micro-batches and ranks.
        loss_code: the function that `algorithm.loss_type` names where that is code.
        version: of the weights before the first optimizer step.

    Raises:
        RunError: that code fails.
    """
    assert start_logprobs is not None or not needs_start(algorithm), (
        "no pass was made with the weights of the start"
    )
    n_tokens, device = len(logprobs), logprobs.device
    mask = torch.ones(n_tokens, dtype=torch.bool, device=device)
    sequences = batch.turns if algorithm.turns_are_sequences else batch.trajectories
    n_segments = int(sequences.max()) + 1 if n_tokens else 0
    segments: Any = {"segment_ids": on_device(sequences, device), "n_segments": n_segments}
    rollout_logprobs = (
        None if batch.rollout_logprobs is None else on_device(batch.rollout_logprobs, device)
    )
    current_logprobs = logprobs.detach()
    trainer_logprobs = current_logprobs if start_logprobs is None else start_logprobs
    versions = on_device(batch.versions, device)
    n_compared: Any = n_tokens
    if rollout_logprobs is not None and batch.corrupted is not None:
        # Tokens sampled on another image than they are trained on: their logprobs differ by intent,
        # so nothing is corrected or compared.
        corrupted = on_device(batch.corrupted, device)
        rollout_logprobs = torch.where(corrupted, trainer_logprobs, rollout_logprobs)
        n_compared = n_tokens - corrupted.sum()
    # The denominator of the loss's ratio: `algorithm.old_policy` says of which weights.
    ratio_base = trainer_logprobs
    if algorithm.old_policy != "start":
        assert rollout_logprobs is not None, "validation asks for rollout.return_logprobs"
        ratio_base = rollout_logprobs
        if algorithm.old_policy == "interpolated":
            staleness = (version - versions).clamp(min=0)
            ratio_base = interpolated_logprobs(current_logprobs, rollout_logprobs, staleness)
    weights, clip = None, algorithm.importance_sampling_clip
    if algorithm.importance_sampling_fix:
        assert rollout_logprobs is not None, "validation asks for rollout.return_logprobs"
        level = algorithm.importance_sampling_level
        weights = importance_weights(
            ratio_base, rollout_logprobs, mask, clip=clip, level=level, **segments
        )
    loss_mask, sums = reject(
        trainer_logprobs, rollout_logprobs, mask, algorithm.rejection, **segments
    )
    advantages = on_device(batch.advantages, device)
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=ratio_base,
        advantages=guided_advantages(advantages, ratio_base, passes, algorithm),
        mask=loss_mask,
        weights=weights,
        entropy=entropy,
        start_logprobs=start_logprobs,
        rollout_logprobs=rollout_logprobs,
        reference_logprobs=passes.reference,
        teacher_logprobs=passes.teacher,
        versions=versions,
        version=version,
        columns=_Columns(batch.columns, device),
        clip_low=algorithm.clip_ratio_low,
        clip_high=algorithm.clip_ratio_high,
        clip_c=algorithm.clip_ratio_c,
        tau_pos=algorithm.tau_pos,
        tau_neg=algorithm.tau_neg,
        **segments,
    )
    try:
        per_token, stats = weighted_loss(inputs, formula_of(loss_code or algorithm.loss_type))
    except Exception as error:  # a user's code may raise anything
        if loss_code is None:
            raise
        raise RunError(
            f"algorithm.loss_type: {algorithm.loss_type} failed: {type(error).__name__}: {error}"
        ) from error
    # Terms of weight 0 are reported only.
    for name, weight, values in extra_terms(logprobs, entropy, passes, algorithm):
        per_token = per_token + weight * values if weight else per_token
        sums.add(name, values.detach().sum(), n_tokens)
    assert algorithm.loss_agg_func is not None
    mode = algorithm.loss_agg_func.removesuffix("-norm")  # its constant length is in `denominator`
    loss = aggregate(per_token, loss_mask, mode=mode, denominator=denominator, **segments)
    if not n_tokens:
        return loss, sums
    n_trained = loss_mask.sum()
    for name in ("clip_fraction", "dual_clip_fraction", "approx_kl"):
        if name in stats and (name != "dual_clip_fraction" or algorithm.clip_ratio_c is not None):
            sums.add(f"actor/{name}", stats[name] * n_trained, n_trained)
    if rollout_logprobs is not None and start_logprobs is not None:
        difference = rollout_logprobs - start_logprobs
        sums.add("actor/rollout_train_kl", difference.sum(), n_compared)
        sums.add(
            "actor/rollout_train_k3",
            divergence(start_logprobs, rollout_logprobs, mask, "k3").sum(),
            n_compared,
        )
        sums.add("actor/rollout_train_abs_diff_mean", difference.abs().sum(), n_compared)
        sums.maximum("actor/rollout_train_abs_diff_max", difference.abs().max())
    if weights is not None:
        sums.add("actor/tis_mean", weights.sum(), n_tokens)
        sums.add("actor/tis_square", weights.square().sum(), n_tokens)
        sums.add("actor/tis_clip_fraction", (weights >= clip).sum(), n_tokens)
    return loss, sums
