"""KL estimators: sign and direction by hand, expectations by enumeration of a categorical distribution."""

import math
from itertools import pairwise

import pytest
import torch

from rlinf_vl.algorithms import DIVERGENCE_ESTIMATORS, divergence, reverse_kl

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("estimator", "expected"),
    # log q - log p = log 2: p gives half the probability that q gives.
    [
        ("k1", math.log(2)),
        ("k2", math.log(2) ** 2 / 2),
        ("k3", 0.5 - 1 + math.log(2)),
        ("abs", math.log(2)),
    ],
)
def test_by_hand_where_q_is_twice_p(estimator, expected):
    log_q, log_p = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
    estimate = divergence(log_p, log_q, torch.tensor([True]), estimator)
    torch.testing.assert_close(estimate, torch.tensor([expected]))


def test_k1_of_swapped_arguments_has_the_other_sign():
    log_p, log_q, mask = torch.tensor([-3.0]), torch.tensor([-1.0]), torch.tensor([True])
    assert divergence(log_p, log_q, mask, "k1").item() == 2.0
    assert divergence(log_q, log_p, mask, "k1").item() == -2.0


def test_expectation_under_q_is_the_exact_kl_of_q_from_p():
    generator = torch.Generator().manual_seed(0)
    log_p, log_q = (
        torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0) for _ in range(2)
    )
    q, mask = log_q.exp(), torch.ones(7, dtype=torch.bool)
    exact = sum(q[i].item() * (log_q[i] - log_p[i]).item() for i in range(7))
    reverse = sum(log_p[i].exp().item() * (log_p[i] - log_q[i]).item() for i in range(7))
    assert abs(exact - reverse) > 1e-2  # the direction matters here
    for estimator in ("k1", "k3"):
        estimate = (q * divergence(log_p, log_q, mask, estimator)).sum().item()
        assert estimate == pytest.approx(exact, abs=1e-12)
    assert (divergence(log_p, log_q, mask, "k1") < 0).any()
    for estimator in ("k2", "k3", "abs"):
        assert (divergence(log_p, log_q, mask, estimator) >= 0).all()


def test_k2_approaches_the_kl_of_close_distributions():
    log_q = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log()
    log_p = (log_q + 1e-3 * torch.tensor([1.0, -2.0, 0.5])).log_softmax(0)
    mask = torch.ones(3, dtype=torch.bool)
    exact = (log_q.exp() * (log_q - log_p)).sum().item()
    assert (log_q.exp() * divergence(log_p, log_q, mask, "k2")).sum().item() == pytest.approx(
        exact, rel=5e-3
    )


