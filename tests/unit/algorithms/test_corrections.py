"""Importance weights and rejection: hand values per level, loops, packing, overflow, garbage outside the mask."""

import math

import pytest
import torch

from rlinf_vl.algorithms import (
    IMPORTANCE_LEVELS,
    importance_weights,
    interpolated_logprobs,
    rejection_mask,
    weight_totals,
)

NAN, INF = float("nan"), float("inf")


def naive(train: list[float], rollout: list[float], clip: float | None, level: str) -> list[float]:
    """One sequence, masked tokens only."""
    if not train:
        return []
    deltas = [a - b for a, b in zip(train, rollout, strict=True)]
    if level == "sequence":
        deltas = [sum(deltas)] * len(deltas)
    if level == "geometric":
        deltas = [sum(deltas) / len(deltas)] * len(deltas)
    return [math.exp(d) if clip is None else min(math.exp(d), clip) for d in deltas]


@pytest.mark.parametrize(
    ("level", "clip", "expected"),
    [
        ("token", None, [2.0, 4.0, 0.5]),
        ("token", 3.0, [2.0, 3.0, 0.5]),
        ("sequence", None, [4.0, 4.0, 4.0]),  # 2 · 4 · ½
        ("sequence", 2.0, [2.0, 2.0, 2.0]),
        ("geometric", None, [4 ** (1 / 3)] * 3),
    ],
)
def test_by_hand(level, clip, expected):
    rollout = torch.tensor([-1.0, -2.0, -3.0])
    train = rollout + torch.tensor([2.0, 4.0, 0.5]).log()
    mask = torch.ones(3, dtype=torch.bool)
    weights = importance_weights(train, rollout, mask, clip=clip, level=level)
    torch.testing.assert_close(weights, torch.tensor(expected))


@pytest.mark.parametrize("level", IMPORTANCE_LEVELS)
@pytest.mark.parametrize("clip", [None, 1.1])
def test_matches_a_loop_and_packing_does_not_show(level, clip):
    generator = torch.Generator().manual_seed(1)
    train, rollout = (-torch.rand(3, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]]).bool()
    weights = importance_weights(train, rollout, mask, clip=clip, level=level)
    for row in range(3):
        inside = mask[row]
        expected = naive(train[row][inside].tolist(), rollout[row][inside].tolist(), clip, level)
        assert weights[row][inside].tolist() == pytest.approx(expected)
    assert torch.equal(weights[~mask], torch.zeros(int((~mask).sum()), dtype=torch.float64))

    ids = torch.tensor([4, -1, 9]).unsqueeze(1).expand(3, 5)
    packed = importance_weights(
        train.flatten(),
        rollout.flatten(),
        mask.flatten(),
        clip=clip,
        level=level,
        segment_ids=ids.flatten(),
    )
    torch.testing.assert_close(packed, weights.flatten())
    tight = importance_weights(
        train[mask], rollout[mask], mask[mask], clip=clip, level=level, segment_ids=ids[mask]
    )
    torch.testing.assert_close(tight, weights[mask])


def test_levels_differ_when_two_sequences_share_a_row():
    train, rollout = torch.tensor([[2.0, 2.0, 8.0]]).log(), torch.zeros(1, 3)
    mask = torch.ones(1, 3, dtype=torch.bool)
    ids = torch.tensor([[0, 0, 1]])
    split = importance_weights(train, rollout, mask, clip=None, level="sequence", segment_ids=ids)
    torch.testing.assert_close(split, torch.tensor([[4.0, 4.0, 8.0]]))
    whole = importance_weights(train, rollout, mask, clip=None, level="sequence")
    torch.testing.assert_close(whole, torch.full((1, 3), 32.0))


@pytest.mark.parametrize("level", IMPORTANCE_LEVELS)
def test_garbage_outside_the_mask_does_not_leak_and_nothing_carries_a_gradient(level):
    train = torch.tensor([-1.0, NAN, INF, -1.0, 5.0], requires_grad=True)
    rollout = torch.tensor([-1.0, 0.0, -INF, -1.0, NAN])
    mask = torch.tensor([True, False, False, True, False])
    weights = importance_weights(train, rollout, mask, clip=2.0, level=level)
    assert weights.tolist() == [1.0, 0.0, 0.0, 1.0, 0.0]
    assert not weights.requires_grad


@pytest.mark.parametrize("level", IMPORTANCE_LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [100.0, 1e4, INF])
def test_a_huge_gap_stays_finite(level, dtype, gap):
    train, rollout = torch.zeros(2, dtype=dtype), torch.tensor([-gap, 0.0], dtype=dtype)
    mask = torch.ones(2, dtype=torch.bool)
    assert torch.isfinite(importance_weights(train, rollout, mask, clip=None, level=level)).all()
    assert importance_weights(train, rollout, mask, clip=2.0, level=level)[0] == 2.0
    # The other way round the weight is (nearly) nothing.
    assert importance_weights(rollout, train, mask, clip=2.0, level=level)[0] < 1e-10


@pytest.mark.parametrize("level", IMPORTANCE_LEVELS)
@pytest.mark.parametrize("shape", [(0,), (3,), (2, 3)])
def test_an_empty_mask_gives_zeros(level, shape):
    garbage = torch.full(shape, NAN)
    weights = importance_weights(
        garbage, garbage, torch.zeros(shape, dtype=torch.bool), clip=2.0, level=level
    )
    assert torch.equal(weights, torch.zeros(shape))


