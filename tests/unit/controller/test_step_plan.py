"""From summaries to a step's plan: advantages, mini-batches, denominators."""

import math
import random
from dataclasses import replace
from itertools import accumulate
from statistics import fmean

import numpy as np
import pytest
import torch
from summaries import changed, values

from rlinf_vl.config.presets import with_presets
from rlinf_vl.config.schema import AlgorithmConfig, SamplingConfig
from rlinf_vl.config.schema.algorithm import OverlongConfig
from rlinf_vl.controller.step_plan import (
    advantages_of,
    overlong_penalty,
    plan_step,
    ties,
    trainable,
)
from rlinf_vl.errors import RunError
from rlinf_vl.packing.planner import Item
from rlinf_vl.types import GroupSummary, Prices, TrajectorySummary


def summary(name, rewards, lengths, errors=None, patches=0):
    trajectories = [
        TrajectorySummary(
            tokens=20 + length,
            response_tokens=length,
            reward=reward,
            correct=reward > 0,
            error=error,
            turn_rewards=(reward,),
            turn_tokens=(length,),
            turn_states=("",),
        )
        for reward, length, error in zip(
            rewards, lengths, errors or (None,) * len(rewards), strict=True
        )
    ]
    return GroupSummary(
        id=name,
        problem_id=name,
        prompt_tokens=20,
        trajectories=tuple(trajectories),
        min_version=0,
        max_version=0,
        images=1,
        patches=patches,
        image_bytes={},
    )


LONGEST = SamplingConfig(max_new_tokens=20)
GROUPS = [
    summary("a", [1.0, 0.0, 0.0], [5, 6, 7]),
    summary("b", [0.9, 0.9, 0.9], [4, 4, 4]),
    summary("c", [1.0, 0.0, 1.0], [3, 0, 2]),  # an empty response
    summary("d", [1.0, 0.0, 0.0], [3, 5, 2], errors=(None, None, "timed out")),
]


def plan(groups=GROUPS, **changes):
    settings = {
        name: changes.pop(name)
        for name in list(changes)
        if name in AlgorithmConfig.__dataclass_fields__
    }
    options = {"ranks": 2, "budget": 60, "micro_batch_size": None} | changes
    return plan_step(groups, with_presets(AlgorithmConfig(**settings)), **options)


def test_advantages_leave_out_what_is_not_trained():
    assert advantages_of([], with_presets(AlgorithmConfig())) == ((), 0.0)
    (a, b, c, d), _ = advantages_of(GROUPS, with_presets(AlgorithmConfig()))
    std = math.sqrt((4 / 9 + 1 / 9 + 1 / 9) / 2)
    assert [turn for (turn,) in a] == pytest.approx(
        [2 / 3 / std, -1 / 3 / std, -1 / 3 / std], rel=1e-5
    )
    assert b == ((0.0,), (0.0,), (0.0,))
    assert c == ((0.0,), (0.0,), (0.0,))  # without the empty one the rewards tie
    assert d[2] == (0.0,) and d[0][0] == pytest.approx(-d[1][0]) and d[0][0] > 0


def scored(name, *scores, base=0.0, errors=None, **fields):
    """A group whose trajectories have these values of two reward functions of weight 1 and 0.1."""
    rewards = [base + (a or 0.0) + 0.1 * (b or 0.0) for a, b in scores]
    group = summary(name, rewards, [3] * len(scores), errors)
    return changed(group, scores=scores, base_reward=[base] * len(scores), **fields)


PER_REWARD = {"reward_normalization": "per_reward", "reward_weights": (1.0, 0.1)}


def flat(step):
    return [turn for group in step.advantages for trajectory in group for turn in trajectory]