def test_expected_gradients_as_a_loss():
    """Summed over every outcome with its probability: of k1 nothing is left; the others descend on divergences of p and q."""
    generator = torch.Generator().manual_seed(0)
    logits, reference = (torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    log_q, log_p = logits.log_softmax(0), reference.log_softmax(0)
    mask = torch.ones(7, dtype=torch.bool)
    minimised = {
        "k1": 0 * log_q.sum(),
        "k2": (log_q.exp() * (log_q - log_p)).sum(),  # KL(q‖p)
        "k3": (log_p.exp() * (log_p - log_q)).sum(),  # KL(p‖q)
        "abs": (log_q.exp() - log_p.exp()).abs().sum(),
    }
    for estimator, target in minimised.items():
        loss = (
            log_q.detach().exp() * divergence(log_p, log_q, mask, estimator)
        ).sum()  # its expectation; samples are fixed
        (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
        (expected,) = torch.autograd.grad(target, logits, retain_graph=True)
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-14, msg=estimator)
        assert (gradient.abs().max() > 1e-2) == (estimator != "k1")


@pytest.mark.parametrize("estimator", DIVERGENCE_ESTIMATORS)
def test_gradients_in_both_arguments(estimator):
    delta = torch.tensor([0.7, -0.4, 0.0], dtype=torch.float64)  # log q - log p
    log_p = torch.tensor([-2.0, -1.0, -0.5], dtype=torch.float64, requires_grad=True)
    log_q = (log_p.detach() + delta).requires_grad_()
    divergence(log_p, log_q, torch.ones(3, dtype=torch.bool), estimator).sum().backward()
    expected = {
        "k1": torch.ones_like(delta),
        "k2": delta,
        "k3": 1 - (-delta).exp(),
        "abs": delta.sign(),
    }[estimator]
    torch.testing.assert_close(log_q.grad, expected)
    torch.testing.assert_close(log_p.grad, -expected)


@pytest.mark.parametrize("estimator", DIVERGENCE_ESTIMATORS)
def test_garbage_outside_the_mask_changes_neither_value_nor_gradient(estimator):
    log_p = torch.tensor([[-1.0, NAN, INF], [-2.0, -INF, 3.0]], requires_grad=True)
    log_q = torch.tensor([[-1.5, 0.0, INF], [-1.0, -INF, NAN]], requires_grad=True)
    mask = torch.tensor([[True, False, False], [True, False, False]])
    estimate = divergence(log_p, log_q, mask, estimator)
    assert torch.equal(estimate[~mask], torch.zeros(4))
    estimate.sum().backward()
    for leaf in (log_p, log_q):
        assert torch.isfinite(leaf.grad).all()
        assert torch.equal(leaf.grad[~mask], torch.zeros(4))
        assert (leaf.grad[mask] != 0).all()


def test_k3_of_a_huge_ratio_is_finite_without_gradient():
    log_q = torch.tensor([-500.0], requires_grad=True)
    estimate = divergence(torch.tensor([0.0]), log_q, torch.tensor([True]), "k3")
    estimate.sum().backward()
    assert estimate.item() == pytest.approx(math.exp(20) - 21)
    assert log_q.grad.item() == 0.0


def test_k3_keeps_its_digits_for_tiny_ratios():
    log_q = torch.tensor([-1.0, -1.0 + 2**-12])
    estimate = divergence(torch.tensor([-1.0, -1.0]), log_q, torch.tensor([True, True]), "k3")
    assert estimate[0] == 0
    assert estimate[1].item() == pytest.approx(2**-25, rel=1e-2)


def test_wrong_input_is_named():
    zeros, mask = torch.zeros(3), torch.ones(3, dtype=torch.bool)
    with pytest.raises(ValueError, match="k1, k2, k3, abs; got 'kl'"):
        divergence(zeros, zeros, mask, "kl")
    with pytest.raises(ValueError, match=r"log_q has shape \(1, 3\), mask \(3,\)"):
        divergence(zeros, zeros[None], mask, "k1")


def _two_distributions(tokens: int = 50, rows: int = 20):
    generator = torch.Generator().manual_seed(0)
    logits = [
        3 * torch.randn(rows, tokens, generator=generator, dtype=torch.float64) for _ in range(2)
    ]
    return [x.log_softmax(-1).requires_grad_() for x in logits]


def test_reverse_kl_over_all_tokens_is_torchs_own():
    q, p = _two_distributions()
    torch.testing.assert_close(
        reverse_kl(q, p),
        torch.nn.functional.kl_div(p, q, log_target=True, reduction="none").sum(-1),
        atol=1e-4,
        rtol=1e-4,
    )


def test_reverse_kl_grows_with_the_tokens_told_apart_up_to_the_whole():
    """Tokens that are merged hide what they differ in (the data-processing inequality)."""
    q, p = _two_distributions()
    order = q.argsort(dim=-1, descending=True)
    found = [
        reverse_kl(q.gather(1, order[:, :k]), p.gather(1, order[:, :k])) for k in (1, 2, 5, 20, 50)
    ]
    assert all((more >= fewer - 1e-9).all() for fewer, more in pairwise(found))
    assert (found[0] >= 0).all()
    one = (
        q.exp()[:, 0] * (q - p)[:, 0]
        + (1 - q.exp()[:, 0]) * ((1 - q.exp()[:, 0]) / (1 - p.exp()[:, 0])).log()
    )
    torch.testing.assert_close(reverse_kl(q[:, :1], p[:, :1]), one)


def test_reverse_kl_descends_on_the_students_logits():
    """Its gradient in the student's logits is q_v (log q_v - log p_v - KL), where the K are all tokens."""
    logits = torch.tensor([[1.0, 0.0, -1.0]], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[0.0, 1.0, 0.5]], dtype=torch.float64).log_softmax(-1)
    q = logits.log_softmax(-1)
    (grad,) = torch.autograd.grad(reverse_kl(q, teacher).sum(), logits, retain_graph=True)
    kl = (q.exp() * (q - teacher)).sum(-1, keepdim=True)
    torch.testing.assert_close(grad, q.exp() * (q - teacher - kl), atol=1e-5, rtol=1e-5)
    same = reverse_kl(q[:, :2], q[:, :2].detach())
    assert same.item() == 0 and torch.autograd.grad(same.sum(), logits)[0].abs().max() < 1e-12
