"""Attention over packed segments with shared prefixes, every kernel, against torch's own attention with an explicit mask:
values, gradients, and grouped key/value heads. The class for CUDA runs on a CPU reference of the operations that it calls."""

import numpy as np
import pytest
import torch
import varlen_reference
from torch.nn.functional import scaled_dot_product_attention

from rlinf_vl.models.attention import SegmentAttention
from rlinf_vl.models.kernels.attention import KERNELS, kernel_for
from rlinf_vl.models.kernels.products import has_bfloat16_units

HERE = [
    name
    for name, (_, serves) in KERNELS.items()
    if serves("cpu", torch.float32) or name == "varlen"
]
HALF = [
    name
    for name, (_, serves) in KERNELS.items()
    if serves("cpu", torch.bfloat16) or name == "varlen"
]
D, SCALE = 16, 0.3


@pytest.fixture(scope="module")
def flash_on_cpu():
    """`torch.ops.aten._flash_attention_forward` and its backward, which are for CUDA, for CPU tensors."""
    library = varlen_reference.register()
    yield
    library._destroy()


@pytest.fixture
def kernel(request, monkeypatch):
    """A kernel's name; the one for CUDA is made to serve the CPU."""
    if request.param == "varlen":
        request.getfixturevalue("flash_on_cpu")
        monkeypatch.setitem(KERNELS, "varlen", (KERNELS["varlen"][0], lambda device, dtype: True))
    return request.param


def mask_of(lengths, prefix, window=None, image_runs=()):
    """bool [T, T]: who sees whom, as transformers' masks have it for each path."""
    segment = np.repeat(np.arange(len(lengths)), lengths)
    before = np.zeros(len(lengths), int)  # tokens of the path before each segment
    for s, parent in enumerate(prefix):
        before[s] = before[parent] + lengths[parent] if parent >= 0 else 0
    place = np.concatenate([before[s] + np.arange(n) for s, n in enumerate(lengths)])
    image = np.full(len(segment), -1)
    for number, (start, end) in enumerate(image_runs):
        image[start:end] = number
    causal = np.tril(np.ones((len(segment), len(segment)), bool))
    causal |= (image[:, None] == image[None, :]) & (image[:, None] >= 0)
    if window is not None:
        causal &= place[None, :] > place[:, None] - window
    ancestors = np.eye(len(lengths), dtype=bool)
    for s, parent in enumerate(prefix):
        if parent >= 0:
            ancestors[s] |= ancestors[parent]
    return torch.from_numpy(causal & ancestors[segment][:, segment])


def inputs(tokens, heads, kv_heads, scale=1.0, dtype=torch.float32):
    torch.manual_seed(0)
    return [
        (scale * torch.randn(1, h, tokens, D, dtype=dtype)).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    ]


