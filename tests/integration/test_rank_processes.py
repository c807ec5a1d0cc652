"""The ranks that tests share: one that fails or dies fails its own test, and no other."""

import os

import pytest
import torch
import torch.distributed as dist


def add_ranks() -> float:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return total.item()


def fail_on(rank: int) -> float:
    if dist.get_rank() == rank:
        raise ArithmeticError(f"rank {rank} cannot")
    return add_ranks()


def die_on(rank: int) -> float:
    if dist.get_rank() == rank:
        os._exit(3)
    return add_ranks()


@pytest.mark.sample("die_on")
@pytest.mark.parametrize(
    "function, rank, message",
    [
        (fail_on, 0, "rank 0 cannot"),
        (die_on, 1, r"(?s)rank 0:.*|died without a word: rank 1 \(3\)"),
    ],
)
def test_next_ranks_are_new(processes, function, rank, message):
    assert processes.run(2, add_ranks) == [1, 1]
    with pytest.raises(AssertionError, match=message):
        processes.run(2, function, rank)
    assert processes.run(2, add_ranks) == [1, 1]
