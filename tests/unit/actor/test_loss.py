"""What `algorithm.*` chooses arrives in the loss of a micro-batch."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlinf_vl.actor.loss import micro_batch_loss
from rlinf_vl.actor.terms import Passes
from rlinf_vl.algorithms.losses import MiniBatchTokens
from rlinf_vl.config.presets import with_presets
from rlinf_vl.config.schema import AlgorithmConfig
from rlinf_vl.config.schema.algorithm import RejectionConfig
from rlinf_vl.errors import RunError
from rlinf_vl.observe.metrics import MetricSums
from rlinf_vl.types import MicroBatch


def batch_of(
    trajectories: list[int], advantages: list[float], turns: list[int] | None = None
) -> MicroBatch:
    n, none = len(trajectories), np.zeros(0, np.int64)
    return MicroBatch(
        ids=np.zeros(n, np.int64), positions=np.zeros((4, n), np.int64), cu_seqlens=np.array([0, n]), prefix=np.array([-1]),
        copies=np.array([1]), row_columns={},
        predict=np.arange(n), targets=np.zeros(n, np.int64), trajectories=np.array(trajectories),
        turns=np.array(turns or trajectories),
        advantages=np.array(advantages, np.float32), rollout_logprobs=None, versions=np.zeros(n, np.int32), columns={},
        images=(), pixel_values=None,
        grids=np.zeros((0, 3), np.int64), image_positions=none, image_features=none,
        image_runs=np.zeros((0, 2), np.int64),
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
    loss, sums = micro_batch_loss(
        old.clone().requires_grad_(), torch.zeros(4), old, Passes(), batch, algorithm, 4
    )
    gaps = [0.2, -0.1]
    weights = {"token": [math.exp(g) for g in gaps], "sequence": [math.exp(sum(gaps))] * 2}
    weights["geometric"] = [math.exp(sum(gaps) / 2)] * 2
    assert loss.item() == pytest.approx((4 - sum(weights[level])) / 4)
    metrics = sums.compute()
    assert metrics["actor/rollout_train_kl"] == pytest.approx(-sum(gaps) / 2)
    assert metrics["actor/rollout_train_abs_diff_mean"] == pytest.approx(0.15)
    assert metrics["actor/rollout_train_abs_diff_max"] == pytest.approx(0.2)
    assert metrics["actor/tis_mean"] == pytest.approx((sum(weights[level]) + 2) / 4)


#: Of three sequences: their products are 2, 4 and 0.2.
RATIOS = [2.0, 1.0, 4.0, 1.0, 0.2, 1.0]
KEPT = {  # → tokens that stay
    ("token", None): [1, 1, 1, 1, 0, 1],
    ("token", 0.25): [1, 1, 1, 1, 0, 0],
    ("sequence", None): [1, 1, 0, 0, 0, 0],
    (None, 0.25): [1, 1, 1, 1, 0, 0],
}


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize(("level", "veto"), KEPT, ids=str)
def test_what_is_rejected_leaves_all_terms_of_the_loss_and_no_count_below_it(
    level, veto, aggregation
):
    algorithm = with_presets(AlgorithmConfig(
        loss_agg_func=aggregation, entropy_bonus=0.1, importance_sampling_clip=3.0,
        rejection=RejectionConfig(level=level, veto=veto),
    ))  # fmt: skip
    advantages, kept = [1.0, 1.0, -2.0, -2.0, 3.0, 3.0], KEPT[level, veto]
    rollout = np.linspace(-1, -2, 6, dtype=np.float32)
    old = torch.from_numpy(rollout) + torch.tensor(RATIOS).log()
    entropy = torch.arange(6.0)
    batch = replace(batch_of([0, 0, 1, 1, 2, 2], advantages), rollout_logprobs=rollout)
    logprobs = old.clone().requires_grad_()
    loss, sums = micro_batch_loss(logprobs, entropy, old, Passes(), batch, algorithm, 10)
    loss.backward()
    weights = [min(ratio, 3.0) for ratio in RATIOS]
    tokens = [
        k * -(w * a + 0.1 * e)
        for k, w, a, e in zip(kept, weights, advantages, entropy.tolist(), strict=True)
    ]
    lengths = [
        max(1, sum(kept[i // 2 * 2 :][:2])) if aggregation == "seq-mean-token-mean" else 1
        for i in range(6)
    ]
    assert loss.item() == pytest.approx(
        sum(t / n for t, n in zip(tokens, lengths, strict=True)) / 10
    )
    gradient = [
        -k * w * a / n / 10 for k, w, a, n in zip(kept, weights, advantages, lengths, strict=True)
    ]
    assert logprobs.grad.tolist() == pytest.approx(gradient)
    metrics = sums.compute()
    assert metrics["actor/rejected_tokens"] == pytest.approx(1 - sum(kept) / 6)
    assert metrics["actor/rejected_sequences"] == pytest.approx(
        sum(0 in kept[i : i + 2] for i in (0, 2, 4)) / 3
    )
    assert metrics.get("actor/vetoed_sequences") == (None if veto is None else pytest.approx(1 / 3))
    # before rejection: of all
    assert metrics["actor/tis_mean"] == pytest.approx(sum(weights) / 6)
    assert metrics["actor/rollout_train_kl"] == pytest.approx(-sum(map(math.log, RATIOS)) / 6)
    low, high = (0.2, 4.0) if level == "sequence" else (min(RATIOS), max(RATIOS))
    assert metrics["actor/rejection_ratio_min"] == pytest.approx(low)
    assert metrics["actor/rejection_ratio_max"] == pytest.approx(high)


def test_a_micro_batch_whose_tokens_are_all_rejected_has_no_loss_and_no_gradient():
    algorithm = with_presets(AlgorithmConfig(rejection=RejectionConfig(level="token")))
    batch = replace(
        batch_of([0, 0, 1], [1.0, 1.0, 1.0]),
        rollout_logprobs=np.array([-9.0, -9, np.nan], np.float32),
    )
    logprobs = torch.full((3,), -1.0, requires_grad=True)
    loss, sums = micro_batch_loss(
        logprobs, torch.zeros(3), logprobs.detach(), Passes(), batch, algorithm, 3
    )
    loss.backward()
    assert loss.item() == 0 and logprobs.grad.tolist() == [0, 0, 0]
    assert (
        sums.compute()["actor/rejected_tokens"] == 1 and "actor/clip_fraction" not in sums.compute()
    )


@pytest.mark.parametrize("old_policy", ["start", "sampler", "interpolated"])
def test_whose_probability_is_below_the_line(old_policy):
    """One token that this step's weights sampled, and one of two steps before; the weights have moved since the step's start."""
    algorithm = with_presets(AlgorithmConfig(
        old_policy=old_policy, clip_ratio_low=1, clip_ratio_high=9, importance_sampling_fix=old_policy != "sampler",
        importance_sampling_clip=1.2,
    ))  # fmt: skip
    rollout, old, now = [-1.0, -2.0], [-1.0, -1.7], [-0.9, -1.5]
    batch = replace(
        batch_of([0, 0], [1.0, 1.0]), rollout_logprobs=np.array(rollout, np.float32), versions=np.array([5, 3], np.int32)
    )  # fmt: skip
    logprobs = torch.tensor(now, requires_grad=True)
    start = torch.tensor(old) if old_policy == "start" else None  # no pass is made for the others
    loss, sums = micro_batch_loss(
        logprobs, torch.zeros(2), start, Passes(), batch, algorithm, 2, version=5
    )
    assert ("actor/rollout_train_kl" in sums.compute()) == (start is not None)
    base = {"start": old, "sampler": rollout, "interpolated": [-1.0, -2.0 + 2 / 3 * 0.5]}[
        old_policy
    ]
    weights = [
        min(1.2, math.exp(b - r)) if old_policy != "sampler" else 1.0
        for b, r in zip(base, rollout, strict=True)
    ]
    expected = -sum(w * math.exp(n - b) for w, n, b in zip(weights, now, base, strict=True)) / 2
    assert loss.item() == pytest.approx(expected)


def test_what_a_loss_logs_is_a_mean_over_all_tokens_however_they_are_packed():
    """Five tokens in one micro-batch, in two of unequal size, and with one that has none in the mask."""

    def logs(inputs):
        inputs.log("up", inputs.ratio(), inputs.advantages > 0)
        inputs.log("logprob", inputs.logprobs)
        return -inputs.advantages * inputs.ratio()

    algorithm = with_presets(
        AlgorithmConfig(loss_type="mine.py:logs", importance_sampling_fix=False)
    )
    trajectories, advantages = [0, 0, 1, 1, 2], [1.0, 1.0, -2.0, -2.0, 3.0]
    old = torch.tensor([-1.0, -2.0, -0.5, -3.0, -0.25])
    logprobs = old + torch.tensor([0.2, 0.4, 0.0, -0.3, 0.1])

    def metrics(*cuts):
        state = []
        for start, end in zip((0, *cuts), (*cuts, 5), strict=True):
            part = slice(start, end)
            batch = batch_of(trajectories[part], advantages[part])
            _, sums = micro_batch_loss(
                logprobs[part].clone().requires_grad_(), torch.zeros(end - start), old[part],
                Passes(), batch, algorithm, 5, logs,
            )  # fmt: skip
            state.append(sums.state())
        return MetricSums.merged(state).compute()

    up = (math.exp(0.2) + math.exp(0.4) + math.exp(0.1)) / 3
    for cuts in ((), (4,), (2, 4), (0, 1)):
        computed = metrics(*cuts)
        assert computed["loss/up"] == pytest.approx(up, rel=1e-6)
        assert computed["loss/logprob"] == pytest.approx(float(logprobs.mean()), rel=1e-6)


def test_a_loss_that_did_not_ask_for_its_mini_batch_is_told_how():
    """A micro-batch's tokens in their place would make the loss depend on the packing."""

    def mean_of_all(inputs):
        return inputs.logprobs - inputs.minibatch_tokens().start_logprobs.mean()

    algorithm = with_presets(
        AlgorithmConfig(loss_type="mine.py:mean_of_all", importance_sampling_fix=False)
    )
    logprobs = torch.tensor([-1.0, -2.0])
    arguments = (torch.zeros(2), logprobs, Passes(), batch_of([0, 1], [1.0, -1.0]), algorithm, 4)
    with pytest.raises(RunError, match="NEEDS_MINIBATCH = True"):
        micro_batch_loss(logprobs, *arguments, mean_of_all)
    tokens = MiniBatchTokens(torch.zeros(4), torch.tensor([-1.0, -2.0, -3.0, -4.0]), torch.zeros(4))
    loss, _ = micro_batch_loss(logprobs, *arguments, mean_of_all, minibatch=tokens)
    assert loss.item() == pytest.approx((1.5 + 0.5) / 4)
