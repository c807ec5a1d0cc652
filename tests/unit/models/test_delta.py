"""Gated delta nets over packed trees of segments, against loops in float64 over each path from a root to a segment, token by
token: outputs, states, gradients. The path for CUDA runs on a reference of the one operation that it calls."""

import sys

import numpy as np
import pytest
import torch
from torch.nn.functional import silu
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from rlinf_vl.models.kernels import delta
from rlinf_vl.models.kernels.delta import Mixer, delta_rule, inverse_of_unit_lower
from rlinf_vl.models.kernels.delta_layout import DeltaLayout

ROWS = {
    "one segment": ([7], [-1]),
    "alone": ([5, 1, 9, 40, 2], [-1] * 5),
    "a prompt of many chunks": ([140, 3, 1, 70, 33], [-1, 0, 0, 0, 0]),
    "prompts of 1, 2 and 3 tokens": ([1, 3, 1, 2, 4, 1, 3, 1, 20], [-1, 0, 0, -1, 3, 3, -1, 6, 6]),
    "responses of 1": ([32, 1, 1, 1, 16, 1, 1], [-1, 0, 0, 0, -1, 4, 4]),
    "a chain of single tokens": ([1, 1, 1, 1, 1, 1], [-1, 0, 1, 2, 3, 4]),
    "a tree": ([6, 33, 4, 5, 8, 2, 70], [-1, 0, 1, 1, 0, 4, 4]),
    "trees of other depths": (
        [5, 2, 37, 3, 6, 4, 4, 9, 1, 2, 20, 6, 3],
        [-1, 0, 1, 2, 2, 0, -1, -1, 7, 8, 9, 9, 7],
    ),
    "empty segments in a tree": ([6, 0, 4, 0, 3, 2, 0, 5], [-1, 0, 1, 1, 3, 3, 0, 6]),
}
#: key heads, value heads, key dim, value dim, taps
SIZES = [(1, 1, 4, 4, 4), (2, 4, 5, 7, 4), (2, 6, 12, 3, 3), (3, 3, 16, 8, 2)]


def inputs(tokens, sizes, decay=1.0, seed=0):
    """(qkv, g, beta, weight) in float64."""
    key_heads, heads, dk, dv, width = sizes
    torch.manual_seed(seed)
    channels = 2 * key_heads * dk + heads * dv
    qkv, weight = torch.randn(tokens, channels), 0.5 * torch.randn(channels, width)
    g, beta = -decay * torch.rand(tokens, heads), torch.rand(tokens, heads)
    return [x.double().requires_grad_() for x in (qkv, g, beta, weight)]


