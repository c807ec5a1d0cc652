"""Products by oneDNN equal those of float64, in every orientation that a training step has; small ones stay PyTorch's."""

import pytest
import torch
from torch import nn

from rlinf_vl.models.kernels import cpu, products
from rlinf_vl.models.logprobs import token_logprobs


@pytest.fixture
def by_onednn(monkeypatch):
    """As on a CPU where oneDNN is faster, and for any size; tells which products it made."""
    if not torch.backends.mkldnn.is_available() or not hasattr(
        torch.ops.mkldnn, "_linear_pointwise"
    ):
        pytest.skip("this PyTorch has no oneDNN")
    made = []
    real = products._by_onednn

    def spy(a, b):
        made.append(real(a, b))
        return made[-1]

    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(products, "ONEDNN_FROM", 1)
    monkeypatch.setattr(products, "_by_onednn", spy)
    return made


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("a_turned", [False, True])
@pytest.mark.parametrize("b_turned", [False, True])
def test_products_of_any_strides(by_onednn, a_turned, b_turned):
    a, b = numbers(70, 33), numbers(33, 90, seed=1)
    a_given = a.t().contiguous().t() if a_turned else a
    b_given = b.t().contiguous().t() if b_turned else b
    exact = (a.double() @ b.double()).float()
    torch.testing.assert_close(products.matmul(a_given, b_given), exact, atol=1e-5, rtol=1e-5)
    out = torch.ones(70, 90)
    products.add_matmul(out, a_given, b_given)
    torch.testing.assert_close(out, exact + 1, atol=1e-5, rtol=1e-5)
    assert by_onednn and all(by_onednn)


def test_projections_and_head_have_the_gradients_of_float64(by_onednn):
    layers = [nn.Linear(32, width, bias=False) for width in (48, 16)]
    vocab = numbers(50, 64, seed=3)
    targets = torch.arange(40) % 50

    def loss(dtype, project, head):
        x = numbers(1, 40, 32, seed=2).to(dtype).requires_grad_()
        weights = [layer.weight.detach().clone().to(dtype).requires_grad_() for layer in layers]
        out_weight = vocab.detach().clone().to(dtype).requires_grad_()
        first, second = project(x, weights)
        logprobs = head(torch.cat([first, second], -1)[0], out_weight)
        logprobs.mean().backward()
        return [logprobs.detach(), x.grad, *(w.grad for w in weights), out_weight.grad]

    ours = loss(
        torch.float32,
        lambda x, weights: cpu._Projections.apply(x, (), *weights),
        lambda hidden, weight: token_logprobs(hidden, weight, targets, chunk=16)[0],
    )
    assert by_onednn and all(by_onednn)
    exact = loss(
        torch.float64,
        lambda x, weights: [x @ w.t() for w in weights],
        lambda hidden, weight: (
            torch.log_softmax(hidden @ weight.t(), -1).gather(1, targets[:, None]).squeeze(1)
        ),
    )
    for mine, theirs in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine, theirs.float(), atol=1e-5, rtol=1e-4)


def test_small_products_bfloat16_and_the_head_in_bfloat16_stay_pytorchs(monkeypatch):
    from rlinf_vl.models.kernels.products import bfloat16_products

    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    big = torch.empty(2**10, 2**10)
    assert products._by_onednn(big, big)
    assert not products._by_onednn(big[:200], big)  # below ONEDNN_FROM
    assert not products._by_onednn(big.bfloat16(), big.bfloat16())
    with bfloat16_products(big.bfloat16()):
        assert not products._by_onednn(big, big)
