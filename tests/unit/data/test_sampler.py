"""Whole batches in an order that depends on seed and epoch only, and going on where one stopped."""

import json

import pytest

from rlinf_vl.data.sampler import EpochSampler

ROWS = [3, 1, 4, 15, 9, 2, 6]


def test_an_epoch_is_whole_batches_of_distinct_rows() -> None:
    sampler = EpochSampler(ROWS, 3, shuffle=True, seed=0)
    assert sampler.batches_per_epoch == 2
    batches = [sampler.next_rows(3) for _ in range(6)]
    assert [epoch for epoch, _ in batches] == [0, 0, 1, 1, 2, 2]
    for epoch in range(3):
        seen = [row for e, rows in batches if e == epoch for row in rows]
        assert len(seen) == len(set(seen)) == 6 and set(seen) <= set(ROWS)
    assert len({tuple(batches[2 * e][1] + batches[2 * e + 1][1]) for e in range(3)}) == 3
    assert all(type(row) is int for _, rows in batches for row in rows)


def test_without_shuffling_every_epoch_has_the_given_order() -> None:
    sampler = EpochSampler(ROWS, 3, shuffle=False, seed=0)
    assert [sampler.next_rows(3) for _ in range(3)] == [(0, [3, 1, 4]), (0, [15, 9, 2]), (1, [3, 1, 4])]


def test_the_order_depends_on_seed_and_epoch_only() -> None:
    def order(seed: int, start: int) -> list[int]:
        sampler = EpochSampler(range(100), 100, shuffle=True, seed=seed)
        sampler.load_state_dict({"epoch": start, "rows": 0})
        return sampler.next_rows(100)[1]

    straight = EpochSampler(range(100), 100, shuffle=True, seed=5)
    assert [straight.next_rows(100)[1] for _ in range(3)] == [order(5, e) for e in range(3)]
    assert order(5, 0) != order(6, 0)


@pytest.mark.parametrize("stop", range(8))
def test_a_restored_sampler_goes_on_with_the_same_batches(stop: int) -> None:
    sampler = EpochSampler(ROWS, 2, shuffle=True, seed=1)
    for _ in range(stop):
        sampler.next_rows(2)
    state = json.loads(json.dumps(sampler.state_dict()))
    restored = EpochSampler(ROWS, 2, shuffle=True, seed=1)
    restored.load_state_dict(state)
    assert [restored.next_rows(2) for _ in range(7)] == [sampler.next_rows(2) for _ in range(7)]


def test_too_few_rows_are_refused_with_the_key_to_change() -> None:
    with pytest.raises(ValueError, match=r"data\.rollout_batch_size: 8 problems a step, but only 7"):
        EpochSampler(ROWS, 8, shuffle=True, seed=0)
    with pytest.raises(ValueError, match="not positive"):
        EpochSampler(ROWS, 0, shuffle=True, seed=0)
