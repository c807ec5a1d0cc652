"""The loss of one micro-batch, as `algorithm.*` says, and its part of the step's metrics."""

from collections.abc import Callable
from typing import Any

import torch

from rlinf_vl.actor.rejection import reject
from rlinf_vl.actor.terms import Passes, extra_terms, guided_advantages
from rlinf_vl.algorithms import aggregate, divergence, importance_weights, interpolated_logprobs, policy_loss
from rlinf_vl.config.schema import AlgorithmConfig
from rlinf_vl.errors import RunError
from rlinf_vl.models.transfer import on_device
from rlinf_vl.observe.metrics import MetricSums
from rlinf_vl.types import MicroBatch


def needs_start(algorithm: AlgorithmConfig) -> bool:
    """Return whether the loss of every mini-batch depends on the logprobs of the weights before the first optimizer step."""
    rejection = algorithm.rejection
    return algorithm.old_policy == "start" or rejection.level is not None or rejection.veto is not None


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
    """This micro-batch's share of the mini-batch loss (a scalar), and its part of the metrics.

    Args:
        logprobs, entropy: float32 [R], differentiable, of the current weights.
        start_logprobs: float32 [R], detached, of the weights before the first optimizer step. None: no pass was made with them,
            because `algorithm.old_policy` and `algorithm.rejection` need none (`needs_start`); nothing is compared with the engine.
        passes: what further passes over the same tokens say, for `extra_terms`.
        denominator: the mini-batch's, a count over all its micro-batches and ranks.
        loss_code: what `algorithm.loss_type` names where that is code.
        version: of the weights before the first optimizer step.

    Raises:
        RunError: that code fails.
    """
    assert start_logprobs is not None or not needs_start(algorithm), "no pass was made with the weights of the start"
    n, device = len(logprobs), logprobs.device
    mask = torch.ones(n, dtype=torch.bool, device=device)
    sequences = batch.turns if algorithm.turns_are_sequences else batch.trajectories
    n_segments = int(sequences.max()) + 1 if n else 0
    segments: Any = {"segment_ids": on_device(sequences, device), "n_segments": n_segments}
    rollout = None if batch.rollout_logprobs is None else on_device(batch.rollout_logprobs, device)
    current = logprobs.detach()
    train = current if start_logprobs is None else start_logprobs
    compared: Any = n
    if rollout is not None and batch.corrupted is not None:
        # Sampled on another image than it is trained on: nothing to correct, and nothing to compare.
        corrupted = on_device(batch.corrupted, device)
        rollout, compared = torch.where(corrupted, train, rollout), n - corrupted.sum()
    ratio_base = train
    if algorithm.old_policy != "start":
        assert rollout is not None, "validation asks for rollout.return_logprobs"
        ratio_base = rollout
        if algorithm.old_policy == "interpolated":
            staleness = (version - on_device(batch.versions, device)).clamp(min=0)
            ratio_base = interpolated_logprobs(current, rollout, staleness)
    weights, clip = None, algorithm.importance_sampling_clip
    if algorithm.importance_sampling_fix:
        assert rollout is not None, "validation asks for rollout.return_logprobs"
        level = algorithm.importance_sampling_level
        weights = importance_weights(ratio_base, rollout, mask, clip=clip, level=level, **segments)
    kept, sums = reject(train, rollout, mask, algorithm.rejection, **segments)
    try:
        per_token, stats = policy_loss(
            logprobs,
            ratio_base,
            guided_advantages(on_device(batch.advantages, device), ratio_base, passes, algorithm),
            kept,
            clip_low=algorithm.clip_ratio_low,
            clip_high=algorithm.clip_ratio_high,
            clip_c=algorithm.clip_ratio_c,
            weights=weights,
            loss_type=loss_code or algorithm.loss_type,
            tau_pos=algorithm.tau_pos,
            tau_neg=algorithm.tau_neg,
            **segments,
        )
    except Exception as error:  # whatever code of the user does
        if loss_code is None:
            raise
        raise RunError(f"algorithm.loss_type: {algorithm.loss_type} failed: {type(error).__name__}: {error}") from error
    for name, weight, values in extra_terms(logprobs, entropy, passes, algorithm):
        per_token = per_token + weight * values if weight else per_token
        sums.add(name, values.detach().sum(), n)
    assert algorithm.loss_agg_func is not None
    mode = algorithm.loss_agg_func.removesuffix("-norm")  # the constant length is in the denominator
    loss = aggregate(per_token, kept, mode=mode, denominator=denominator, **segments)
    if not n:
        return loss, sums
    trained = kept.sum()
    for name in ("clip_fraction", "dual_clip_fraction", "approx_kl"):
        if name in stats and (name != "dual_clip_fraction" or algorithm.clip_ratio_c is not None):
            sums.add(f"actor/{name}", stats[name] * trained, trained)
    if rollout is not None and start_logprobs is not None:
        difference = rollout - start_logprobs
        sums.add("actor/rollout_train_kl", difference.sum(), compared)
        sums.add("actor/rollout_train_k3", divergence(start_logprobs, rollout, mask, "k3").sum(), compared)
        sums.add("actor/rollout_train_abs_diff_mean", difference.abs().sum(), compared)
        sums.maximum("actor/rollout_train_abs_diff_max", difference.abs().max())
    if weights is not None:
        sums.add("actor/tis_mean", weights.sum(), n)
        sums.add("actor/tis_square", weights.square().sum(), n)
        sums.add("actor/tis_clip_fraction", (weights >= clip).sum(), n)
    return loss, sums