def by_path(lengths, prefix, qkv, g, beta, weight, sizes):
    """(outputs, tails, states) in float64: the formulas, read literally."""
    key_heads, heads, dk, dv, width = sizes
    starts = np.cumsum([0, *lengths])
    outputs, tails, states = [], [], []
    for i, parent in enumerate(prefix):
        before = tails[parent] if parent >= 0 else qkv.new_zeros(width - 1, qkv.shape[1])
        state = states[parent] if parent >= 0 else qkv.new_zeros(heads, dk, dv)
        own = slice(starts[i], starts[i + 1])
        seen = torch.cat([before, qkv[own]])
        for t in range(lengths[i]):
            mixed = silu((seen[t : t + width] * weight.t()).sum(0))
            q, k, v = mixed.split([key_heads * dk, key_heads * dk, heads * dv])
            q, k = (x.view(key_heads, dk).repeat_interleave(heads // key_heads, 0) for x in (q, k))
            q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
            state = state * g[own][t].exp()[:, None, None]
            read = torch.einsum("hkv,hk->hv", state, k)
            state = state + torch.einsum(
                "hk,hv->hkv", k, beta[own][t][:, None] * (v.view(heads, dv) - read)
            )
            outputs.append(torch.einsum("hkv,hk->hv", state, q) / dk**0.5)
        tails.append(seen[len(seen) - width + 1 :])
        states.append(state)
    return torch.stack(outputs), torch.stack(tails), torch.stack(states)


def ours(lengths, prefix, qkv, g, beta, weight, sizes, initial=None):
    layout = DeltaLayout(np.cumsum([0, *lengths]), np.array(prefix))
    return delta_rule(qkv, g, beta, Mixer(weight, *sizes[:4]), layout, initial)


def assert_alike(lengths, prefix, sizes, decay=1.0, atol=2e-6):
    exact = inputs(sum(lengths), sizes, decay)
    rounded = [x.detach().float().requires_grad_() for x in exact]
    expected = by_path(lengths, prefix, *exact, sizes)
    found = ours(lengths, prefix, *rounded, sizes)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.detach().double(), b.detach(), atol=atol, rtol=1e-5)
    grad = torch.randn_like(expected[0])
    theirs = torch.autograd.grad(expected[0], exact, grad)
    for a, b in zip(torch.autograd.grad(found[0], rounded, grad.float()), theirs, strict=True):
        torch.testing.assert_close(a.double(), b, atol=10 * atol, rtol=1e-5)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_equals_a_loop_over_tokens(row, sizes):
    assert_alike(*ROWS[row], sizes)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sizes", [(2, 4, 16, 16, 4), (1, 5, 20, 33, 4)], ids=str)
def test_fast_decays_among_slow_ones_are_half_as_far_from_float64_as_with_transformers(sizes, seed):
    """Sums of log decays reach hundreds within a chunk, where a slow decay is a difference of two of them."""
    (key_heads, heads, dk, dv, width), tokens = sizes, 200
    qkv, g, beta, weight = (x.detach().float() for x in inputs(tokens, sizes, 1e-2, seed))
    g = torch.where(torch.rand(tokens, heads) < 0.3, 2e3 * g, g)
    exact = by_path([tokens], [-1], *(x.double() for x in (qkv, g, beta, weight)), sizes)[0]
    found = ours([tokens], [-1], qkv, g, beta, weight, sizes)[0]
    windows = torch.cat([qkv.new_zeros(width - 1, qkv.shape[1]), qkv]).unfold(0, width, 1)
    mixed = silu((windows * weight).sum(-1))
    q, k, v = mixed.split([key_heads * dk, key_heads * dk, heads * dv], 1)
    q, k = (
        x.view(1, tokens, key_heads, dk).repeat_interleave(heads // key_heads, 2) for x in (q, k)
    )
    args = q, k, v.view(1, tokens, heads, dv), g[None], beta[None]
    theirs = torch_chunk_gated_delta_rule(*args, use_qk_l2norm_in_kernel=True)[0][0]
    assert (found - exact).abs().max() < 0.5 * (theirs - exact).abs().max()
    assert (found - exact).abs().mean() < 0.5 * (theirs - exact).abs().mean()


@pytest.mark.parametrize("size", [16, 32, 64])
def test_any_size_of_chunks_computes_the_same(size, monkeypatch):
    monkeypatch.setattr(DeltaLayout, "best_size", lambda _: size)
    assert_alike(*ROWS["a prompt of many chunks"], SIZES[1])


def test_short_segments_get_short_chunks():
    assert DeltaLayout(np.cumsum([0, 100, *[10] * 8])).best_size() == 16
    assert DeltaLayout(np.cumsum([0, 500, *[190] * 8])).best_size() == 32


@pytest.mark.parametrize("decay", [0.0, 1e-3, 50.0])
def test_no_decay_and_one_that_forgets_at_once(decay):
    assert_alike(*ROWS["a tree"], SIZES[1], decay)


def test_keys_that_are_all_alike_are_no_further_from_float64_than_transformers():
    """The chunk's system of equations is then as badly conditioned as it gets: β near 1, no decay, one key."""
    sizes, tokens = (1, 1, 8, 8, 4), 256
    qkv, g, beta, weight = (x.detach() for x in inputs(tokens, sizes, 1e-4))
    qkv[:, 8:16] = qkv[:1, 8:16]
    weight[:, :-1] = 0
    beta = 1 - 1e-3 * beta
    exact = by_path([tokens], [-1], qkv, g, beta, weight, sizes)[0]
    rounded = [x.float() for x in (qkv, g, beta, weight)]
    mixed = silu(rounded[0] * rounded[3][:, -1])[None, :, None]
    theirs, _ = modeling_qwen3_5.torch_chunk_gated_delta_rule(
        *mixed.split(8, -1), g=rounded[1][None], beta=rounded[2][None], use_qk_l2norm_in_kernel=True
    )
    error = (ours([tokens], [-1], *rounded, sizes)[0] - exact).abs().max()
    assert error <= 2 * (theirs[0] - exact).abs().max() + 1e-6


def test_the_inverse_is_exact_below_the_diagonal_only():
    torch.manual_seed(0)
    for size in (16, 32, 64):
        a = torch.rand(3, size, size, dtype=torch.float64)
        expected = torch.linalg.inv(torch.eye(size, dtype=torch.float64) + a.tril(-1))
        torch.testing.assert_close(inverse_of_unit_lower(a), expected)


@pytest.mark.parametrize("cut", [1, 2, 31, 64])
def test_what_is_behind_a_segment_can_be_continued_later(cut):
    """As an engine does between prefill and decoding, and between turns."""
    sizes = SIZES[1]
    qkv, g, beta, weight = (x.detach().float() for x in inputs(150, sizes))
    whole = ours([70, 80], [-1, -1], qkv, g, beta, weight, sizes)
    first = torch.cat([torch.arange(cut), torch.arange(70, 70 + cut)])
    rest = torch.cat([torch.arange(cut, 70), torch.arange(70 + cut, 150)])
    _, *behind = ours([cut, cut], [-1, -1], *(x[first] for x in (qkv, g, beta)), weight, sizes)
    found = ours(
        [70 - cut, 80 - cut],
        [-1, -1],
        *(x[rest] for x in (qkv, g, beta)),
        weight,
        sizes,
        tuple(behind),
    )
    torch.testing.assert_close(found[0], whole[0][rest], atol=2e-6, rtol=1e-5)
    for a, b in zip(found[1:], whole[1:], strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-5)


def flash_reference(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    cu_seqlens=None, cu_seqlens_cpu=None,
):  # fmt: skip
    """`fla.ops.gated_delta_rule.chunk_gated_delta_rule` of fla-core 0.6.0, with what it checks."""
    assert (
        q.ndim == 4
        and q.shape[0] == 1
        and q.shape[2] == k.shape[2]
        and v.shape[2] % q.shape[2] == 0
    )
    assert g.shape == beta.shape == v.shape[:3] and use_qk_l2norm_in_kernel and output_final_state
    assert cu_seqlens.dtype == torch.int64 and cu_seqlens.tolist() == cu_seqlens_cpu.tolist()
    assert bool((cu_seqlens.diff() > 0).all()), (
        "a sequence without tokens shifts the numbers of those behind it"
    )
    assert initial_state is None or len(initial_state) == len(cu_seqlens) - 1
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    outs, states = [], []
    for i, (start, end) in enumerate(
        zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False)
    ):
        out, state = modeling_qwen3_5.torch_recurrent_gated_delta_rule(
            *(x[:, start:end] for x in (q, k, v)), g=g[:, start:end], beta=beta[:, start:end],
            initial_state=None if initial_state is None else initial_state[i : i + 1],
            output_final_state=True, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        outs.append(out)
        states.append(state)
    return torch.cat(outs, 1), torch.cat(states)


@pytest.mark.parametrize("row", [row for row in ROWS if not row.startswith("empty")])
def test_a_kernel_without_shared_prompts_is_called_level_by_level(row, monkeypatch):
    monkeypatch.setattr(delta, "_rule_for", lambda *_: flash_reference)
    assert_alike(*ROWS[row], SIZES[1])


def test_that_kernel_continues_what_was_kept(monkeypatch):
    monkeypatch.setattr(delta, "_rule_for", lambda *_: flash_reference)
    test_what_is_behind_a_segment_can_be_continued_later(2)


def test_training_on_a_gpu_without_flash_linear_attention_says_so(caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    assert delta._rule_for.__wrapped__("cuda", torch.bfloat16) is None
    assert (
        "gated delta nets are computed by PyTorch's operations, slowly" in caplog.text
        and "fla-core" in caplog.text
    )
    caplog.clear()
    assert (
        delta._rule_for.__wrapped__("cpu", torch.bfloat16)
        is delta._rule_for.__wrapped__("cuda", torch.float32)
        is None
    )
    assert not caplog.text
