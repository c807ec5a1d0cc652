"""Group advantages: the formula, ties, groups of one, any order of any ids."""

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_vl.algorithms import (
    advantages,
    decoupled_advantages,
    group_advantages,
    token_normalized,
)


def naive(rewards: list[float], ids: list, normalize: bool, eps: float) -> list[float]:
    out = []
    for reward, group_id in zip(rewards, ids, strict=True):
        group = [r for r, other in zip(rewards, ids, strict=True) if other == group_id]
        if max(group) == min(group):
            out.append(0.0)
            continue
        centered = reward - statistics.fmean(group)
        out.append(centered / (statistics.stdev(group) + eps) if normalize else centered)
    return out


def test_one_right_of_two_by_hand():
    # mean 1/2, sample std sqrt(1/2): advantages are ±(1/2)/sqrt(1/2) = ±sqrt(1/2).
    advantages = group_advantages(torch.tensor([1.0, 0.0]), torch.tensor([7, 7]), eps=0.0)
    torch.testing.assert_close(advantages, torch.tensor([0.5**0.5, -(0.5**0.5)]))


def test_without_normalization_by_hand():
    group_ids = torch.zeros(4, dtype=torch.int32)
    advantages = group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), group_ids, normalize=False)
    assert advantages.tolist() == [0.75, -0.25, -0.25, -0.25]


def test_leave_one_out_by_hand():
    # The others' means: of (0, 0, 2), of (1, 0, 2) twice, of (1, 0, 0).
    rewards = torch.tensor([1.0, 0.0, 0.0, 2.0], dtype=torch.float64)
    advantages = group_advantages(rewards, [0] * 4, normalize=False, leave_one_out=True)
    torch.testing.assert_close(
        advantages, torch.tensor([1 - 2 / 3, -1, -1, 2 - 1 / 3], dtype=torch.float64)
    )
    normalized = group_advantages(rewards, [0] * 4, eps=0.0, leave_one_out=True)
    torch.testing.assert_close(normalized, advantages / rewards.std())


def test_leave_one_out_weighs_each_group_by_its_own_size():
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 5.0])
    advantages = group_advantages(
        rewards, ["a", "a", "b", "b", "b", "c"], normalize=False, leave_one_out=True
    )
    torch.testing.assert_close(advantages, torch.tensor([1.0, -1.0, 1.0, -0.5, -0.5, 0.0]))


def test_eps_is_added_to_the_standard_deviation():
    # std of (2, 0) is sqrt(2).
    advantages = group_advantages(torch.tensor([2.0, 0.0]), [0, 0], eps=0.5)
    torch.testing.assert_close(advantages, torch.tensor([1.0, -1.0]) / (2**0.5 + 0.5))


