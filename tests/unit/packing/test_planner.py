"""The planner: nothing lost, nothing twice, the budget hard, prompts once, ranks in step, waiting short."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_vl.packing.planner import Item, plan_micro_batches
from rlinf_vl.types import Prices

#: Groups of small numbers: (prompt, patches, tokens of each response).
groups = st.lists(
    st.tuples(
        st.integers(1, 150),
        st.sampled_from([0, 16]),
        st.lists(st.integers(1, 250), min_size=1, max_size=9),
    ),
    max_size=16,
)
sharing = pytest.mark.parametrize("share", [True, False], ids=["shared", "repeated"])


def items_of(drawn):
    return [
        Item(g, i, prompt, tokens, tokens, patches)
        for g, (prompt, patches, responses) in enumerate(drawn)
        for i, tokens in enumerate(responses)
    ]


def realistic(n, seed, samples=8):
    """Prompts of a geometry problem with its figure, and long-tailed answers."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(150, 501, n).tolist()
    responses = np.clip(rng.lognormal(4.5, 0.7, (n, samples)), 20, 300).astype(int).tolist()
    return items_of([(p, 2 * p, r) for p, r in zip(prompts, responses, strict=True)])


def flat(plan):
    return [micro for rank in plan.micro_batches for micro in rank]


def tokens_of(micro, share=True):
    prompts = (
        {item.group: item.prompt for item in micro}.values()
        if share
        else [item.prompt for item in micro]
    )
    return sum(prompts) + sum(item.tokens for item in micro)


def cost_of(micro, prices=Prices()):  # noqa: B008
    """Written out pair by pair: each token attends to those before it in its own trajectory, prompt included."""
    cost = 0.0
    for group in {item.group for item in micro}:
        members = [item for item in micro if item.group == group]
        p = members[0].prompt
        pairs = p * p / 2 + sum(i.tokens * p + i.tokens * i.tokens / 2 for i in members)
        cost += (
            p
            + sum(i.tokens for i in members)
            + prices.attention * pairs
            + prices.patch * members[0].patches
        )
        cost += prices.head * sum(i.loss_tokens for i in members)
    return cost


def waiting(plan, ranks, prices=Prices()):  # noqa: B008
    costs = np.array([[cost_of(micro, prices) for micro in rank] for rank in plan.micro_batches])
    return costs.max(axis=0).sum() / (costs.sum() / ranks) - 1


@sharing
@settings(max_examples=100)
@given(
    drawn=groups,
    ranks=st.integers(1, 5),
    budget=st.integers(400, 1500),
    size=st.sampled_from([None, 1, 3, 8]),
)
def test_invariants(share, drawn, ranks, budget, size):
    items = items_of(drawn)
    plan = plan_micro_batches(items, ranks=ranks, budget=budget, size=size, share_prompts=share)
    micro = flat(plan)
    assert sorted((item for m in micro for item in m), key=lambda i: (i.group, i.index)) == items
    assert all(list(m) == sorted(m, key=lambda i: (i.group, i.index)) for m in micro)
    assert all(tokens_of(m, share) <= budget for m in micro)
    assert (
        all(len(rank) == plan.steps >= 1 for rank in plan.micro_batches)
        and len(plan.micro_batches) == ranks
    )
    assert size is None or all(len(m) <= size for m in micro)
    total = sum(tokens_of(m, share) for m in micro)
    assert plan.fill == pytest.approx(total / (budget * plan.steps * ranks))
    assert plan.repeated * total == pytest.approx(total - tokens_of(items))
    for s in range(plan.steps):
        assert plan.run_vision[s] == any(
            item.patches for rank in plan.micro_batches for item in rank[s]
        )


@settings(max_examples=50)
@given(
    drawn=groups.filter(len),
    ranks=st.integers(1, 4),
    budget=st.integers(400, 1500),
    random=st.randoms(),
)
def test_the_plan_does_not_depend_on_the_order_of_items(drawn, ranks, budget, random):
    items = items_of(drawn)
    mixed = random.sample(items, len(items))
    assert plan_micro_batches(items, ranks=ranks, budget=budget) == plan_micro_batches(
        mixed, ranks=ranks, budget=budget
    )


@settings(max_examples=50)
@given(
    drawn=groups.filter(len),
    ranks=st.integers(1, 4),
    prices=st.sampled_from([Prices(), Prices(0.01, 2.0, 0.5)]),
)
def test_imbalance_is_the_time_lost_by_waiting_at_the_given_prices(drawn, ranks, prices):
    plan = plan_micro_batches(items_of(drawn), ranks=ranks, budget=600, prices=prices)
    assert plan.imbalance == pytest.approx(waiting(plan, ranks, prices), abs=1e-9)