ROWS = {
    "one segment": ([7], [-1]),
    "alone": ([5, 1, 9, 40], [-1] * 4),
    "alone, of one length": ([40] * 3, [-1] * 3),
    "one group": ([6, 3, 1, 8], [-1, 0, 0, 0]),
    "groups and others": ([6, 3, 4, 11, 5, 2, 2, 13], [-1, 0, 0, -1, -1, 4, 4, -1]),
    "an empty response": ([6, 3, 0, 8, 2, 0], [-1, 0, 0, -1, -1, 4]),
    "many of one length": ([20] + [10] * 30, [-1] + [0] * 30),
    "a chain": ([6, 3, 4, 1], [-1, 0, 1, 2]),
    "a tree": ([6, 3, 4, 5, 8, 2, 7], [-1, 0, 1, 1, 0, 4, 4]),
    "trees of other depths": (
        [5, 2, 7, 3, 6, 4, 4, 9, 1, 2, 20, 6, 3],
        [-1, 0, 1, 2, 2, 0, -1, -1, 7, 8, 9, 9, 7],
    ),
    "empty segments in a tree": ([6, 0, 4, 0, 3, 2, 0, 5], [-1, 0, 1, 1, 3, 3, 0, 6]),
    "single tokens": ([4, 1, 0, 3, 1], [-1, 0, 0, -1, 3]),
    "single tokens alone": ([1, 0, 1, 1], [-1, -1, -1, -1]),
}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("kernel", HERE, indirect=True)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_equals_masked_attention(row, kernel, kv_heads):
    lengths, prefix = ROWS[row]
    q, k, v = inputs(sum(lengths), 4, kv_heads)
    plan = SegmentAttention(np.cumsum([0, *lengths]), np.array(prefix), kernel=kernel)
    expected = scaled_dot_product_attention(
        q, k, v, attn_mask=mask_of(lengths, prefix), scale=SCALE, enable_gqa=True
    )
    ours = plan.attend(0, q, k, v, SCALE).transpose(1, 2)
    torch.testing.assert_close(ours, expected, atol=2e-6, rtol=1e-5)
    grad = torch.randn_like(expected)
    for a, b in zip(
        *(torch.autograd.grad(out, (q, k, v), grad) for out in (ours, expected)), strict=True
    ):
        torch.testing.assert_close(a, b, atol=5e-6, rtol=1e-5)