@pytest.mark.parametrize("value", [0.0, 0.9, 1.0, 0.1, 1e8, -0.3])
@pytest.mark.parametrize("size", [1, 3, 7, 11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("leave_one_out", [True, False])
def test_tied_groups_are_exactly_zero(value, size, dtype, normalize, leave_one_out):
    rewards = torch.full((size,), value, dtype=dtype)
    advantages = group_advantages(
        rewards, [0] * size, normalize=normalize, leave_one_out=leave_one_out
    )
    assert advantages.dtype == dtype
    assert torch.equal(advantages, torch.zeros(size, dtype=dtype))


def test_a_tie_beside_a_live_group_stays_zero():
    rewards = torch.tensor([0.9, 1.0, 0.9, 0.0, 0.9, 1.0])
    advantages = group_advantages(rewards, ["tied", "live", "tied", "live", "tied", "alone"])
    assert advantages[[0, 2, 4, 5]].tolist() == [0.0] * 4
    assert advantages[1] == -advantages[3] != 0


@settings(deadline=None, max_examples=50)
@given(
    rows=st.lists(
        st.tuples(st.sampled_from([0.0, 0.9, 1.0, -1.0, 0.25]), st.integers(-3, 3)),
        min_size=1,
        max_size=30,
    ),
    normalize=st.booleans(),
)
def test_matches_a_loop_for_any_ids_in_any_order(rows, normalize):
    rewards, ids = [r for r, _ in rows], [g for _, g in rows]
    expected = torch.tensor(naive(rewards, ids, normalize, 1e-6), dtype=torch.float64)
    tensor = torch.tensor(rewards, dtype=torch.float64)
    for group_ids in (torch.tensor(ids), ids, np.array(ids), [f"group {g}" for g in ids]):
        torch.testing.assert_close(
            group_advantages(tensor, group_ids, normalize=normalize), expected
        )


def test_no_rewards_give_no_advantages():
    assert group_advantages(torch.zeros(0), []).shape == (0,)
    assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_wrong_input_is_named():
    with pytest.raises(ValueError, match=r"\(3,\).*\(2,\)"):
        group_advantages(torch.zeros(3), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="float"):
        group_advantages(torch.zeros(3, dtype=torch.int64), [0, 0, 0])
    with pytest.raises(ValueError, match="integers"):
        group_advantages(torch.zeros(2), torch.zeros(2))
    with pytest.raises(ValueError, match="finite.*nan"):
        group_advantages(torch.tensor([0.0, float("nan")]), [0, 0])


def test_normalised_over_tokens_is_whitening_of_each_token():
    """REINFORCE++: a sample counts once for each of its tokens."""
    values, tokens = [1.0, 0.0, 0.5, 2.0], [3, 1, 5, 0]
    each = [value for value, n in zip(values, tokens, strict=True) for _ in range(n)]
    mean = sum(each) / 9
    deviation = math.sqrt(sum((x - mean) ** 2 for x in each) / 8 + 1e-8)
    rewards, lengths = torch.tensor(values, dtype=torch.float64), torch.tensor(tokens)
    expected = torch.tensor([(x - mean) / deviation for x in values], dtype=torch.float64)
    torch.testing.assert_close(token_normalized(rewards, lengths), expected)
    torch.testing.assert_close(token_normalized(rewards, lengths, normalize=False), rewards - mean)
    torch.testing.assert_close(
        advantages("reinforce_plus_plus", rewards, "abcd", lengths, normalize=True), expected
    )
    centered = group_advantages(rewards, "aabb", normalize=False)
    with_baseline = advantages(
        "reinforce_plus_plus_baseline", rewards, "aabb", lengths, normalize=True
    )
    torch.testing.assert_close(with_baseline, token_normalized(centered, lengths))
    assert token_normalized(torch.full((3,), 0.1), torch.ones(3)).tolist() == [0, 0, 0], (
        "ties are exact"
    )
    assert token_normalized(torch.zeros(0), torch.zeros(0)).shape == (0,)


def test_code_may_be_the_advantage():
    rewards, tokens = torch.tensor([1.0, 3.0, 2.0], dtype=torch.float64), torch.tensor([4, 5, 6])

    def fits(rewards, group_ids, tokens):
        rewards += group_ids
        return (rewards * tokens).tolist()

    assert advantages(fits, rewards, ["b", "a", "b"], tokens, normalize=True).tolist() == [
        4,
        20,
        12,
    ]
    assert rewards.tolist() == [1, 3, 2], "a function gets copies"
    for wrong in (lambda *_: torch.zeros(2), lambda *_: torch.full((3,), float("nan"))):
        with pytest.raises(ValueError, match="3 finite numbers, one for each reward"):
            advantages(wrong, rewards, [0, 0, 1], tokens, normalize=True)


NAN = float("nan")


def decoupled(parts, weights, ids, **options):
    tensors = (torch.tensor(values, dtype=torch.float64) for values in (parts, weights))
    return decoupled_advantages(*tensors, ids, **options)


def test_rewards_are_normalized_one_by_one_and_then_their_sum_by_hand():
    """Two groups of two. In `b` the sums tie, 2 and 2, but the rewards of which they are do not."""
    parts = [[1.0, 0.0], [0.0, 0.0], [2.0, 0.0], [0.0, 2.0]]
    root = 0.5**0.5  # ±1/2 over a sample deviation of root 1/2, and so are ±1 over root 2
    sums = torch.tensor([root, -root, root - 2 * root, 2 * root - root], dtype=torch.float64)
    deviation = (sums.square().sum() / 3).sqrt()
    torch.testing.assert_close(
        decoupled(parts, [1.0, 2.0], "aabb", eps=0.0), sums / deviation, rtol=1e-12, atol=0.0
    )
    assert decoupled(parts, [1.0, 1.0], "aabb").abs()[2:].max() < 1e-9, "equal and opposite"


def test_the_scale_of_a_reward_does_not_count_but_its_weight_does():
    generator = torch.Generator().manual_seed(1)
    parts = torch.rand(12, 3, generator=generator, dtype=torch.float64)
    weights, ids = torch.tensor([1.0, 0.5, 0.1], dtype=torch.float64), [n // 4 for n in range(12)]
    expected = decoupled_advantages(parts, weights, ids, eps=1e-12)
    scaled = parts * torch.tensor([1.0, 1000.0, 1e-3]) + torch.tensor([0.0, 5.0, 1.0])
    torch.testing.assert_close(decoupled_advantages(scaled, weights, ids, eps=1e-12), expected)
    for other in ([1.0, 0.5, 1.0], [1.0, -0.5, 0.1]):
        changed = decoupled_advantages(parts, torch.tensor(other), ids, eps=1e-12)
        assert (changed - expected).abs().max() > 0.1
    order = torch.randperm(12, generator=generator)
    torch.testing.assert_close(
        decoupled_advantages(parts[order], weights, [ids[n] for n in order.tolist()], eps=1e-12),
        expected[order],
    )


def test_rewards_that_tie_or_are_missing_add_nothing():
    one = decoupled([[1.0], [0.0], [0.5], [0.25]], [1.0], "aabb")
    constant = [[1.0, 0.3], [0.0, 0.3], [0.5, 7.0], [0.25, 7.0]]
    assert decoupled(constant, [1.0, 9.0], "aabb").tolist() == one.tolist()
    # Of `a` one trajectory has the second reward, and of `b` none.
    alone = [[1.0, 5.0], [0.0, NAN], [0.5, NAN], [0.25, NAN]]
    assert decoupled(alone, [1.0, 9.0], "aabb").tolist() == one.tolist()
    # Those that have it are compared without the third.
    three = decoupled([[0.0, 1.0], [0.0, 3.0], [0.0, NAN]], [1.0, 1.0], "aaa", eps=0.0)
    torch.testing.assert_close(three, torch.tensor([-1.0, 1.0, 0.0], dtype=torch.float64))
    # A row without any reward is not counted; with a count of 3, the deviation would be another.
    none = decoupled([[1.0], [3.0], [NAN]], [1.0], "aaa", eps=0.0)
    torch.testing.assert_close(none, torch.tensor([-(0.5**0.5), 0.5**0.5, 0.0]).double())


@pytest.mark.parametrize(
    "columns",
    [
        # Equal and opposite but for their scale, of which eps leaves a residue.
        [[0.001, 0.0], [0.0, 0.01], [0.004, 0.003], [0.002, 0.007]],
        # As float32, one minus a reward is not exactly its opposite.
        [[0.1, 0.9], [0.3, 0.7], [0.7, 0.3], [0.6, 0.4]],
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rewards_that_cancel_are_exactly_zero(columns, dtype):
    """Whether all groups cancel, or one of them."""
    first = torch.tensor(columns, dtype=dtype)[:, 0]
    opposite = torch.stack([first, 1 - 10 * first], 1)
    weights = torch.ones(2, dtype=dtype)
    assert not decoupled_advantages(opposite, weights, "aabb").any()
    alike = torch.stack([first, first], 1)
    mixed = decoupled_advantages(torch.cat([opposite, alike]), weights, "aaaabbbb")
    assert not mixed[:4].any() and mixed[4:].abs().min() > 0.1
    tied = decoupled_advantages(torch.cat([torch.ones(4, 2), alike]), weights, "aaaabbbb")
    assert not tied[:4].any()


def test_groups_of_one_all_ties_and_empty_batches_are_exactly_zero():
    assert decoupled([[1.0, 2.0], [3.0, 4.0]], [1.0, 1.0], "ab").tolist() == [0.0, 0.0]
    assert decoupled([[1.0, 2.0]] * 4, [1.0, 1.0], "aabb").tolist() == [0.0] * 4
    assert decoupled_advantages(torch.zeros(0, 2), torch.ones(2), []).shape == (0,)
    with pytest.raises(ValueError, match=r"parts must be \[N, K\] and weights \[K\]"):
        decoupled([[1.0, 2.0]], [1.0], "a")
    with pytest.raises(ValueError, match="finite"):
        decoupled([[1.0], [float("inf")]], [1.0], "aa")