def test_rewards_can_be_normalized_one_by_one():
    """Two groups whose functions are of different scale; in the second all sums are equal."""
    groups = [
        scored("a", (1.0, 0.0), (0.0, 10.0), (0.0, 0.0)),
        scored("b", (1.0, 0.0), (0.0, 10.0), (1.0, 0.0)),
    ]
    third = 1 / math.sqrt(3)  # one of three: ±2/3 and ∓1/3 over a deviation of root 1/3
    sums = [2 * third - 0.1 * third, -third + 0.2 * third, -third - 0.1 * third]
    sums += [third - 0.1 * third, -2 * third + 0.2 * third, third - 0.1 * third]
    deviation = math.sqrt(sum(x * x for x in sums) / 5)
    step = plan(groups, **PER_REWARD)
    assert flat(step) == pytest.approx([x / deviation for x in sums], rel=1e-4)
    assert flat(plan(groups))[3:] == [0.0] * 3, "their sums tie"
    assert ties(groups[1]) and not ties(groups[1], (1.0, 0.1))
    assert ties(groups[1], (0.0, 0.0)) and not ties(groups[0], (0.0, 0.1))


def test_the_sum_is_the_default_and_reads_no_scores():
    groups = [scored("a", (1.0, 0.0), (0.0, 10.0), (0.0, 0.0))]
    plain = [changed(groups[0], scores=[()] * 3)]
    assert flat(plan(groups, reward_weights=(7.0, 7.0))) == flat(plan(plain))


def test_what_an_environment_pays_is_a_reward_of_its_own():
    alone = plan([scored("a", (1.0, 0.0), (0.0, 0.0), (0.0, 0.0))], **PER_REWARD)
    paid = [scored("a", (1.0, 0.0), (0.0, 0.0), (0.0, 0.0), base=0.7)]
    assert flat(plan(paid, **PER_REWARD)) == flat(alone), "all are paid alike"
    paid = [changed(paid[0], base_reward=[0.0, 0.0, 50.0])]
    a, b, c = flat(plan(paid, **PER_REWARD))
    third = 1 / math.sqrt(3)
    assert [a, b, c] == pytest.approx([third, -2 * third, third], rel=1e-4)
    # An environment that pays by itself leaves the functions unasked.
    unasked = [changed(paid[0], scores=[()] * 3, reward=[0.0, 0.0, 50.0])]
    assert flat(plan(unasked, **PER_REWARD)) == pytest.approx(flat(plan(unasked)), rel=1e-5)


def test_failed_penalized_and_valueless_trajectories_among_rewards_one_by_one():
    """The failed one is compared with nobody, the penalized one as if every function scored 0."""
    kept = [(1.0, 10.0), (0.0, 0.0), (1.0, None)]
    expected = flat(plan([scored("a", *kept)], **PER_REWARD))
    failed = scored("a", *kept, (9.0, 9.0), errors=[None, None, None, "environment: lost"])
    assert flat(plan([failed], **PER_REWARD)) == [*expected, 0.0]
    penalized = scored("a", (1.0, 10.0), (0.0, 0.0), (1.0, None))
    penalized = changed(
        penalized,
        scores=[(1.0, 10.0), (), (1.0, None)],
        penalized=["", "environment: lost", ""],
    )
    assert flat(plan([penalized], **PER_REWARD)) == expected
    # With two others in its group, a value that is missing is no 0.
    assert expected != flat(plan([scored("a", *kept[:2], (1.0, 0.0))], **PER_REWARD))
    lone = scored("b", (3.0, 3.0), (0.0, 0.0), errors=[None, "environment: lost"])
    assert flat(plan([lone], **PER_REWARD)) == [0.0, 0.0], "a group of one"


def test_all_turns_have_what_their_trajectory_has_of_rewards_one_by_one():
    group = changed(PLAYED[0], scores=[(1.0, 0.0), (0.0, 0.0)], base_reward=[0.0, 0.0])
    (first, second) = plan([group], **PER_REWARD).advantages[0]
    assert len(first) == 2 and len(second) == 3 and len({*first}) == len({*second}) == 1
    assert first[0] == pytest.approx(0.5**0.5, rel=1e-4) and second[0] == -first[0]


def played(name, *trajectories, errors=None):
    """Each trajectory as its turns' (reward, sampled tokens, state)."""
    rewards, tokens, states = (
        tuple(tuple(turn[k] for turn in trajectory) for trajectory in trajectories)
        for k in range(3)
    )
    whole = summary(name, [sum(own) for own in rewards], [sum(own) for own in tokens], errors)
    return changed(
        whole,
        turns=[len(own) for own in rewards],
        turn_rewards=rewards,
        turn_tokens=tokens,
        turn_states=states,
    )


