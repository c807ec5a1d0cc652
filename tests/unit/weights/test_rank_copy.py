"""Ranks keep what they sent: each its own part and no more, and together the weights as they were, whatever trains since."""

import pytest
import torch

from rlinf_vl.weights.changes import patches
from rlinf_vl.weights.rank_copy import RankCopy

SHAPES = {"embed": (12, 8), "experts": (4, 3, 5), "norm": (8,), "decay": (6,)}
FLOAT32 = {"decay"}


def weights_of(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    values = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {name: x if name in FLOAT32 else x.bfloat16() for name, x in values.items()}


def parts_of(weights, rank: int, ranks: int):
    """This rank's part of each weight, cut by its first dimension; the smallest is rank 0's."""
    for name, value in weights.items():
        rows = -(-len(value) // ranks)
        shard = value[rank * rows : (rank + 1) * rows]
        yield name, value.shape, min(rank * rows, len(value)) * value[0].numel(), shard.flatten()


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("bucket_bytes", [1, 100, 10**6])
def test_ranks_together_keep_the_weights_once(ranks, bucket_bytes):
    weights = weights_of(0)
    copies = [
        RankCopy(lambda rank=rank: parts_of(weights, rank, ranks), "cpu", bucket_bytes)
        for rank in range(ranks)
    ]
    for version in (1, 2):
        sent = weights_of(version)
        weights |= {name: value.clone() for name, value in sent.items()}
        for copy in copies:
            copy.keep_all()
        for value in weights.values():
            value.zero_()  # training goes on
        deltas = [delta for copy in copies for delta in copy.deltas()]
        whole = {
            name: patch.masked("cpu")
            for bucket in patches(deltas, "cpu")
            for name, patch in bucket.items()
        }
        assert whole.keys() == sent.keys()
        assert all(torch.equal(whole[name], value) for name, value in sent.items())
        total = sum(value.nbytes for value in sent.values())
        assert sum(copy.nbytes for copy in copies) == total
        # Rows of weights with fewer rows than ranks are not shared out evenly.
        assert max(copy.nbytes for copy in copies) <= total / ranks + 3 * 8 * 4


def test_other_weights_than_before_leave_nothing_behind():
    weights = weights_of(0)
    copy = RankCopy(lambda: parts_of(weights, 0, 1), "cpu", 1)
    copy.keep_all()
    first = next(copy.buckets())
    assert torch.equal(copy.kept(0, first), first.values)
    weights = {"other": torch.ones(2, 2)}
    assert copy.kept(0, next(copy.buckets())) is None
    copy.keep_all()
    assert [piece[0] for delta in copy.deltas() for piece in delta.pieces] == ["other"]
    assert copy.nbytes == 16
