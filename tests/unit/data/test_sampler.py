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
    assert [sampler.next_rows(3) for _ in range(3)] == [
        (0, [3, 1, 4]),
        (0, [15, 9, 2]),
        (1, [3, 1, 4]),
    ]


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


SOURCES = {row: 0 if row < 100 else 1 if row < 110 else 2 for row in range(150)}
SHARES = [1, 2, 5]


def mixture(batch: int = 16, seed: int = 0, shuffle: bool = True, **options) -> EpochSampler:
    return EpochSampler(
        range(150), batch, shuffle=shuffle, seed=seed, sources=SOURCES, weights=SHARES, **options
    )


def test_a_mixture_keeps_its_shares_whatever_the_sizes() -> None:
    sampler, drawn = mixture(), [0, 0, 0]
    for batch in range(1, 60):
        rows = sampler.next_rows(16)[1]
        for row in rows:
            drawn[SOURCES[row]] += 1
        assert len(rows) == 16 and all(
            abs(n - 16 * batch * w / 8) < 1.01 for n, w in zip(drawn, SHARES, strict=True)
        )
    assert sampler.batches_per_epoch == 9 and sampler.state_dict()["drawn"] == drawn


def test_every_source_of_a_mixture_has_epochs_of_its_own() -> None:
    sampler = mixture(shuffle=True)
    rows = [row for _ in range(50) for row in sampler.next_rows(16)[1]]
    small = [row for row in rows if SOURCES[row] == 1]
    epochs = [small[i : i + 10] for i in range(0, 200, 10)]
    assert (
        all(set(epoch) == set(range(100, 110)) for epoch in epochs)
        and len({tuple(e) for e in epochs}) > 15
    )
    in_order = mixture(shuffle=False)
    rows = [row for _ in range(10) for row in in_order.next_rows(16)[1] if SOURCES[row] == 0]
    assert rows == list(range(20))


@pytest.mark.parametrize("stop", [0, 1, 7, 9, 23])
def test_a_restored_mixture_goes_on_with_the_same_batches(stop: int) -> None:
    levels = {row: row % 4 for row in range(150)}
    sampler = mixture(levels=levels)
    for _ in range(stop):
        sampler.next_rows(16)
    restored = mixture(levels=levels)
    restored.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert [restored.next_rows(16) for _ in range(20)] == [sampler.next_rows(16) for _ in range(20)]


def test_a_state_of_another_mixture_gives_each_source_its_share_so_far() -> None:
    sampler = mixture()
    sampler.load_state_dict({"epoch": 1, "rows": 16})
    assert sampler.state_dict() == {"epoch": 1, "rows": 16, "drawn": [20, 40, 100]}


def test_a_curriculum_goes_up_in_every_epoch_and_shuffles_what_is_equal() -> None:
    levels = {row: float(row % 3) for row in range(30)}
    sampler = EpochSampler(range(30), 10, shuffle=True, seed=0, levels=levels)
    epochs = [[row for _ in range(3) for row in sampler.next_rows(10)[1]] for _ in range(3)]
    for epoch in epochs:
        assert [levels[row] for row in epoch] == [0.0] * 10 + [1.0] * 10 + [2.0] * 10 and len(
            set(epoch)
        ) == 30
    assert len({tuple(epoch) for epoch in epochs}) == 3
    still = EpochSampler(range(6), 6, shuffle=False, seed=0, levels=levels)
    assert still.next_rows(6)[1] == [0, 3, 1, 4, 2, 5]