PLAYED = [
    played("a", [(0.0, 2, "s"), (1.0, 3, "t")], [(0.0, 4, "s"), (0.0, 1, "s"), (0.5, 2, "t")]),
    played(
        "b", [(1.0, 3, "s")], [(0.0, 2, "s"), (0.0, 0, "t")], [(9.0, 1, "s")], [(0.0, 0, "s")],
        errors=[None, None, "environment: lost", None],
    ),
]  # fmt: skip


def test_each_turn_can_have_an_advantage_of_its_own():
    turn = {"credit": "turn", "normalize_advantages": False}
    (a, b), (c, d, failed, empty) = plan(PLAYED, **turn, turn_discount=0.5).advantages
    assert a == pytest.approx((0.5 - 0.3125, 1 - 0.625)) and b == pytest.approx(
        (0.125 - 0.3125, 0.25 - 0.625, 0.0)
    )
    assert (c, d, failed, empty) == ((0.5,), (-0.5, 0.0), (0.0,), (0.0,))
    (a, b), _ = plan(PLAYED, **turn, adv_type="rloo").advantages
    assert a == (0.5, 0.5) and b == (-0.5, -0.5, 0.0)
    step = plan(PLAYED, state_advantage_weight=2.0, normalize_advantages=False)
    (a, b), (c, d, failed, empty) = step.advantages
    assert a == pytest.approx((0.25 + 2 / 3, 0.25 + 0.5)) and b == pytest.approx(
        (-0.25 - 1 / 3, -0.25 - 1 / 3, -0.75)
    )
    assert (c, d, failed, empty) == ((1.5,), (-1.5, -0.5), (0.0,), (0.0,))
    assert step.metrics["reward/shared_states"] == 7 / 8
    assert "reward/shared_states" not in plan(PLAYED, **turn).metrics


@pytest.mark.parametrize("changes", [{"credit": "turn"}, {"state_advantage_weight": 0.5}])
def test_denominators_count_turns_where_each_is_a_sequence(changes):
    for mode, expected in (
        ("token-mean", 12 + 5),
        ("seq-mean-token-mean", 5 + 2),
        ("seq-mean-token-sum", 5 + 2),
    ):
        step = plan(PLAYED, loss_agg_func=mode, **changes)
        assert {mini.denominator for ranks in step.minibatches for mini in ranks} == {expected}
    step = plan(PLAYED, loss_agg_func="seq-mean-token-mean")
    assert {mini.denominator for ranks in step.minibatches for mini in ranks} == {2 + 2}


def test_an_environment_that_names_no_states_is_found():
    with pytest.raises(RunError, match=r"algorithm.state_advantage_weight: 0.5 .*names none"):
        plan(GROUPS, state_advantage_weight=0.5)
    assert plan([summary("a", [0.0], [0], ["why"])], state_advantage_weight=0.5).advantages == (
        ((0.0,),),
    )


@pytest.mark.parametrize(
    "mode, expected", [("token-mean", 18 + 12 + 5 + 8), ("seq-mean-token-mean", 3 + 3 + 2 + 2)]
)
def test_denominators_are_global_counts_of_what_is_trained(mode, expected):
    step = plan(loss_agg_func=mode)
    assert {mini.denominator for ranks in step.minibatches for mini in ranks} == {expected}


def test_minibatches_hold_whole_groups_and_everything_once():
    step = plan(n_minibatches=2)
    seen = []
    for m, ranks in enumerate(step.minibatches):
        items = [item for mini in ranks for micro in mini.micro_batches for item in micro]
        assert {item.group for item in items} == ({0, 1}, {2, 3})[m]
        assert len({len(mini.micro_batches) for mini in ranks}) == 1
        seen += [(item.group, item.index) for item in items]
    assert sorted(seen) == [
        (g, i) for g in range(4) for i in range(3) if (g, i) not in {(2, 1), (3, 2)}
    ]


