"""Packed rows of Qwen3.5, prompts shared, against transformers one sequence at a time: members of other sizes, long rows, the
shortest prompts and responses; and against transformers in float64, for decays so fast that float32 itself is coarse."""

import numpy as np
import pytest
import tiny
import torch
from tiny import (
    IMAGE_TOKENS,
    PAD,
    answered,
    banned,
    group,
    pixels,
    tiny_model,
    transformers_logprobs,
)
from transformers.models.qwen3_5 import modeling_qwen3_5

from rlinf_vl.models.families import FAMILIES, family_of
from rlinf_vl.models.loading import use_packed_attention
from rlinf_vl.models.policy import PolicyModel
from rlinf_vl.packing.collator import Collator, Member
from rlinf_vl.types import Request, Sample, SamplingParams

QUARTER = {"mrope_interleaved": True, "partial_rotary_factor": 0.25}
#: Heads in ratios of 1, 2 and 5, odd sizes, other convolutions, other orders of layers.
SIZES = {
    "ratio 2, 3 taps": {
        "num_hidden_layers": 4, "full_attention_interval": 4, "hidden_size": 48, "linear_num_key_heads": 3,
        "linear_num_value_heads": 6, "linear_key_head_dim": 10, "linear_value_head_dim": 6, "linear_conv_kernel_dim": 3,
    },
    "ratio 5, odd": {
        "num_hidden_layers": 3, "full_attention_interval": 3, "linear_num_key_heads": 1, "linear_num_value_heads": 5,
        "linear_key_head_dim": 20, "linear_value_head_dim": 33,
    },
    "ratio 1, a quarter turned": {
        "num_hidden_layers": 3, "full_attention_interval": 2, "num_attention_heads": 6, "head_dim": 24,
        "linear_num_key_heads": 4, "rope_parameters": QUARTER,
    },
}  # fmt: skip


def tiny_member(family, text, fast=False, scale=1.0):
    """With fast decays as fresh weights have them."""
    model = tiny_model(family=family, text=text).train()
    torch.manual_seed(1)
    for name, p in model.named_parameters():
        if fast and name.endswith("A_log"):
            p.data.uniform_(0.01, 16).log_()
        elif p.ndim > 1 and "visual" not in name:
            p.data *= scale
    return model


def members_of(*groups):
    return [Member(g, i, [0.0]) for g in groups for i in range(len(g.trajectories))]


def long_and_short():
    rng = np.random.default_rng(0)
    return members_of(
        group(rng, [(2, 3), (5, 3)], [5, 90, 1, 33], "a"), group(rng, [], [4, 6, 40], "b")
    )


def of_lengths(rng, prompt, responses, name):
    request = Request(
        rng.integers(2, 60, prompt).astype(np.int32),
        (),
        np.zeros((0, 3), np.int64),
        SamplingParams(),
        (),
    )
    samples = [
        Sample(
            rng.integers(2, 60, n).astype(np.int32),
            np.zeros(n, np.float32),
            np.zeros(n, np.int32),
            "stop",
        )
        for n in responses
    ]
    return answered(request, samples, name)


def packed(model, family, members):
    model = use_packed_attention(model, family)
    policy = PolicyModel(model, family, banned(), temperature=1.0, chunk=None)
    return policy(Collator(family, IMAGE_TOKENS, pixels, PAD)(members, run_vision=True))[0]


def by_transformers(model, members):
    return torch.cat([transformers_logprobs(model, m.group, m.index) for m in members])


def assert_same(family, text, members):
    theirs, ours = (tiny_member(family, text, scale=0.5) for _ in range(2))
    expected, found = by_transformers(theirs, members), packed(ours, family_of(family), members)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    weights = torch.linspace(-1, 1, len(expected))
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    for (name, a), (_, b) in zip(theirs.named_parameters(), ours.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            largest = max(1.0, float(a.grad.abs().max()))
            torch.testing.assert_close(b.grad, a.grad, atol=2e-5 * largest, rtol=0, msg=name)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_members_of_other_sizes_compute_what_transformers_does(family, sizes):
    assert_same(family, sizes, long_and_short())


def test_the_shortest_prompts_and_responses():
    rng = np.random.default_rng(2)
    groups = [of_lengths(rng, n, [1, 2, 30, 1], f"g{n}") for n in (1, 2, 3)]
    assert_same("qwen3_5", {}, members_of(*groups, group(rng, [(1, 1)], [1], "image")))


class Exact:
    """torch, in which float32 is float64."""

    float32 = float = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("fast", [False, True], ids=["slow", "fast"])
def test_no_further_from_float64_than_transformers(fast, sizes, monkeypatch):
    """On average over the tokens. Which of the two has the largest error is chance: it comes from the layers around the delta net
    (with the net itself in float64 it stays), whose float32 rounding fast decays enlarge."""
    family, members = "qwen3_5", long_and_short()
    with torch.no_grad():
        theirs = by_transformers(tiny_member(family, sizes, fast), members)
        ours = packed(tiny_member(family, sizes, fast), FAMILIES[family], members)
        with monkeypatch.context() as m:
            inputs = tiny.transformers_inputs
            m.setattr(modeling_qwen3_5, "torch", Exact())
            m.setattr(torch.Tensor, "float", torch.Tensor.double)
            m.setattr(tiny, "transformers_inputs", lambda *of: as_double(*inputs(*of)))
            exact = by_transformers(tiny_member(family, sizes, fast).double(), members)
    assert exact.dtype == torch.float64
    error, bound = (ours - exact).abs(), (theirs - exact).abs()
    assert error.mean() <= 1.1 * bound.mean() + 1e-7
    assert error.max() <= 1.5 * bound.max() + 2e-6


def as_double(ids, images):
    return ids, {name: x.double() if x.is_floating_point() else x for name, x in images.items()}
