"""What `algorithm.*` chooses arrives in the loss of a micro-batch."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlinf_vl.actor.loss import micro_batch_loss
from rlinf_vl.actor.terms import Passes
from rlinf_vl.config.presets import with_presets
from rlinf_vl.config.schema import AlgorithmConfig
from rlinf_vl.types import MicroBatch


def batch_of(trajectories: list[int], advantages: list[float], turns: list[int] | None = None) -> MicroBatch:
    n, none = len(trajectories), np.zeros(0, np.int64)
    return MicroBatch(
        ids=np.zeros(n, np.int64), positions=np.zeros((4, n), np.int64), cu_seqlens=np.array([0, n]), prefix=np.array([-1]),
        copies=np.array([1]), routes=None,
        predict=np.arange(n), targets=np.zeros(n, np.int64), trajectories=np.array(trajectories),
        turns=np.array(turns or trajectories),
        advantages=np.array(advantages, np.float32), rollout_logprobs=None, columns={}, images=(), pixel_values=None,
        grids=np.zeros((0, 3), np.int64), image_positions=none, image_features=none,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        # ratios of tokens: e^0.2, e^0.4, e^-0.3; of sequences: e^0.3 twice, e^-0.3
        ("actor", -math.exp(0.2) - 1.4 + 2 * math.exp(-0.3)),
        ("gspo", -2 * math.exp(0.3) + 2 * math.exp(-0.3)),
    ],
)
def test_the_loss_type_says_whose_ratio_counts(loss_type, expected):
    algorithm = with_presets(
        AlgorithmConfig(
            loss_type=loss_type,
            loss_agg_func="token-mean",
            clip_ratio_low=0.3,
            clip_ratio_high=0.4,
            importance_sampling_fix=False,
        )
    )
    batch = batch_of([0, 0, 1], [1.0, 1.0, -2.0])
    old = torch.tensor([-1.0, -2.0, -0.5])
    logprobs = (old + torch.tensor([0.2, 0.4, -0.3])).requires_grad_()
    loss, _ = micro_batch_loss(logprobs, torch.zeros(3), old, Passes(), batch, algorithm, 3)
    assert loss.item() == pytest.approx(expected / 3)


@pytest.mark.parametrize("changes", [{}, {"credit": "turn"}, {"state_advantage_weight": 1.0}])
def test_a_sequence_is_a_trajectory_or_a_turn(changes):
    """Two trajectories, the first of two turns: its ratio is e^0.2 as a whole, of its turns e^0.3 and e^0."""
    algorithm = with_presets(AlgorithmConfig(
        loss_type="gspo", loss_agg_func="seq-mean-token-mean", clip_ratio_low=1, clip_ratio_high=1,
        importance_sampling_fix=False, **changes,
    ))  # fmt: skip
    batch = batch_of([0, 0, 0, 1], [1.0, 1.0, 1.0, -2.0], [0, 0, 1, 2])
    old = torch.tensor([-1.0, -2.0, -0.5, -0.5])
    logprobs = (old + torch.tensor([0.2, 0.4, 0.0, -0.3])).requires_grad_()
    loss, _ = micro_batch_loss(logprobs, torch.zeros(4), old, Passes(), batch, algorithm, 10)
    first = -math.exp(0.3) - 1 if changes else -math.exp(0.2)
    assert loss.item() == pytest.approx((first + 2 * math.exp(-0.3)) / 10)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_tokens_sampled_on_a_corrupted_image_are_taken_as_the_trainers_own(level):
    """Their engine's logprobs are of another image: no weight, and nothing to compare. The others are as without them."""
    algorithm = with_presets(AlgorithmConfig(importance_sampling_level=level))
    old = torch.tensor([-1.0, -2.0, -0.5, -3.0])
    rollout = np.array([-1.2, -1.9, -6.0, -9.0], np.float32)
    batch = replace(
        batch_of([0, 0, 1, 1], [1.0, 1.0, -2.0, -2.0]), rollout_logprobs=rollout,
        corrupted=np.array([False, False, True, True]),
    )  # fmt: skip
    loss, sums = micro_batch_loss(old.clone().requires_grad_(), torch.zeros(4), old, Passes(), batch, algorithm, 4)
    gaps = [0.2, -0.1]
    weights = {"token": [math.exp(g) for g in gaps], "sequence": [math.exp(sum(gaps))] * 2}
    weights["geometric"] = [math.exp(sum(gaps) / 2)] * 2
    assert loss.item() == pytest.approx((4 - sum(weights[level])) / 4)
    metrics = sums.compute()
    assert metrics["actor/rollout_train_kl"] == pytest.approx(-sum(gaps) / 2)
    assert metrics["actor/rollout_train_abs_diff_mean"] == pytest.approx(0.15)
    assert metrics["actor/rollout_train_abs_diff_max"] == pytest.approx(0.2)
    assert metrics["actor/tis_mean"] == pytest.approx((sum(weights[level]) + 2) / 4)
