"""Advantages of turns: worked examples, the papers' formulas written out, and what they reduce to."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_vl.algorithms import (
    discounted_returns,
    gigpo_advantages,
    group_advantages,
    process_advantages,
    turn_advantages,
)

EPS = 1e-6


def double(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_returns_by_hand():
    """Two trajectories, mixed: a is paid 0, 1, 4 and b 2, 8."""
    rewards, whose = double([0, 2, 1, 4, 8]), ["a", "b", "a", "a", "b"]
    assert discounted_returns(rewards, whose, 0.5).tolist() == [0 + 0.5 * 3, 2 + 4, 1 + 2, 4, 8]
    assert discounted_returns(rewards, whose, 1.0).tolist() == [5, 10, 5, 4, 8]
    assert discounted_returns(rewards, whose, 0.0).tolist() == rewards.tolist()
    assert discounted_returns(torch.zeros(0), [], 0.5).shape == (0,)


def test_turns_by_hand():
    """Three trajectories of 2, 2 and 3 turns; paid at the end 1, 0 and 1, and the third 0.5 for its first turn."""
    rewards = double([0, 1, 0, 0, 0.5, 0, 1])
    whose, group = [0, 0, 1, 1, 2, 2, 2], [0] * 7
    plain = turn_advantages(rewards, whose, group, normalize=False)
    # returns 1 1 | 0 0 | 1.5 1 1: the first turns' mean is 5/6, the second ones' 2/3; the third turn is alone
    torch.testing.assert_close(plain, double([1 / 6, 1 / 3, -5 / 6, -2 / 3, 2 / 3, 1 / 3, 0]))
    assert plain[-1] == 0
    stds = [math.sqrt((1 / 36 + 25 / 36 + 4 / 9) / 2), math.sqrt((1 / 9 + 4 / 9 + 1 / 9) / 2), 1.0]
    expected = [a / stds[k] for a, k in zip(plain.tolist(), [0, 1, 0, 1, 0, 1, 2], strict=True)]
    torch.testing.assert_close(turn_advantages(rewards, whose, group, eps=0.0), double(expected))
    others = turn_advantages(rewards, whose, group, normalize=False, leave_one_out=True)
    # N / (n - 1) for both turn numbers that three have.
    torch.testing.assert_close(others, plain * 1.5)
    half = turn_advantages(rewards, whose, group, discount=0.5, normalize=False)
    torch.testing.assert_close(half[[0, 2, 4]], double([0.5, 0, 0.75]) - 1.25 / 3)


def test_states_by_hand():
    """Two episodes through the states s → t → end and s → s → t: the turns in s are paid 1, 0.5 and 1 from there on, those in t 2
    and 2, a tie."""
    rewards = double([0, 2, 0, 0, 2])
    whose, group, states = ["a", "a", "b", "b", "b"], ["g"] * 5, ["s", "t", "s", "s", "t"]
    found = gigpo_advantages(
        rewards, whose, group, states, weight=3.0, discount=0.5, normalize=False
    )
    # the episodes tie at 2, so only states count: the mean of 1, 0.5 and 1 is 5/6
    torch.testing.assert_close(found, 3 * double([1 / 6, 0, -1 / 3, 1 / 6, 0]))
    std = math.sqrt((1 / 36 + 1 / 9 + 1 / 36) / 2)
    normalized = gigpo_advantages(rewards, whose, group, states, weight=3.0, discount=0.5, eps=0.0)
    torch.testing.assert_close(normalized, found / std)


def test_an_episode_counts_once_however_long_it_is():
    """Paid 1 in one turn and 0 in three: the mean is 1/2, not 1/4."""
    found = gigpo_advantages(
        double([1, 0, 0, 0]), [0, 1, 1, 1], [0] * 4, [None] * 4, weight=1.0, normalize=False
    )
    assert found.tolist() == [0.5, -0.5, -0.5, -0.5]


def test_a_state_without_a_name_is_like_no_other():
    rewards, whose = double([1, 0, 0, 1]), [0, 0, 1, 1]
    alone = gigpo_advantages(rewards, whose, [0] * 4, [None, "s", None, "t"], weight=1.0)
    assert alone.tolist() == [0.0] * 4, "the episodes tie, and no two turns share a state"
    shared = gigpo_advantages(
        rewards, whose, [0] * 4, ["s", None, "s", None], weight=1.0, discount=0.0
    )
    assert shared[0] == -shared[2] > 0 and shared[1] == shared[3] == 0
    other_group = gigpo_advantages(
        rewards, whose, [0, 0, 1, 1], ["s", "t", "s", "t"], weight=1.0, discount=0.0
    )
    assert other_group.tolist() == [0.0] * 4, "equal names in two groups are two states"


# The papers' formulas, turn by turn over plain lists.


def mean_std(values):
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1)) if len(
        values
    ) > 1 else 0.0


def relative(value, values, normalize):
    if max(values) == min(values):
        return 0.0
    mean, std = mean_std(values)
    return (value - mean) / (std + EPS) if normalize else value - mean


def return_from(rewards, t, discount):
    return sum(discount ** (k - t) * rewards[k] for k in range(t, len(rewards)))


def naive_turn(groups, discount, normalize):
    """groups: lists of trajectories, each a list of (reward, state)."""
    out = []
    for group in groups:
        paid = [[r for r, _ in trajectory] for trajectory in group]
        for own in paid:
            for t in range(len(own)):
                others = [return_from(p, t, discount) for p in paid if len(p) > t]
                out.append(relative(return_from(own, t, discount), others, normalize))
    return out


def naive_gigpo(groups, weight, discount, normalize):
    out = []
    for group in groups:
        episodes = [sum(r for r, _ in trajectory) for trajectory in group]
        steps = {}
        for trajectory in group:
            for t, (_, state) in enumerate(trajectory):
                if state is not None:
                    steps.setdefault(state, []).append(
                        return_from([r for r, _ in trajectory], t, discount)
                    )
        for trajectory, episode in zip(group, episodes, strict=True):
            for t, (_, state) in enumerate(trajectory):
                own = return_from([r for r, _ in trajectory], t, discount)
                step = 0.0 if state is None else relative(own, steps[state], normalize)
                out.append(relative(episode, episodes, normalize) + weight * step)
    return out


# quarters and halves: sums are exact, so that ties are ties in any order of adding
TURN = st.tuples(st.sampled_from([0.0, 0.25, 1.0, -0.5]), st.sampled_from([None, "s", "t", "u"]))
GROUPS = st.lists(
    st.lists(st.lists(TURN, min_size=1, max_size=4), min_size=1, max_size=5), min_size=1, max_size=3
)


@settings(deadline=None, max_examples=60)
@given(GROUPS, st.sampled_from([0.0, 0.5, 1.0]), st.booleans(), st.sampled_from([0.0, 0.5, 2.0]))
def test_matches_the_papers_turn_by_turn(groups, discount, normalize, weight):
    rows = [
        ((g, i), g, reward, state)
        for g, group in enumerate(groups)
        for i, trajectory in enumerate(group)
        for reward, state in trajectory
    ]
    whose, group_ids, rewards, states = (list(column) for column in zip(*rows, strict=True))
    options = {"discount": discount, "normalize": normalize}
    found = turn_advantages(double(rewards), whose, group_ids, **options)
    torch.testing.assert_close(
        found, double(naive_turn(groups, discount, normalize)), atol=1e-9, rtol=1e-9
    )
    found = gigpo_advantages(double(rewards), whose, group_ids, states, weight=weight, **options)
    torch.testing.assert_close(
        found, double(naive_gigpo(groups, weight, discount, normalize)), atol=1e-9, rtol=1e-9
    )


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_one_turn_each_is_the_trajectorys_advantage(normalize, leave_one_out):
    rewards, groups = torch.rand(12, generator=torch.Generator().manual_seed(0)), [0, 1, 2] * 4
    options = {"normalize": normalize, "leave_one_out": leave_one_out}
    expected = group_advantages(rewards, groups, **options)
    torch.testing.assert_close(turn_advantages(rewards, range(12), groups, **options), expected)
    none = gigpo_advantages(
        rewards, torch.arange(12), torch.tensor(groups), ["s"] * 12, weight=0.0, **options
    )
    torch.testing.assert_close(none, expected)
    same_state = gigpo_advantages(rewards, range(12), groups, ["start"] * 12, weight=1.0, **options)
    torch.testing.assert_close(same_state, 2 * expected)  # all answered to the start


def test_wrong_input_is_named():
    one = torch.zeros(1)
    with pytest.raises(ValueError, match=r"discount.*1\.5"):
        discounted_returns(one, [0], 1.5)
    with pytest.raises(ValueError, match="float"):
        discounted_returns(torch.zeros(1, dtype=torch.int64), [0], 1.0)
    with pytest.raises(ValueError, match=r"trajectory_ids \(2,\)"):
        turn_advantages(one, [0, 1], [0])
    with pytest.raises(ValueError, match=r"states \(0,\)"):
        gigpo_advantages(one, [0], [0], [], weight=1.0)
    with pytest.raises(ValueError, match="weight.*-1"):
        gigpo_advantages(one, [0], [0], ["s"], weight=-1.0)
    with pytest.raises(ValueError, match="two groups"):
        gigpo_advantages(torch.zeros(2), [0, 0], [0, 1], ["s", "s"], weight=1.0)


def test_rewards_of_tokens_are_normalized_in_their_group_and_summed_from_each_token_on():
    """By hand: rewards 1, 0 and 0 in one group, one alone in another."""
    values = torch.tensor([1.0, 0.0, 0.0, 5.0], dtype=torch.float64)
    found = process_advantages(
        values,
        torch.tensor([0, 2, 1, 0]),
        torch.tensor([0, 0, 1, 2]),
        [7, 7, 7, 8],
        torch.tensor([3, 2, 2]),
        eps=0.0,
    )
    high, low = 2 / math.sqrt(3), -1 / math.sqrt(3)  # 2/3 and -1/3 over a deviation of root 1/3
    expected = [[high + low, low, low], [low, low], [0.0, 0.0]]
    for got, want in zip(found, expected, strict=True):
        assert got.tolist() == pytest.approx(want)
