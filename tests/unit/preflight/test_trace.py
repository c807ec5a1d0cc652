"""Bytes that a trace on the meta device counts: those of real tensors, and of the flagship by closed forms."""

from unittest import mock

import pytest
import torch
from tiny import tiny_model

from rlinf_vl.models import attention
from rlinf_vl.models.families import family_of
from rlinf_vl.models.kernels.attention import Matmul
from rlinf_vl.models.loading import freeze, use_packed_attention
from rlinf_vl.preflight.model import Weights, meta_model, model_config
from rlinf_vl.preflight.trace import LiveBytes, pretend_cuda, trace_images, trace_step

FAMILY = family_of("qwen3_vl")
GIB = 2**30


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_a_trace_on_meta_counts_what_real_tensors_take(checkpointing, frozen):
    """The same code, once computed on the CPU and once traced: bytes alive after forward and at the peak are equal."""
    real = use_packed_attention(tiny_model(), FAMILY).train()
    meta = meta_model(
        real.config,
        FAMILY,
        torch.float32,
        frozen=("vision_tower", "projector") if frozen else (),
        checkpointing=checkpointing,
    )
    if frozen:
        freeze(real, FAMILY)
    if checkpointing:
        enable = (
            getattr(real, "activation_checkpointing_enable", None)
            or real.gradient_checkpointing_enable
        )
        enable({"use_reentrant": False})
    with mock.patch.object(attention, "kernel_for", lambda *_: Matmul):
        counted, computed = (trace_step(m, FAMILY, 96, longest=24, chunk=16) for m in (meta, real))
        towers = [trace_images(m, FAMILY, 40, 12) for m in (meta, real)]
    assert counted.saved == computed.saved > 0
    assert counted.peak == computed.peak > counted.saved
    assert towers[0].peak == towers[1].peak > towers[0].saved == towers[1].saved


def test_live_bytes_are_those_of_living_storages():
    known = torch.zeros(10)
    with LiveBytes([known]) as live:
        a = torch.zeros(100)
        b = a.view(10, 10)[2:]  # no memory of its own
        known.add_(1)
        c = torch.ones(50, dtype=torch.float64)
        assert live.current == 400 + 400
        del a
        assert live.current == 800, "a view keeps its storage"
        del b
        assert live.current == 400
        _ = float(c[0]), c.sum().item()
    assert (
        live.peak == 800
        and live.current == 400
        and live.synchronising["aten._local_scalar_dense.default"] == 2
    )


@pytest.fixture(scope="module")
def flagship():
    config, said = model_config("Qwen/Qwen3-VL-2B-Instruct")
    assert "table" in said or "cache" in said
    return {
        checkpointing: meta_model(
            config,
            FAMILY,
            torch.bfloat16,
            frozen=("vision_tower", "projector"),
            checkpointing=checkpointing,
        )
        for checkpointing in (True, False)
    }


def test_the_flagship_has_its_shape(flagship):
    """Parameters by hand: Qwen3-VL-2B has 2,127,532,032, of them 406,957,056 in its tower."""
    weights = Weights(flagship[True], FAMILY)
    h, i, layers, vocab, kv = 2048, 6144, 28, 151936, 8 * 128
    block = 2 * h * h + 2 * h * kv + 3 * h * i + 2 * h + 2 * 128
    assert weights.block == block
    assert weights.root == vocab * h + h  # tied: no head of its own
    assert weights.trained == layers * block + weights.root == 1_720_574_976
    assert weights.total == weights.trained + weights.tower == 2_127_532_032
    assert weights.shard(1) == weights.total and weights.shard(1, trained=True) == weights.trained
    assert weights.total / 8 <= weights.shard(8) < weights.total / 8 * 1.001


@pytest.mark.slow
def test_checkpointing_keeps_one_tensor_a_layer(flagship):
    """What forward leaves for backward: [T, 2048] bfloat16 per layer, and little else; without checkpointing over ten times
    that. The traced peak is then the head's or a block's, not the sum over layers."""
    tokens = 4096
    with pretend_cuda():
        with_it, without = (
            trace_step(flagship[c], FAMILY, tokens, longest=1024, chunk=256) for c in (True, False)
        )
    per_layer = tokens * 2048 * 2
    assert 28 * per_layer < with_it.saved < 28 * per_layer * 1.3
    assert without.saved > 10 * with_it.saved
    assert with_it.peak < without.peak / 2
    assert with_it.operations > without.operations  # forward twice


def test_logits_exist_a_chunk_at_a_time(flagship):
    """A chunk more of positions costs float32 logits of that many, once and a half in backward; without chunks it
    would be 1.2 GB a copy."""
    with pretend_cuda():
        small, large = (
            trace_step(flagship[True], FAMILY, 2048, longest=1024, chunk=c).peak for c in (128, 512)
        )
    logits = (512 - 128) * 151936 * 4
    assert logits < large - small < 6 * logits


def test_pretending_ends():
    with pretend_cuda():
        assert torch.zeros(1).is_cuda
    assert not torch.zeros(1).is_cuda
