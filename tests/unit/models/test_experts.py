"""Rows sorted by expert and brought back, against a plain loop; the same bits each time."""

import pytest
import torch

from rlinf_vl.models.experts import RowOrder

T, K, E, H = 37, 3, 8, 6


def moved(seed: int = 0, chosen: torch.Tensor | None = None):
    """Tokens through `spread`, a product that differs by expert, and `combine`: results and gradients."""
    torch.manual_seed(seed)
    x, scale = torch.randn(T, H, requires_grad=True), torch.randn(E, requires_grad=True)
    weights = torch.rand(T, K, requires_grad=True)
    experts = torch.rand(T, E).argsort(-1)[:, :K] if chosen is None else chosen
    order = RowOrder(experts.flatten(), E)
    rows = order.spread(x)
    of_row = torch.arange(E).repeat_interleave(order.counts)
    out = order.combine(rows * scale[of_row, None], weights)
    plain = (x[:, None] * scale[experts][..., None] * weights[..., None]).sum(1)
    probe = torch.randn(T, H)
    inputs = (x, scale, weights)
    return out, plain, *(torch.autograd.grad((y * probe).sum(), inputs) for y in (out, plain))


@pytest.mark.parametrize("chosen", [None, torch.tensor([5, 0, 5]).repeat(T, 1)], ids=["all", "few"])
def test_sorting_and_bringing_back_change_nothing(chosen):
    out, plain, gradients, expected = moved(chosen=chosen)
    torch.testing.assert_close(out, plain, atol=1e-6, rtol=1e-5)
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_results_and_gradients_have_the_same_bits_each_time():
    first, second = moved(), moved()
    assert torch.equal(first[0], second[0])
    assert all(map(torch.equal, first[2], second[2]))


def test_backward_adds_to_no_place_twice():
    """No operation of the backward sums rows by their index, as atomic adds on a GPU would in an order that varies."""
    names: set[str] = set()

    class Names(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.add(function.__name__)
            return function(*args, **(kwargs or {}))

    x, weights = torch.randn(T, H, requires_grad=True), torch.rand(T, K, requires_grad=True)
    order = RowOrder(torch.randint(E, (T * K,)), E)
    loss = order.combine(order.spread(x), weights).sum()
    with Names():
        loss.backward()
    assert not {name for name in names if "index_add" in name or "index_put" in name}
    assert any("index_select" in name for name in names)
