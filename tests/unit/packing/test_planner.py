"""The planner: nothing lost, nothing twice, the budget hard, ranks in step, loads even."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_vl.packing.planner import Item, plan_micro_batches

lengths = st.lists(st.integers(1, 400), max_size=120)


def items_of(sizes, group=8, patches=0):
    return [Item(i // group, i % group, n, patches) for i, n in enumerate(sizes)]


@settings(max_examples=150, deadline=None)
@given(lengths, st.integers(1, 5), st.integers(400, 1000), st.sampled_from([None, 1, 3]))
def test_invariants(sizes, ranks, budget, size):
    items = items_of(sizes)
    plan = plan_micro_batches(items, ranks=ranks, budget=budget, size=size)
    micro = [m for rank in plan.micro_batches for m in rank]
    placed = sorted((i.group, i.index) for m in micro for i in m)
    assert placed == sorted((i.group, i.index) for i in items)
    assert all(sum(i.tokens for i in m) <= budget for m in micro)
    assert all(len(rank) == plan.steps >= 1 for rank in plan.micro_batches)
    assert size is None or all(len(m) <= size for m in micro)
    assert 0 <= plan.fill <= 1


def test_an_oversized_item_is_refused_by_name():
    with pytest.raises(ValueError, match="max_tokens_per_mbs: a trajectory of 500 tokens exceeds the budget of 400"):
        plan_micro_batches(items_of([500]), ranks=1, budget=400)


def test_ranks_without_work_still_step():
    plan = plan_micro_batches(items_of([10]), ranks=3, budget=100)
    assert [len(rank) for rank in plan.micro_batches] == [1, 1, 1]
    assert sum(len(m) for rank in plan.micro_batches for m in rank) == 1


def test_vision_is_announced_to_every_rank():
    items = [Item(0, 0, 50, 0), Item(1, 0, 60, 24)]
    plan = plan_micro_batches(items, ranks=2, budget=100)
    assert plan.run_vision == (True,)
    assert plan_micro_batches(items[:1], ranks=2, budget=100).run_vision == (False,)


def test_loads_are_even_and_rows_full_on_long_tailed_lengths():
    import numpy as np

    rng = np.random.default_rng(0)
    sizes = np.clip(rng.lognormal(5, 0.7, 2048), 40, 2000).astype(int).tolist()
    plan = plan_micro_batches(items_of(sizes), ranks=8, budget=16384)
    assert plan.imbalance < 0.03
    assert plan.fill > 0.8


def test_the_plan_does_not_depend_on_the_order_of_items():
    sizes = [30, 80, 20, 55, 54, 90, 10, 33]
    a = plan_micro_batches(items_of(sizes), ranks=2, budget=120)
    b = plan_micro_batches(items_of(sizes)[::-1], ranks=2, budget=120)
    assert a == b