def test_without_shared_prompts_each_trajectory_costs_its_own():
    items = items_of([(100, 8, [50, 50, 30]), (20, 0, [5])])
    plan = plan_micro_batches(
        items, ranks=2, budget=1000, size=3, share_prompts=False, prices=Prices(0.1, 3.0, 0.5)
    )
    # The image is there once all the same.
    alone = [replace(item, group=k, patches=0) for k, item in enumerate(items)]
    costs = [cost_of([item], Prices(0.1, 3.0, 0.5)) for item in alone]
    parts = [sum(costs[items.index(i)] for i in m) + 4 * (m[0].group == 0) for m in flat(plan)]
    assert plan.imbalance == pytest.approx(max(parts) / (sum(parts) / 2) - 1)
    assert plan.repeated == pytest.approx(200 / (3 * 100 + 130 + 25))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(
    "n, budget, lost",
    [
        (16, 16384, 0.12),
        (24, 4096, 0.05),
        (128, 2048, 0.065),
        (64, 8192, 0.03),
        (300, 4096, 0.04),
        (300, 16384, 0.01),
    ],
)
def test_little_is_lost_by_waiting_and_by_repeated_prompts(n, budget, lost, ranks):
    """Against all ranks being busy all the time, with every prompt once."""
    for seed in range(3):
        items = realistic(n, seed)
        plan = plan_micro_batches(items, ranks=ranks, budget=budget)
        costs = np.array([[cost_of(micro) for micro in rank] for rank in plan.micro_batches])
        assert costs.max(axis=0).sum() <= (1 + lost) * cost_of(items) / ranks, seed


@pytest.mark.parametrize("n, budget", [(64, 4096), (64, 16384), (500, 4096), (500, 16384)])
def test_as_few_micro_batches_as_there_can_be(n, budget):
    """One more than the tokens need at most, or 3 %; and few prompts are repeated for it."""
    for seed in range(3):
        items = realistic(n, seed)
        plan = plan_micro_batches(items, ranks=2, budget=budget)
        least = math.ceil(tokens_of(items) / budget / 2)
        assert plan.steps <= max(least + 1, 1.03 * least)
        assert plan.repeated <= 0.03


def test_rows_of_little_more_than_a_group_are_full_too():
    for ranks in (1, 2, 8):
        plan = plan_micro_batches(realistic(500, 0), ranks=ranks, budget=2048)
        assert plan.fill >= 0.95
        assert plan.repeated <= 0.1  # one prompt in each would be 0.15


@given(
    n=st.integers(1, 4),
    ranks=st.sampled_from([1, 2, 4]),
    prompt=st.integers(1, 300),
    responses=st.lists(st.integers(1, 100), min_size=1, max_size=8),
)
@settings(max_examples=30)
def test_groups_stay_whole_where_they_fit(n, ranks, prompt, responses):
    plan = plan_micro_batches(
        items_of([(prompt, 4, responses)] * (n * ranks)), ranks=ranks, budget=8192
    )
    assert plan.repeated == 0 and plan.imbalance == pytest.approx(0)
    assert all(len({item.group for item in m}) == n for m in flat(plan))


def test_a_group_larger_than_the_budget_is_split():
    items = items_of([(100, 4, [90] * 8)])
    plan = plan_micro_batches(items, ranks=1, budget=480)
    assert [len(m) for m in flat(plan)] == [4, 4] and plan.repeated == pytest.approx(100 / 920)


def test_a_group_is_split_where_a_rank_would_wait():
    plan = plan_micro_batches(items_of([(10, 4, [100] * 8)] * 3), ranks=2, budget=8192)
    assert [len(m) for m in flat(plan)] == [12, 12]
    assert sorted(len({item.group for item in m}) for m in flat(plan)) == [2, 2]


def test_a_prompt_is_not_repeated_to_make_all_ranks_equally_slow():
    """Four prompts so long that the responses hardly matter, on three ranks: splitting helps nobody."""
    plan = plan_micro_batches(items_of([(5000, 4, [20] * 8)] * 4), ranks=3, budget=16384)
    assert plan.repeated == 0


def test_an_oversized_item_is_refused_by_name():
    with pytest.raises(
        ValueError, match="max_tokens_per_mbs: a trajectory of 500 tokens exceeds the budget of 499"
    ):
        plan_micro_batches([Item(0, 0, 200, 300)], ranks=1, budget=499)
    assert flat(plan_micro_batches([Item(0, 0, 200, 300)], ranks=1, budget=500)) == [
        (Item(0, 0, 200, 300),)
    ]


def test_a_group_has_one_prompt():
    with pytest.raises(ValueError, match="different lengths"):
        plan_micro_batches([Item(0, 0, 20, 30), Item(0, 1, 21, 30)], ranks=1, budget=500)


def test_ranks_without_work_still_step():
    plan = plan_micro_batches([Item(0, 0, 4, 6)], ranks=3, budget=100)
    assert sorted(map(len, flat(plan))) == [0, 0, 1] and plan.steps == 1
    assert plan.imbalance == pytest.approx(2)
    assert plan_micro_batches([], ranks=2, budget=100).micro_batches == (((),), ((),))
