"""RMSNorm, rotation, SwiGLU and the rest of the layers: against formulas in float64 and against transformers' own."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import varlen_reference
from tiny import IMAGE_TOKENS, PAD, PATCH_DIM, banned, group, pixels, tiny_model
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRMSNorm, apply_rotary_pos_emb

from rlinf_vl.models import layers
from rlinf_vl.models.families import family_of
from rlinf_vl.models.kernels import cpu, cuda
from rlinf_vl.models.kernels.attention import KERNELS
from rlinf_vl.models.kernels.cpu import projections, rms_norm, rotate, swiglu
from rlinf_vl.models.loading import use_packed_attention
from rlinf_vl.models.policy import PolicyModel, encode_images
from rlinf_vl.packing.collator import Collator, Member


@pytest.mark.parametrize("shape", [(64,), (7, 64), (2, 5, 3, 16)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_values_and_gradients(shape, dtype, tolerance):
    torch.manual_seed(0)
    norm = Qwen3VLTextRMSNorm(shape[-1], eps=1e-3).to(dtype)
    norm.weight.data.uniform_(0.5, 2.0)
    x = (torch.randn(shape) * 3 + 1).to(dtype).requires_grad_()
    grad = torch.randn(shape).to(dtype)
    exact, weight = (
        x.detach().double().requires_grad_(),
        norm.weight.detach().double().requires_grad_(),
    )
    expected = weight * exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-3)
    targets = [expected, *torch.autograd.grad(expected, (exact, weight), grad.double())]
    theirs = norm(x)
    theirs = [theirs, *torch.autograd.grad(theirs, (x, norm.weight), grad)]
    ours = rms_norm(x, norm.weight, 1e-3)
    ours = [ours, *torch.autograd.grad(ours, (x, norm.weight), grad)]
    for a, b, target in zip(ours, theirs, targets, strict=True):
        error, their_error = ((value.double() - target).norm() / target.norm() for value in (a, b))
        assert a.dtype == dtype and error <= max(tolerance, 2 * their_error)


def test_rotation():
    torch.manual_seed(0)
    x, angles = torch.randn(2, 5, 3, 16, requires_grad=True), torch.randn(2, 5, 8)
    cos, sin = (torch.cat((f(angles), f(angles)), -1) for f in (torch.cos, torch.sin))
    q, _ = apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=2)
    ours = rotate(x, cos.unsqueeze(2), sin.unsqueeze(2))
    torch.testing.assert_close(ours, q, atol=1e-6, rtol=1e-6)
    grad = torch.randn_like(x)
    for a, b in zip(
        torch.autograd.grad(ours, x, grad), torch.autograd.grad(q, x, grad), strict=True
    ):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_swiglu():
    gate, up = (torch.randn(4, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    torch.testing.assert_close(swiglu(gate, up), torch.nn.functional.silu(gate) * up)
    assert torch.autograd.gradcheck(swiglu, (gate, up))
    half = [x.detach().bfloat16().requires_grad_() for x in (gate, up)]
    ours = swiglu(*half)
    theirs = torch.nn.functional.silu(half[0]) * half[1]
    grad = torch.randn_like(ours)
    for a, b in zip(*(torch.autograd.grad(out, half, grad) for out in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, atol=0.02, rtol=0.02)


def test_projections_equal_linear_layers():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, n, bias=False).double() for n in (5, 3, 3)]
    weights = [layer.weight for layer in layers]
    x = torch.randn(2, 4, 6, dtype=torch.float64, requires_grad=True)
    for a, b in zip(projections(x, *layers), (layer(x) for layer in layers), strict=True):
        torch.testing.assert_close(a, b)
    assert torch.autograd.gradcheck(lambda x, *_: projections(x, *layers), (x, *weights))
    weights[1].requires_grad_(False)
    grads = torch.autograd.grad(
        sum(y.sum() for y in projections(x, *layers)), (weights[0], weights[2])
    )
    assert all(g.shape == w.shape for g, w in zip(grads, (weights[0], weights[2]), strict=True))
    with_bias = torch.nn.Linear(6, 5).double()
    torch.testing.assert_close(projections(x, with_bias, layers[0])[0], with_bias(x))


@pytest.mark.parametrize(
    "outs", [(96, 128), (40, 64, 64), (16, 24)], ids=["wider", "alike", "narrower"]
)
def test_projections_in_bfloat16(outs):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(48, n, bias=False).bfloat16() for n in outs]
    x = torch.randn(3, 50, 48).bfloat16().requires_grad_()
    grads = [torch.randn(3, 50, n).bfloat16() for n in outs]
    inputs = [x, *(layer.weight for layer in layers)]
    ours = torch.autograd.grad(projections(x, *layers), inputs, grads)
    exact = [a.detach().double().requires_grad_() for a in inputs]
    theirs = torch.autograd.grad(
        [exact[0] @ w.t() for w in exact[1:]], exact, [g.double() for g in grads]
    )
    for a, b in zip(ours, theirs, strict=True):
        assert a.is_contiguous() and a.dtype == torch.bfloat16
        assert (a - b).norm() <= 0.005 * b.norm()


def test_many_rows_of_bfloat16_sum_to_the_norms_gradient():
    torch.manual_seed(0)
    x, grad = (torch.randn(5000, 16).bfloat16() for _ in range(2))
    weight = torch.ones(16, dtype=torch.bfloat16, requires_grad=True)
    (ours,) = torch.autograd.grad(rms_norm(x, weight, 1e-6), weight, grad)
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True))
    theirs = (exact * grad).sum(0)
    assert (ours - theirs).norm() <= 0.005 * theirs.norm()


def test_the_parts_follow_the_tensors_device():
    assert layers.kernels_for(torch.empty(1)) is cpu
    on_gpu: Any = SimpleNamespace(is_cuda=True)
    assert layers.kernels_for(on_gpu) is cuda
    functions = [
        {n for n, f in vars(m).items() if callable(f) and f.__module__ == m.__name__}
        for m in (cpu, cuda)
    ]
    assert functions[1] == {"rms_norm", "rotate", "swiglu", "projections"} <= functions[0]


def close(ours, theirs, tolerance=1e-6):
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= tolerance * b.norm(), (a - b).norm() / b.norm()


@pytest.mark.parametrize("part", ["rms_norm", "rotate", "swiglu", "projections"])
def test_what_cuda_uses_gives_the_same_numbers(part):
    """The parts for CUDA, run on a CPU in float32: values and gradients."""
    torch.manual_seed(0)
    x, other = torch.randn(7, 3, 16, requires_grad=True), torch.randn(7, 3, 16, requires_grad=True)
    angles = torch.randn(7, 1, 8).repeat(1, 1, 2)
    linear = [torch.nn.Linear(16, n, bias=False) for n in (16, 8)]
    cases: dict[str, Any] = {
        "rms_norm": ([x, weight := torch.rand(16, requires_grad=True)], (x, weight, 1e-3)),
        "rotate": ([x], (x, angles.cos(), angles.sin())),
        "swiglu": ([x, other], (x, other)),
        "projections": ([x, *(layer.weight for layer in linear)], (x, *linear)),
    }
    inputs, arguments = cases[part]
    made = []
    for module in (cuda, cpu):
        out = getattr(module, part)(*arguments)
        values = list(out) if isinstance(out, tuple) else [out]
        made.append([*values, *torch.autograd.grad([v.square().sum() for v in values], inputs)])
    close(*made)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.bfloat16, 0.03)])
def test_a_model_of_what_cuda_uses_gives_the_same_numbers(dtype, tolerance, monkeypatch):
    """Logprobs, entropy and gradients of a packed row with images and a shared prompt, a trained tower included: with the parts
    and the attention for CUDA (which want one dtype of queries, keys and values), against the CPU's own in float32."""
    family = family_of("qwen3_vl")
    rng = np.random.default_rng(0)
    groups = group(rng, [(2, 3)], [5, 9], "a"), group(rng, [], [4], "b")
    members = [Member(g, i, [0.0]) for g in groups for i in range(len(g.trajectories))]
    batch = Collator(family, IMAGE_TOKENS, pixels, PAD)(members, run_vision=True)

    def numbers(dtype):
        model = use_packed_attention(tiny_model(vision_heads=3), family).to(dtype)
        policy = PolicyModel(model, family, banned(), temperature=1.0, chunk=None)
        logprobs, entropy = policy(batch)
        assert entropy is not None
        grads = torch.autograd.grad(
            logprobs.sum() + entropy.sum(), list(policy.parameters()), allow_unused=True
        )
        return logprobs, entropy, torch.cat([g.flatten().float() for g in grads if g is not None])

    expected = numbers(torch.float32)
    monkeypatch.setattr(layers, "kernels_for", lambda x: cuda)
    monkeypatch.setitem(KERNELS, "varlen", (KERNELS["varlen"][0], lambda device, dtype: True))
    library = varlen_reference.register()
    try:
        ours = numbers(dtype)
    finally:
        library._destroy()
    close(ours, expected, tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vision_tower_equals_transformers(dtype):
    plain, ours = (
        tiny_model().to(dtype),
        use_packed_attention(tiny_model(), family_of("qwen3_vl")).to(dtype),
    )
    grids = np.array([[1, 4, 2], [2, 2, 4], [1, 2, 2]])
    patches = np.random.default_rng(0).standard_normal(
        (grids.prod(axis=1).sum(), PATCH_DIM), np.float32
    )
    with torch.no_grad():
        expected = plain.model.visual(
            torch.from_numpy(patches).to(dtype), grid_thw=torch.from_numpy(grids)
        )
        features = encode_images(ours, family_of("qwen3_vl"), patches, grids, "cpu")
    for a, b in zip(
        (features.tokens, *features.deepstack),
        (expected.pooler_output, *expected.deepstack_features),
        strict=True,
    ):
        assert (a - b).norm() <= {torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype] * b.norm()


def test_every_layer_of_the_text_model_computes_this_way():
    family = family_of("qwen3_vl")
    model = use_packed_attention(tiny_model(), family)
    replaced = [type(m).__name__ for m in model.modules() if "forward" in vars(m)]
    expected = {"RMSNorm": 9, "Attention": 2, "MLP": 2}
    expected = [f"Qwen3VLText{name}" for name, n in expected.items() for _ in range(n)]
    assert sorted(replaced) == sorted(
        [*expected, "Qwen3VLVisionPatchEmbed", *["Qwen3VLVisionAttention"] * 2]
    )


def test_patch_embedding():
    plain, ours = (
        tiny_model().model.visual.patch_embed,
        use_packed_attention(tiny_model(), family_of("qwen3_vl")),
    )
    patches = torch.randn(6, PATCH_DIM)
    torch.testing.assert_close(
        ours.model.visual.patch_embed(patches), plain(patches), atol=1e-6, rtol=1e-5
    )