def runs_of(lengths, prefix, rng):
    """int64 [n, 2]: images of random places and sizes, each within a segment."""
    bounds = np.cumsum([0, *lengths])
    runs = []
    for segment, n in enumerate(lengths):
        cuts = np.sort(rng.choice(n + 1, 2 * (n // 4), replace=False)) if n >= 4 else []
        inner = [(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=True) if a > 0]
        runs += [(bounds[segment] + a, bounds[segment] + b) for a, b in inner]
    return np.array(runs, np.int64).reshape(-1, 2)


def assert_equals_masked(lengths, prefix, kernel, window, runs, kv_heads=2):
    q, k, v = inputs(sum(lengths), 4, kv_heads)
    plan = SegmentAttention(
        np.cumsum([0, *lengths]), np.array(prefix), kernel=kernel, image_runs=runs
    )
    mask = mask_of(lengths, prefix, window, () if runs is None else runs)
    expected = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=SCALE, enable_gqa=True)
    ours = plan.attend(0, q, k, v, SCALE, window).transpose(1, 2)
    torch.testing.assert_close(ours, expected, atol=2e-6, rtol=1e-5)
    grad = torch.randn_like(expected)
    for a, b in zip(
        *(torch.autograd.grad(out, (q, k, v), grad) for out in (ours, expected)), strict=True
    ):
        torch.testing.assert_close(a, b, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [1, 2, 4, 7, 11, 100])
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("kernel", HERE, indirect=True)
def test_a_window_reaches_into_prefixes(row, kernel, window):
    assert_equals_masked(*ROWS[row], kernel, window, None)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", HERE, indirect=True)
@pytest.mark.parametrize("window", [None, 3, 6, 20])
def test_images_in_random_trees(kernel, window):
    """Tokens of an image see each other, in layers with a window, too."""
    for seed in range(25):
        rng = np.random.default_rng(seed)
        lengths, prefix = random_tree(rng)
        if sum(lengths):
            runs = runs_of(lengths, prefix, rng)
            assert_equals_masked(lengths, prefix, kernel, window, runs, (1, 2, 4)[seed % 3])


@pytest.mark.parametrize("window", [40, 300, 700])
def test_long_segments_are_computed_in_pieces(window):
    """Of more queries than a call has within a window."""
    lengths, prefix = [600, 310, 20, 25], [-1, 0, 0, 0]
    assert_equals_masked(lengths, prefix, None, window, np.array([[10, 400], [620, 622]]))


@pytest.mark.parametrize("kernel", HALF, indirect=True)
def test_windows_and_images_in_bfloat16(kernel):
    for seed in range(10):
        rng = np.random.default_rng(seed)
        lengths, prefix = random_tree(rng)
        if not sum(lengths):
            continue
        runs = runs_of(lengths, prefix, rng)
        q, k, v = inputs(sum(lengths), 4, 2, dtype=torch.bfloat16)
        exact = [x.detach().float().requires_grad_() for x in (q, k, v)]
        mask = mask_of(lengths, prefix, 5, runs)
        expected = scaled_dot_product_attention(
            *exact, attn_mask=mask, scale=SCALE, enable_gqa=True
        )
        plan = SegmentAttention(
            np.cumsum([0, *lengths]),
            np.array(prefix),
            dtype=torch.bfloat16,
            kernel=kernel,
            image_runs=runs,
        )
        ours = plan.attend(0, q, k, v, SCALE, 5).transpose(1, 2).float()
        grad = torch.randn_like(expected)
        grads = torch.autograd.grad(ours, (q, k, v), grad)
        for a, b in zip(
            [ours, *grads], [expected, *torch.autograd.grad(expected, exact, grad)], strict=True
        ):
            assert (a.float() - b).norm() <= 0.02 * b.norm() + 1e-3, seed


@pytest.mark.parametrize("runs", [[[2, 7]], [[3, 5], [5, 6]]])
def test_an_image_lies_in_one_segment(runs):
    with pytest.raises(AssertionError, match="an image"):
        SegmentAttention(np.array([0, 5, 9]), np.array([-1, 0]), image_runs=np.array(runs))


@pytest.mark.parametrize("kernel", HERE, indirect=True)
def test_large_scores_neither_overflow_nor_leak_through_padding(kernel):
    lengths, prefix = [9, 12, 10, 11], [-1, 0, 0, 0]
    # Scores in the thousands: exp of a wrong difference is inf.
    q, k, v = inputs(sum(lengths), 2, 2, scale=30.0)
    plan = SegmentAttention(np.cumsum([0, *lengths]), np.array(prefix), kernel=kernel)
    expected = scaled_dot_product_attention(
        q, k, v, attn_mask=mask_of(lengths, prefix), scale=SCALE
    )
    ours = plan.attend(0, q, k, v, SCALE).transpose(1, 2)
    torch.testing.assert_close(ours, expected, atol=1e-3, rtol=1e-3)
    grads = torch.autograd.grad(ours.sum(), (q, k, v))
    assert all(torch.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("kernel", HALF, indirect=True)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_bfloat16_is_as_close_as_bfloat16_allows(row, kernel, kv_heads):
    lengths, prefix = ROWS[row]
    q, k, v = inputs(sum(lengths), 4, kv_heads, dtype=torch.bfloat16)
    plan = SegmentAttention(
        np.cumsum([0, *lengths]), np.array(prefix), dtype=torch.bfloat16, kernel=kernel
    )
    exact = [x.detach().float().requires_grad_() for x in (q, k, v)]
    mask = mask_of(lengths, prefix)
    expected = scaled_dot_product_attention(*exact, attn_mask=mask, scale=SCALE, enable_gqa=True)
    ours = plan.attend(0, q, k, v, SCALE).transpose(1, 2)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.float(), expected, atol=0.03, rtol=0.03)
    grad = torch.randn_like(expected)
    grads = torch.autograd.grad(ours.float(), (q, k, v), grad)
    for a, b in zip(grads, torch.autograd.grad(expected, exact, grad), strict=True):
        torch.testing.assert_close(a.float(), b, atol=0.15, rtol=0.05)
        against = b if b.any() else grad  # behind a softmax of one score the gradient is 0
        assert (a.float() - b).norm() <= 0.01 * against.norm() + 1e-3


@pytest.mark.parametrize(
    "lengths", [[6, 3, 40], [10, 9, 8, 40, 11, 9], [4] * 5, [140] * 2], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_token_of_an_image_sees_the_whole_image(dtype, lengths):
    q, k, v = inputs(sum(lengths), 4, 4, dtype=dtype)
    plan = SegmentAttention(np.cumsum([0, *lengths]), causal=False, dtype=dtype)
    segment = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
    exact = [x.detach().float().requires_grad_() for x in (q, k, v)]
    expected = scaled_dot_product_attention(
        *exact, attn_mask=segment[:, None] == segment[None, :], scale=SCALE
    )
    ours = plan.attend(0, q, k, v, SCALE).transpose(1, 2).float()
    grad = torch.randn_like(expected)
    wanted = [expected, *torch.autograd.grad(expected, exact, grad)]
    for a, b in zip([ours, *torch.autograd.grad(ours, (q, k, v), grad)], wanted, strict=True):
        assert (a.float() - b).norm() <= {torch.float32: 1e-5, torch.bfloat16: 0.01}[
            dtype
        ] * b.norm()


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize(
    "kernel", [n for n in (*HERE, *(f"{name} bf16" for name in HALF)) if "varlen" not in n]
)
def test_queries_over_keys_of_their_own(kernel, scale):
    """As continued requests are prefilled: few queries each, over many keys, of similar numbers or not."""
    dtype = torch.bfloat16 if kernel.endswith("bf16") else torch.float32
    cu_q, cu_k = np.cumsum([0, 3, 5, 4, 60, 4, 1]), np.cumsum([0, 20, 18, 17, 30, 5, 19])
    q = inputs(cu_q[-1], 4, 4, scale=scale, dtype=dtype)[0][0].transpose(0, 1).detach()
    k, v = (
        x[0].transpose(0, 1).detach() for x in inputs(cu_k[-1], 4, 2, scale=scale, dtype=dtype)[1:]
    )
    grad = torch.randn_like(q)
    found = []
    for name, tensors in (
        (kernel.split()[0], (q, k, v)),
        ("matmul", [x.float() for x in (q, k, v)]),
    ):
        made = KERNELS[name][0](cu_q, cu_k, False, "cpu")
        out, lse = made.forward(*tensors, SCALE)
        found.append([out, lse, *made.backward(grad.to(out.dtype), *tensors, out, lse, SCALE)])
    assert all(torch.isfinite(x).all() for x in found[0])
    pairs = list(zip(*found, strict=True))
    # Large scores leave gradients of rounding.
    for ours, exact in pairs if scale == 1 else pairs[:2]:
        assert (ours.float() - exact).norm() <= (
            0.02 if dtype == torch.bfloat16 else 2e-5
        ) * exact.norm()


@pytest.mark.parametrize("prefix", [[-1, 0, -1, 2, 0], [-1, 0, 0, 1, 1], [-1, 2, 0, 0, 0]])
def test_segments_must_lie_in_depth_first_order(prefix):
    with pytest.raises(AssertionError, match="depth-first"):
        SegmentAttention(np.arange(0, 12, 2), np.array(prefix))


@pytest.mark.parametrize("kernel", HERE, indirect=True)
def test_a_kernel_that_serves_many_sequences_is_called_once_a_level(kernel):
    lengths, prefix = ROWS["trees of other depths"]
    plan = SegmentAttention(np.cumsum([0, *lengths]), np.array(prefix), kernel=kernel)
    assert len(plan.full.further) == (3 if KERNELS[kernel][0].batches_sequences else 6)


def random_tree(rng):
    """(lengths, prefix) of a few trees, depth 4 at most, in depth-first order."""
    lengths, prefix = [], []

    def grow(parent, depth):
        lengths.append(int(rng.integers(0, 12)))
        prefix.append(parent)
        segment = len(prefix) - 1
        for _ in range(rng.integers(0, 4) if depth < 4 else 0):
            grow(segment, depth + 1)

    for _ in range(rng.integers(1, 4)):
        grow(-1, 1)
    return lengths, prefix


@pytest.mark.parametrize("kernel", [*HERE, *(f"{name} bf16" for name in HALF)])
def test_random_trees_equal_masked_attention(kernel, request, monkeypatch):
    """Values and gradients; in bfloat16 as close as one rounding a level allows."""
    name, half = kernel.split()[0], kernel.endswith("bf16")
    if name == "varlen":
        request.getfixturevalue("flash_on_cpu")
        monkeypatch.setitem(KERNELS, "varlen", (KERNELS["varlen"][0], lambda device, dtype: True))
    dtype = torch.bfloat16 if half else torch.float32
    for seed in range(40):
        lengths, prefix = random_tree(np.random.default_rng(seed))
        if not sum(lengths):
            continue
        q, k, v = inputs(sum(lengths), 4, 2, dtype=dtype)
        exact = [x.detach().float().requires_grad_() for x in (q, k, v)]
        mask = mask_of(lengths, prefix)
        expected = scaled_dot_product_attention(
            *exact, attn_mask=mask, scale=SCALE, enable_gqa=True
        )
        plan = SegmentAttention(
            np.cumsum([0, *lengths]), np.array(prefix), dtype=dtype, kernel=name
        )
        ours = plan.attend(0, q, k, v, SCALE).transpose(1, 2)
        grad = torch.randn_like(expected)
        found = [ours.float(), *torch.autograd.grad(ours.float(), (q, k, v), grad)]
        for a, b in zip(
            found, [expected, *torch.autograd.grad(expected, exact, grad)], strict=True
        ):
            if half:
                assert (a.float() - b).norm() <= 0.02 * b.norm() + 1e-3, seed
            else:
                torch.testing.assert_close(a, b, atol=5e-6, rtol=1e-5)


def test_the_kernel_follows_device_and_dtype():
    for device, dtype, expected in (
        ("cuda", torch.bfloat16, "varlen"),
        ("cuda", torch.float32, "matmul"),
        ("cpu", torch.bfloat16, "amx_cpu" if has_bfloat16_units() else "flash_cpu"),
    ):
        assert kernel_for(torch.device(device), dtype) is KERNELS[expected][0]
    with pytest.raises(
        ValueError, match="'varlen' does not serve torch.float32 on cpu; these do: .*flash_cpu"
    ):
        kernel_for(torch.device("cpu"), torch.float32, "varlen")


def test_the_cuda_kernel_is_called_with_what_it_takes():
    """No GPU is needed to see shapes and dtypes through PyTorch's own registration of the operation."""
    q = torch.empty(9, 4, 64, dtype=torch.bfloat16, device="meta")
    k = torch.empty(9, 2, 64, dtype=torch.bfloat16, device="meta")
    kernel = KERNELS["varlen"][0](np.array([0, 5, 9]), np.array([0, 5, 9]), True, "meta")
    out, lse = kernel.forward(q, k, k, 0.125)
    assert (out.shape, lse.shape, lse.dtype) == ((9, 4, 64), (9, 4), torch.float32)
    assert [g.shape for g in kernel.backward(out, q, k, k, out, lse, 0.125)] == [
        q.shape,
        k.shape,
        k.shape,
    ]


@pytest.mark.parametrize("depth", [1, 4, 16])
def test_deep_trees_are_merged_without_rounding_at_each_level(depth):
    """In bfloat16 the last segment's error against float32 stays near that of rounding the result once, at any depth."""
    tokens, heads, size = 48, 4, 64
    bounds, prefix = np.arange(depth + 2) * tokens, np.arange(depth + 1) - 1
    generator = torch.Generator().manual_seed(0)
    rows = [
        torch.randn(1, heads, bounds[-1], size, generator=generator).bfloat16() for _ in range(3)
    ]
    exact = SegmentAttention(bounds, prefix).attend(0, *(x.float() for x in rows), size**-0.5)[
        :, -tokens:
    ]
    half = SegmentAttention(bounds, prefix, dtype=torch.bfloat16).attend(0, *rows, size**-0.5)[
        :, -tokens:
    ]
    rounding = (exact.bfloat16().float() - exact).abs().mean()
    assert (half.float() - exact).abs().mean() < 2.2 * rounding
