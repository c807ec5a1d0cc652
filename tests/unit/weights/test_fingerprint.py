"""A fingerprint says whether weights are bit for bit, and in order, those that were sent."""

import pytest
import torch

from rlinf_vl.tools.memory.trace import LiveBytes
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


@pytest.mark.parametrize("words", [64, 1000, 2**22])
def test_every_device_reads_pieces_of_its_own_size(words, monkeypatch):
    """A GPU's pieces are larger than a CPU's, and the fingerprint is the same."""
    values = [torch.randn(1001), torch.randn(37).bfloat16()]
    whole = fingerprint(values)
    monkeypatch.setitem(module.FINGERPRINT_WORDS, "cpu", words)
    assert fingerprint(values) == whole


def test_the_host_reads_once_whatever_the_number_of_tensors():
    """Reading each tensor's sum by itself would wait for a GPU as often."""

    def reads(count: int) -> int:
        with LiveBytes() as live:
            fingerprint([torch.arange(9.0) + i for i in range(count)])
        return sum(live.synchronising.values())

    assert reads(2) == reads(20) <= 2


@pytest.mark.slow
def test_launches_on_a_gpu_are_few():
    """A weight of 1 GiB, on meta tensors as on a GPU: 32 pieces of 6 operations, where 2,048 of a CPU's would be."""
    words = torch.empty(2**27, dtype=torch.int64, device="meta")
    with LiveBytes() as live, pytest.MonkeyPatch.context() as patch:
        patch.setitem(module.FINGERPRINT_WORDS, "meta", module.FINGERPRINT_WORDS["cuda"])
        module._weighted_sum(words)
        few = live.operations
        patch.setitem(module.FINGERPRINT_WORDS, "meta", module.FINGERPRINT_WORDS["cpu"])
        module._weighted_sum(words)
    assert few < 400 and live.operations - few > 40 * few


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