def stale_and_fresh(n_stale, n_fresh):
    """Groups sorted as a step has them: the carried-over ones, old and long, before the fresh ones."""
    stale = [
        replace(summary(f"old{i}", [1.0, 0.0], [30, 30]), min_version=0) for i in range(n_stale)
    ]
    fresh = [replace(summary(f"new{i}", [1.0, 0.0], [3, 3]), min_version=4) for i in range(n_fresh)]
    return stale + fresh


def versions_by_minibatch(groups, step):
    versions = []
    for ranks in step.minibatches:
        items = [item for mini in ranks for micro in mini.micro_batches for item in micro]
        versions.append([groups[item.group].min_version for item in items])
    return versions


def test_each_optimizer_step_has_its_share_of_the_carried_over_groups():
    groups = stale_and_fresh(16, 48)
    shares = np.zeros(4)
    for step_number in range(50):
        step = plan(groups, n_minibatches=4, budget=400, shuffle_key=f"minibatches 1 {step_number}")
        shares += [
            np.mean(np.equal(versions, 0)) for versions in versions_by_minibatch(groups, step)
        ]
    # 1/4 of all groups are stale. The standard error of a mini-batch's mean share over 50 shuffles is 0.014.
    np.testing.assert_allclose(shares / 50, 0.25, atol=0.06)


def test_the_shuffle_of_minibatches_is_the_steps_own_and_repeatable():
    groups = stale_and_fresh(16, 48)
    first, again, next_step = (
        plan(groups, n_minibatches=4, budget=400, shuffle_key=key).minibatches
        for key in ("1 7", "1 7", "1 8")
    )
    assert first == again != next_step
    trained = {
        item.group
        for ranks in first
        for mini in ranks
        for micro in mini.micro_batches
        for item in micro
    }
    assert trained == set(range(64))
    whole = plan(groups, budget=400, shuffle_key="1 7").minibatches
    assert whole == plan(groups, budget=400).minibatches  # one mini-batch has nothing to shuffle


def test_a_step_where_a_minibatch_has_nothing_to_train():
    failed = [summary(str(i), [0.0], [0], errors=("bad",)) for i in range(2)]
    step = plan(failed + GROUPS[:2], n_minibatches=2)
    assert [mini.denominator for mini in step.minibatches[0]] == [1, 1]
    assert all(micro == () for mini in step.minibatches[0] for micro in mini.micro_batches)


def test_items_carry_prompt_and_response_apart():
    # 2 of 5 tokens not sampled.
    observed = changed(summary("a", [1.0, 0.0], [5, 6], patches=12), response_tokens=(3, 6))
    step = plan([observed], ranks=1)
    assert step.minibatches[0][0].micro_batches == (
        (Item(0, 0, 20, 5, 3, 12), Item(0, 1, 20, 6, 6, 12)),
    )
    assert step.metrics["packing/fill"] == pytest.approx(31 / 60)
    assert step.metrics["packing/repeated"] == 0


def test_prompts_can_be_repeated_and_prices_set():
    step = plan(GROUPS[:1], ranks=1, share_prompts=False)
    assert len(step.minibatches[0][0].micro_batches) == 2  # three times 20 and 18 exceed 60
    assert step.metrics["packing/repeated"] == pytest.approx(40 / 78)
    dear = plan(GROUPS[:1], prices=Prices(head=1000.0)).metrics["packing/imbalance"]
    assert dear == pytest.approx(11 / 9 - 1, rel=0.1)  # 5 + 6 sampled tokens against 7


@pytest.mark.parametrize(
    ("tokens", "cost"), [(0, 0), (12, 0), (13, 0.125), (18, 0.75), (20, 1.0), (23, 1.0)]
)
def test_the_soft_overlong_penalty_by_hand(tokens, cost):
    """Equation 13 of DAPO with L_max = 20 and L_cache = 8, times the penalty."""
    algorithm = AlgorithmConfig(
        overlong=OverlongConfig(buffer=8, penalty=2.0), sampling_params=LONGEST
    )
    assert overlong_penalty(tokens, algorithm) == pytest.approx(2 * cost)
    assert overlong_penalty(tokens, AlgorithmConfig(sampling_params=LONGEST)) == 0


