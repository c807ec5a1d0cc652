"""Weights through byte buckets come out as they went in."""

import pickle

import pytest
import torch

from rlinf_vl.weights.buckets import pack, unpack


def weights():
    torch.manual_seed(0)
    return [
        ("a", torch.randn(3, 5)),
        ("b", torch.randn(7).bfloat16()),
        ("scalar", torch.tensor(2.5)),
        ("empty", torch.zeros(0, 4)),
        ("c", torch.randn(2, 3, 4).half()),
        ("d", torch.randn(4, 4).t()),
    ]


@pytest.mark.parametrize("max_bytes", [1, 64, 10**6])
def test_round_trip_through_pickle(max_bytes):
    buckets = [pickle.loads(pickle.dumps(b)) for b in pack(weights(), max_bytes)]
    out = {name: value for bucket in buckets for name, value in unpack(bucket).items()}
    assert list(out) == [name for name, _ in weights()]
    for name, value in weights():
        assert out[name].dtype == value.dtype and out[name].shape == value.shape
        assert torch.equal(out[name], value)


def test_buckets_respect_their_size():
    values = [(str(i), torch.zeros(10)) for i in range(10)]
    assert [len(b.entries) for b in pack(values, 100)] == [2] * 5
    assert [len(b.entries) for b in pack(values, 10)] == [1] * 10
    assert list(pack([], 100)) == []
