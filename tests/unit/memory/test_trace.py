"""Bytes that a trace on the meta device counts: those of real tensors, and of the flagship by closed forms."""

from unittest import mock

import pytest
import torch
from tiny import tiny_model

from rlinf_vl.models import attention
from rlinf_vl.models.families import family_of
from rlinf_vl.models.kernels.attention import Matmul
from rlinf_vl.models.known import model_config
from rlinf_vl.models.loading import freeze, use_packed_attention
from rlinf_vl.models.recompute import MODES, checkpoint_blocks
from rlinf_vl.tools.memory.model import Weights, meta_model
from rlinf_vl.tools.memory.trace import LiveBytes, pretend_cuda, trace_images, trace_step

FAMILY = family_of("qwen3_vl")
GIB = 2**30


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("frozen", [True, False])
def test_a_trace_on_meta_counts_what_real_tensors_take(mode, frozen):
    """The same code, once computed on the CPU and once traced: bytes alive after forward and at the peak are equal."""
    real = use_packed_attention(tiny_model(), FAMILY).train()
    meta = meta_model(
        real.config,
        FAMILY,
        torch.float32,
        frozen=("vision_tower", "projector") if frozen else (),
    )
    if frozen:
        freeze(real, FAMILY)
    for model in (real, meta):
        checkpoint_blocks(model, FAMILY, mode)
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
    model = meta_model(config, FAMILY, torch.bfloat16, frozen=("vision_tower", "projector"))
    return model, checkpoint_blocks(model, FAMILY, "full")


def test_the_flagship_has_its_shape(flagship):
    """Parameters by hand: Qwen3-VL-2B has 2,127,532,032, of them 406,957,056 in its tower."""
    weights = Weights(flagship[0], FAMILY)
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
    model, checkpointing = flagship
    traces = {}
    for mode in MODES:
        checkpointing.mode = mode
        with pretend_cuda():
            traces[mode] = trace_step(model, FAMILY, tokens, longest=1024, chunk=256)
    none, selective, mlp, full = (traces[mode] for mode in MODES)
    per_layer = tokens * 2048 * 2
    assert 28 * per_layer < full.saved < 28 * per_layer * 1.3
    assert none.saved > 10 * full.saved
    assert full.peak < none.peak / 2
    assert none.operations < selective.operations < mlp.operations < full.operations
    # By hand, in units of the hidden state: input; queries, keys and values; attention's output; its projection; gates and
    # ups of three widths each.
    units = 1 + 2 + 1 + 1
    assert 28 * per_layer * units < mlp.saved < 28 * per_layer * (units + 0.3)
    assert selective.saved - mlp.saved == 28 * per_layer * 6


@pytest.mark.slow
def test_logits_exist_a_chunk_at_a_time(flagship):
    """A chunk more of positions costs float32 logits of that many, once and a half in backward; without chunks it
    would be 1.2 GB a copy."""
    with pretend_cuda():
        small, large = (
            trace_step(flagship[0], FAMILY, 2048, longest=1024, chunk=c).peak for c in (128, 512)
        )
    logits = (512 - 128) * 151936 * 4
    assert logits < large - small < 6 * logits


def test_pretending_ends():
    with pretend_cuda():
        assert torch.zeros(1).is_cuda
    assert not torch.zeros(1).is_cuda