def test_rewards_are_less_the_overlong_penalty_of_each_turn():
    overlong = {
        "overlong": OverlongConfig(buffer=4),
        "sampling_params": SamplingConfig(max_new_tokens=5),
    }
    step = plan(PLAYED, normalize_advantages=False, **overlong)
    # of a: turns of 2, 3 and of 4, 1, 2 tokens, paid 1.0 and 0.5; of b: 3 and 2, 0, paid 1.0 and 0
    (a, b), (c, d, *_) = step.advantages
    first, second = 1.0 - 0.25 - 0.5, 0.5 - 0.75 - 0.25
    assert a == pytest.approx(((first - second) / 2,) * 2) and b == pytest.approx(
        ((second - first) / 2,) * 3
    )
    assert c[0] == pytest.approx((1.0 - 0.5 - (0.0 - 0.25)) / 2) == pytest.approx(-d[0])
    assert step.metrics["reward/overlong_penalty"] == pytest.approx(
        (0.25 + 0.5 + 0.75 + 0.25 + 0.5 + 0.25) / 8
    )
    by_turn = plan(PLAYED, normalize_advantages=False, credit="turn", turn_discount=0.0, **overlong)
    assert by_turn.advantages[0][0][0] == pytest.approx((-0.25 + 0.75) / 2)


def test_cut_answers_carry_no_loss_but_count_in_the_baseline():
    cut = changed(summary("a", [1.0, 0.0, 0.0], [5, 6, 7]), status=("stop", "length", "stop"))
    plain, filtered = plan([cut]), plan([cut], overlong=OverlongConfig(filter=True))
    assert filtered.advantages == plain.advantages
    items = [
        i.index
        for m in filtered.minibatches
        for rank in m
        for micro in rank.micro_batches
        for i in micro
    ]
    assert sorted(items) == [0, 2] and filtered.minibatches[0][0].denominator == 12


def test_the_constant_length_is_in_the_denominator():
    step = plan(adv_type="dr_grpo", sampling_params=SamplingConfig(max_new_tokens=30))
    assert step.minibatches[0][0].denominator == (3 + 3 + 2 + 2) * 30


def random_kl(generator: random.Random) -> tuple[dict, dict]:
    """KL of each sampled token of `PLAYED`, and what the ranks report of it."""
    tokens, reported = {}, {}
    for g, group in enumerate(PLAYED):
        for i in trainable(group):
            own = tokens[g, i] = [
                [generator.gauss(0, 1) for _ in range(n)] for n in group.trajectories[i].turn_tokens
            ]
            flat = sum(own, [])
            later = [sum(flat[t:]) for t in range(len(flat))]
            ends = list(accumulate(map(len, own)))
            parts = [later[end - len(turn) : end] for turn, end in zip(own, ends, strict=True)]
            reported[g, i] = [
                (sum(turn), sum(part), sum(x * x for x in part))
                for turn, part in zip(own, parts, strict=True)
            ]
    return tokens, reported


@pytest.mark.parametrize("credit", ["trajectory", "turn"])
def test_returns_of_tokens_are_normalised_over_all_of_them(credit):
    """REINFORCE++ with the KL in the reward, token by token."""
    tokens, reported = random_kl(random.Random(0))
    algorithm = with_presets(
        AlgorithmConfig(
            adv_type="reinforce_plus_plus", kl_beta=0.3, kl_placement="reward", credit=credit
        )
    )
    found, scale = advantages_of(PLAYED, algorithm, reported)
    returns = {}
    for (g, i), own in tokens.items():
        flat = sum(own, [])
        turns = [k for k, turn in enumerate(own) for _ in turn]
        paid = PLAYED[g].trajectories[i].turn_rewards
        for t, k in enumerate(turns):
            returns[g, i, t] = (sum(paid[k:]) if credit == "turn" else sum(paid)) - 0.3 * sum(
                flat[t:]
            )
    mean = fmean(returns.values())
    deviation = math.sqrt(
        sum((x - mean) ** 2 for x in returns.values()) / (len(returns) - 1) + 1e-8
    )
    for (g, i), own in tokens.items():
        flat, turns = sum(own, []), [k for k, turn in enumerate(own) for _ in turn]
        for t, k in enumerate(turns):
            ours = found[g][i][k] - scale * sum(flat[t:])
            assert ours == pytest.approx((returns[g, i, t] - mean) / deviation)


