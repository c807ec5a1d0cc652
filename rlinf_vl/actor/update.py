"""One training step of a rank: micro-batches in, a gradient and an optimizer step per mini-batch out.

The loss is a sum over micro-batches and ranks of terms whose denominators are global counts, agreed before the first
micro-batch. So neither loss nor gradient depends on how trajectories are packed or who holds them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from rlinf_vl.actor.fsdp import clip_gradients, micro_step, reshard_all
from rlinf_vl.algorithms import aggregate, divergence, importance_weights, policy_loss
from rlinf_vl.models.families import VisionFeatures
from rlinf_vl.models.transfer import on_device
from rlinf_vl.observe.metrics import MetricSums
from rlinf_vl.observe.spans import span
from rlinf_vl.types import MicroBatch


@dataclass(frozen=True, slots=True)
class LossSettings:
    """The `algorithm.*` keys that shape the loss; their meaning is documented in `config.schema.AlgorithmConfig`."""

    aggregation: str
    clip_low: float
    clip_high: float
    clip_c: float | None
    kl_beta: float
    kl_estimator: str
    entropy_bonus: float
    tis_clip: float | None
    tis_level: str
    old_logprobs: str  # `algorithm.recompute_logprobs`: "auto", "true" or "false"


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """One optimizer step of a rank: its `count` micro-batches (made anew on each call), each with the features of its
    images where they are known, and the global loss denominator."""

    batches: Callable[[], Iterable[tuple[MicroBatch, VisionFeatures | None]]]
    count: int
    denominator: int


def micro_batch_loss(
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    batch: MicroBatch,
    settings: LossSettings,
    denominator: int,
    *,
    old_logprobs: torch.Tensor | None = None,
    ref_logprobs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, MetricSums]:
    """This micro-batch's share of the mini-batch loss (a scalar), and its part of the metrics.

    Args:
        logprobs, entropy: float32 [R], differentiable, of the current weights.
        old_logprobs: float32 [R], of the weights before the first optimizer step; None: the current ones.
        ref_logprobs: float32 [R], of the reference policy, when kl_beta > 0.
    """
    device = logprobs.device
    mask = torch.ones(len(logprobs), dtype=torch.bool, device=device)
    segments, advantages = (on_device(x, device) for x in (batch.trajectories, batch.advantages))
    rollout = None if batch.rollout_logprobs is None else on_device(batch.rollout_logprobs, device)
    n_segments = int(batch.trajectories[-1]) + 1 if len(logprobs) else 0
    train = logprobs.detach() if old_logprobs is None else old_logprobs
    old = rollout if settings.old_logprobs == "false" else train
    assert old is not None, "the config asks for rollout.return_logprobs"
    weights = None
    if settings.tis_clip is not None:
        assert rollout is not None, "the config asks for rollout.return_logprobs"
        weights = importance_weights(
            train,
            rollout,
            mask,
            clip=settings.tis_clip,
            level=settings.tis_level,
            segment_ids=segments,
            n_segments=n_segments,
        )
    per_token, stats = policy_loss(
        logprobs,
        old,
        advantages,
        mask,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        clip_c=settings.clip_c,
        weights=weights,
    )
    sums, n = MetricSums(), len(logprobs)
    if settings.kl_beta > 0:
        assert ref_logprobs is not None
        kl = divergence(ref_logprobs, logprobs, mask, settings.kl_estimator)
        per_token = per_token + settings.kl_beta * kl
        sums.add("actor/ref_kl", kl.detach().sum(), n)
    if settings.entropy_bonus:
        per_token = per_token - settings.entropy_bonus * entropy
    loss = aggregate(per_token, mask, segments, settings.aggregation, denominator=denominator, n_segments=n_segments)

    sums.add("actor/entropy", entropy.detach().sum(), n)
    for name in ("clip_fraction", "dual_clip_fraction", "approx_kl"):
        if n and (name != "dual_clip_fraction" or settings.clip_c is not None):
            sums.add(f"actor/{name}", stats[name] * n, n)
    if n and rollout is not None:
        difference = rollout - train
        sums.add("actor/rollout_train_kl", difference.sum(), n)
        sums.add("actor/rollout_train_k3", divergence(train, rollout, mask, "k3").sum(), n)
        sums.add("actor/rollout_train_abs_diff_mean", difference.abs().sum(), n)
        sums.maximum("actor/rollout_train_abs_diff_max", difference.abs().max())
    if n and weights is not None and settings.tis_clip is not None:
        sums.add("actor/tis_mean", weights.sum(), n)
        sums.add("actor/tis_square", weights.square().sum(), n)
        sums.add("actor/tis_clip_fraction", (weights >= settings.tis_clip).sum(), n)
    return loss, sums


def logprobs_before(policy: nn.Module, minibatches: Sequence[MiniBatch], when: str) -> list[list[torch.Tensor]]:
    """Logprobs of the weights as they are, for every micro-batch of every mini-batch; [] where no pass is needed.

    The first optimizer step starts from these very weights, so its own forward gives them: `auto` makes the pass for the
    mini-batches behind it only, `true` for all, `false` (the engine's logprobs stand in) for none.
    """
    first = {"true": 0, "auto": 1, "false": len(minibatches)}[when]
    with torch.no_grad():
        return [
            [policy(batch, features)[0] for batch, features in mini.batches()] if m >= first else []
            for m, mini in enumerate(minibatches)
        ]


def update(
    policy: nn.Module,
    reference: nn.Module | None,
    optimizer: torch.optim.Optimizer,
    scheduler,
    minibatches: Sequence[MiniBatch],
    settings: LossSettings,
    *,
    world_size: int,
    max_grad_norm: float,
    on_logprobs: Callable[[int, int, MicroBatch, torch.Tensor], None] | None = None,
) -> MetricSums:
    """Train on this rank's mini-batches, one optimizer step each. Collective: all ranks call it with equal counts.

    `on_logprobs(m, i, batch, logprobs)` is shown the logprobs, float32 [R], of micro-batch i of mini-batch m that the weights
    before the first optimizer step give (`recompute_logprobs: false`: before this one).

    FSDP averages gradients over ranks while the loss is a sum over them, hence the factor `world_size`. A step whose
    gradient norm is not finite is skipped and counted (`actor/skipped_steps`).
    """
    sums = MetricSums()
    with span("old logprobs"):
        old = logprobs_before(policy, minibatches, settings.old_logprobs)
    for m, mini in enumerate(minibatches):
        for i, (batch, features) in enumerate(mini.batches()):
            ref_logprobs = None
            if reference is not None:
                with torch.no_grad(), span("reference"):
                    ref_logprobs, _ = reference(batch, features)
            micro_step(policy, last=i == mini.count - 1)
            with span("forward", micro_batch=i):
                logprobs, entropy = policy(batch, features)
            loss, part = micro_batch_loss(
                logprobs,
                entropy,
                batch,
                settings,
                mini.denominator,
                old_logprobs=old[m][i] if old[m] else None,
                ref_logprobs=ref_logprobs,
            )
            if on_logprobs is not None:
                on_logprobs(m, i, batch, old[m][i] if old[m] else logprobs.detach())
            with span("backward", micro_batch=i):
                (loss * world_size).backward()
            part.add("actor/loss", loss.detach(), 0)  # a sum over micro-batches and ranks; counted once per mini-batch
            sums.merge(part)
        reshard_all(policy)
        with span("optimizer", mini_batch=m):
            norm = clip_gradients(policy, max_grad_norm)
            finite = torch.isfinite(torch.tensor(norm))
            if finite:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        scheduler.step()
        # Every rank reports these; only ratios matter, so the equal weights cancel. The loss is summed over ranks.
        sums.add("actor/grad_norm", norm, 1)
        sums.add("actor/skipped_steps", 0.0 if finite else 1.0, 1)
        sums.add("actor/loss", 0.0, 1.0 / world_size)
    sums.add("actor/lr", scheduler.get_last_lr()[0], 1)
    return sums
