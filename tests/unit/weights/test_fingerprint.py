"""A fingerprint says whether weights are bit for bit, and in order, those that were sent."""

import pytest
import torch

from rlinf_vl.weights import buckets as module
from rlinf_vl.weights.buckets import WeightsDiffer, fingerprint, pack, unpack


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
)
def test_one_bit_anywhere_is_seen(dtype):
    value = (100 * torch.rand(7, 11)).to(dtype)
    before = fingerprint([value])
    raw = value.view(-1).view(torch.uint8)
    for byte in range(0, len(raw), 5):
        raw[byte] ^= 1 << (byte % 8)
        assert fingerprint([value]) != before
        raw[byte] ^= 1 << (byte % 8)
    assert fingerprint([value]) == before


def test_order_and_borders_count_and_layout_does_not():
    a, b = torch.randn(3, 4), torch.randn(4, 3)
    assert fingerprint([a, b]) != fingerprint([b, a])
    assert fingerprint([a, b]) == fingerprint([a.t().contiguous().t(), b])
    assert fingerprint([torch.zeros(2), torch.zeros(3)]) != fingerprint(
        [torch.zeros(3), torch.zeros(2)]
    )
    assert fingerprint([a.flip(0)]) != fingerprint([a])


def test_large_tensors_are_looked_at_piece_by_piece(monkeypatch):
    value = torch.randn(1000)
    whole = fingerprint([value])
    monkeypatch.setattr(module, "FINGERPRINT_WORDS", 64)
    assert fingerprint([value]) == whole


def test_a_difference_names_the_weights_of_its_bucket():
    weights = [("first", torch.randn(5)), ("last", torch.randn(3).bfloat16())]
    (bucket,) = pack(weights, check=True)
    bucket.verify(unpack(bucket), "as received")
    other = {name: value.clone() for name, value in unpack(bucket).items()}
    other["last"][1] += 1
    with pytest.raises(WeightsDiffer, match="first … last .2 of them. as received"):
        bucket.verify(other, "as received")
    (unmarked,) = pack(weights)
    unmarked.verify(other, "as received")