@pytest.mark.parametrize("adv_type", ["grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_the_others_compare_rewards_less_their_whole_kl(adv_type):
    tokens, reported = random_kl(random.Random(1))
    algorithm = with_presets(AlgorithmConfig(adv_type=adv_type, kl_beta=0.3, kl_placement="reward"))
    found, scale = advantages_of(PLAYED, algorithm, reported)
    kl = {key: sum(map(sum, own)) for key, own in tokens.items()}
    less = [
        changed(
            s,
            reward=[r - 0.3 * kl.get((g, i), 0) for i, r in enumerate(values(s, "reward"))],
        )
        for g, s in enumerate(PLAYED)
    ]
    expected, _ = advantages_of(less, algorithm)
    assert scale == 0
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a == pytest.approx(b)


def test_code_of_a_user_that_fails_is_named():
    def fails(rewards, group_ids, tokens):
        raise KeyError("x")

    with pytest.raises(RunError, match=r"algorithm.adv_type: fails failed: KeyError: 'x'"):
        plan(estimator=fails)
    step = plan(estimator=lambda rewards, group_ids, tokens: tokens, credit="turn")
    assert step.advantages[0] == ((5.0,), (6.0,), (7.0,))


def in_turns(name, rewards, tokens, labels):
    """A group whose trajectories have these rewards and sampled tokens of their turns."""
    group = summary(name, [sum(turns) for turns in rewards], [sum(turns) for turns in tokens])
    group = changed(
        group,
        turns=[len(turns) for turns in rewards],
        turn_rewards=[tuple(turns) for turns in rewards],
        turn_tokens=[tuple(turns) for turns in tokens],
        turn_states=[("start",) * len(turns) for turns in rewards],
        turn_versions=[(3,) * len(turns) for turns in rewards],
        reward_parts=[{"format": 1.0}, {}],
        status=["stop", "length"],
    )
    return replace(group, labels=labels)


TURNS = [
    in_turns("a", [[0.5, 1.0], [0.25]], [[2, 3], [4]], {"level": 4}),
    summary("failed", [1.0, 0.0], [3, 3], errors=("lost", "lost")),
    in_turns("b", [[1.0], [0.0, 0.5]], [[1], [2, 2]], {"level": 1}),
]


def test_an_estimator_sees_parts_columns_turns_and_statuses():
    def looks(inputs):
        assert inputs.rewards.tolist() == [1.5, 0.25, 1.0, 0.5]
        assert inputs.group_ids.tolist() == [0, 0, 1, 1]
        assert inputs.problem_ids == ["a", "a", "b", "b"]
        assert inputs.tokens.tolist() == [5, 4, 1, 4]
        assert inputs.parts["format"].nan_to_num(-1).tolist() == [1, -1, 1, -1]
        assert [row["level"] for row in inputs.columns] == [4, 4, 1, 1]
        assert inputs.statuses == ["stop", "length"] * 2
        assert inputs.correct.tolist() == [True, True, True, True]
        assert inputs.turn_trajectories.tolist() == [0, 0, 1, 2, 3, 3]
        assert inputs.turn_rewards.tolist() == [0.5, 1.0, 0.25, 1.0, 0.0, 0.5]
        assert inputs.turn_tokens.tolist() == [2, 3, 4, 1, 2, 2]
        assert inputs.turn_versions.tolist() == [3] * 6 and inputs.turn_states == ["start"] * 6
        assert inputs.step == 7 and inputs.normalize
        inputs.log("weight", [1.0, 2.0, 4.0, 5.0])
        inputs.log("late", inputs.turn_rewards, inputs.turn_trajectories == 3)
        inputs.log("none", inputs.rewards, inputs.rewards > 9)
        return inputs.rewards * 2

    step = plan(TURNS, estimator=looks, step=7)
    assert step.advantages == (
        ((3.0, 3.0), (0.5,)),
        ((0.0,), (0.0,)),
        ((2.0,), (1.0, 1.0)),
    )
    assert step.metrics["advantage/weight"] == 3.0 and step.metrics["advantage/late"] == 0.25
    assert "advantage/none" not in step.metrics


def test_an_estimator_may_give_turns_or_tokens():
    by_turn = plan(TURNS, estimator=lambda inputs: inputs.turn_rewards - 1)
    assert by_turn.advantages[0] == ((-0.5, 0.0), (-0.75,))
    assert by_turn.advantages[2] == ((0.0,), (-1.0, -0.5))
    by_token = plan(
        TURNS, estimator=lambda inputs: [torch.arange(int(n)) for n in inputs.tokens]
    ).advantages
    assert [x.tolist() for x in by_token[0][0]] == [[0, 1], [2, 3, 4]], "turn by turn"
    assert [x.tolist() for x in by_token[2][1]] == [[0, 1], [2, 3]]
    assert by_token[1] == ((0.0,), (0.0,))


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (lambda inputs: inputs.rewards[:3], "must return 4 numbers, one for each trajectory, or 6, one for each turn"),
        (lambda inputs: [inputs.rewards] * 4, r"a number for each token; it returned tensors of shapes"),
        (lambda inputs: inputs.rewards / 0, "must return finite numbers"),
        (lambda inputs: inputs.columns[0]["size"], "KeyError: 'size'"),
    ],
)  # fmt: skip
def test_a_result_that_fits_nothing_is_refused(estimator, message):
    with pytest.raises(RunError, match=message):
        plan(TURNS, estimator=estimator)