def test_wrong_input_is_named():
    zeros, mask = torch.zeros(3), torch.ones(3, dtype=torch.bool)
    with pytest.raises(ValueError, match="token, sequence, geometric; got 'turn'"):
        importance_weights(zeros, zeros, mask, clip=2.0, level="turn")
    with pytest.raises(ValueError, match=r"rollout_logprobs has shape \(2,\), mask \(3,\)"):
        importance_weights(zeros, zeros[:2], mask, clip=2.0)
    with pytest.raises(ValueError, match="clip"):
        importance_weights(zeros, zeros, mask, clip=0.0)


#: Ratios of two sequences: their products are 0.8 and 8, their geometric means 0.8^(1/3) = 0.928 and 2.
RATIOS = [[4.0, 0.5, 0.4], [2.0, 2.0, 2.0]]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"level": "token", "low": 0.5, "high": 5.0}, [[1, 1, 0], [1, 1, 1]]),
        ({"level": "token", "low": 0.0, "high": 2.1}, [[0, 1, 1], [1, 1, 1]]),
        ({"level": "sequence", "low": 0.5, "high": 2.0}, [[1, 1, 1], [0, 0, 0]]),
        ({"level": "sequence", "low": 0.9, "high": 10.0}, [[0, 0, 0], [1, 1, 1]]),
        ({"level": "geometric", "low": 0.92, "high": 1.9}, [[1, 1, 1], [0, 0, 0]]),
        ({"level": "geometric", "low": 0.93, "high": math.inf}, [[0, 0, 0], [1, 1, 1]]),
        ({"level": None, "veto": 0.45}, [[0, 0, 0], [1, 1, 1]]),
        ({"level": None, "veto": 0.35}, [[1, 1, 1], [1, 1, 1]]),
        ({"level": "token", "low": 0.5, "high": 3.0, "veto": 0.45}, [[0, 0, 0], [1, 1, 1]]),
    ],
)
def test_rejection_by_hand(options, expected):
    rollout = torch.full((2, 4), -1.0)
    rollout[0, 3] = NAN  # outside the mask
    train = torch.full((2, 4), INF)
    train[:, :3] = rollout[:, :3] + torch.tensor(RATIOS).log() + 1e-6
    mask = torch.tensor([[True, True, True, False]] * 2)
    kept = rejection_mask(train, rollout, mask, **options)
    assert (
        kept.dtype == torch.bool and kept[:, :3].int().tolist() == expected and not kept[:, 3].any()
    )
    ids = torch.tensor([[7] * 4, [3] * 4])
    packed = rejection_mask(
        train.flatten(), rollout.flatten(), mask.flatten(), segment_ids=ids.flatten(), **options
    )
    assert torch.equal(packed, kept.flatten())
    tight = rejection_mask(train[mask], rollout[mask], mask[mask], segment_ids=ids[mask], **options)
    assert torch.equal(tight, kept[mask])


@pytest.mark.parametrize("level", IMPORTANCE_LEVELS)
def test_logprobs_that_are_no_numbers_are_rejected(level):
    """Alone at the level of tokens, with their sequence at the others; a token that the engine could not have sampled, too."""
    rollout, train = (
        torch.tensor([[-1.0, NAN], [-1.0, -INF], [-1.0, -1.0]]),
        torch.full((3, 2), -1.0),
    )
    kept = rejection_mask(
        train, rollout, torch.ones(3, 2, dtype=torch.bool), level=level, low=0.5, high=2.0
    )
    assert kept.tolist() == [[level == "token", False]] * 2 + [[True, True]]


def test_wrong_bounds_are_named():
    zeros, mask = torch.zeros(3), torch.ones(3, dtype=torch.bool)
    for low, high in ((2.0, 0.5), (1.0, 1.0), (-1.0, 2.0)):
        with pytest.raises(ValueError, match=f"low < high, got {low} and {high}"):
            rejection_mask(zeros, zeros, mask, level="token", low=low, high=high)
    with pytest.raises(ValueError, match="token, sequence, geometric; got 'turn'"):
        rejection_mask(zeros, zeros, mask, level="turn")


def test_old_logprobs_between_the_sampler_and_the_trainer():
    """By AReaL's formula: (v_old - v_sampled) / (v_trained - v_sampled) of the way, where v_trained = v_old + 1."""
    rollout, train = (
        torch.tensor([-1.0, -1.0, -1.0]),
        torch.tensor([-2.0, -2.0, -2.0], requires_grad=True),
    )
    old = interpolated_logprobs(train, rollout, torch.tensor([0, 1, 3]))
    assert old.tolist() == [-1.0, -1.5, -1.75] and not old.requires_grad


def test_sums_and_numbers_of_weights_by_owner():
    """Two sequences of owner 0, the first of two tokens, and one of owner 1; masked weights count nowhere."""
    weights = torch.tensor([2.0, 4.0, 1.0, 5.0, float("nan")])
    mask = torch.tensor([True, True, True, True, False])
    owners, segments = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 0, 1, 2, 2])
    options = {"owners": owners, "n_owners": 3, "segment_ids": segments, "n_segments": 3}
    totals, counts = weight_totals(weights, mask, level="token", **options)
    assert totals.tolist() == [7, 5, 0] and counts.tolist() == [3, 1, 0]
    totals, counts = weight_totals(weights, mask, level="sequence", **options)
    assert totals.tolist() == [3 + 1, 5, 0] and counts.tolist() == [2, 1, 0]
    with pytest.raises(ValueError, match="level must be one of token, sequence, geometric"):
        weight_totals(weights, mask, level="turn", **options)