def test_three_arguments_see_what_they_saw():
    def three(rewards, group_ids, tokens):
        return rewards - group_ids + tokens

    assert plan(TURNS, estimator=three).advantages[2] == ((1.0,), (3.5, 3.5))
    by_turn = plan(TURNS, estimator=three, credit="turn").advantages
    assert by_turn[0] == ((3.5, 3.0), (4.25,)), "returns of turns, compared by number"


def with_token_rewards(group, *rewards):
    return changed(group, token_rewards=rewards)


PROCESS = [
    with_token_rewards(TURNS[0], ((0, 1, 1.0), (1, 2, 0.0)), ((0, 0, 0.0),)),
    TURNS[1],
    with_token_rewards(TURNS[2], (), ((1, 0, 3.0),)),
]


def test_rewards_of_tokens_add_to_the_advantage_of_their_trajectory():
    """In two turns of two and three tokens: those up to a reward get it."""
    settings = {"credit": "token", "normalize_advantages": False}
    step = plan(PROCESS, **settings)
    alone = plan(TURNS, normalize_advantages=False)
    a = alone.advantages[0][0][0]
    first, second = step.advantages[0]
    assert [x.tolist() for x in first] == [
        pytest.approx([a + 1 / 3, a + 1 / 3]),
        pytest.approx([a - 1 / 3] * 3),
    ]
    assert second[0].tolist() == pytest.approx([-a - 1 / 3] + [-a] * 3)
    assert step.advantages[1] == ((0.0,), (0.0,))
    # The only reward of a token in its group ties with itself.
    assert [x.tolist() for x in step.advantages[2][0]] == [[0.25]]
    with pytest.raises(RunError, match="`spans`.*algorithm.credit=trajectory.*set credit=token"):
        plan(PROCESS)
    with pytest.raises(RunError, match="algorithm.credit: token compares.* no reward function"):
        plan(TURNS, credit="token")
    seen = []
    plan(PROCESS, estimator=lambda inputs: seen.extend(inputs.token_rewards) or inputs.rewards)
    assert [x.tolist() for x in seen] == [[0, 1, 0, 0, 0], [0] * 4, [0], [0, 0, 3, 0]]
    assert plan([], credit="token").advantages == ()


def test_groups_with_different_rewards_of_tokens_do_not_tie():
    group = summary("a", [1.0, 1.0], [3, 3])
    assert ties(group) and not ties(with_token_rewards(group, ((0, 0, 1.0),), ((0, 1, 0.0),)))
    assert ties(with_token_rewards(group, ((0, 0, 1.0),), ((0, 1, 1.0),)))
