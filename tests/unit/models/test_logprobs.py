"""The chunked head against torch's own log-softmax and entropy, values and gradients."""

import pytest
import torch

from rlinf_vl.models.logprobs import likeliest, token_logprobs


def reference(hidden, weight, targets, temperature, banned):
    logits = hidden.float() @ weight.float().t() / temperature
    if banned is not None:
        logits = logits.index_fill(1, banned, -torch.inf)
    logp = logits.log_softmax(-1)
    entropy = -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0)).sum(-1)
    return logp.gather(1, targets[:, None]).squeeze(1), entropy


@pytest.mark.parametrize("chunk", [1, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("ban", [False, True])
@pytest.mark.parametrize("used", [(1, 1), (1, 0), (0, 1)])
def test_values_and_gradients(chunk, temperature, ban, used):
    torch.manual_seed(0)
    hidden = torch.randn(20, 8, dtype=torch.float32, requires_grad=True)
    weight = torch.randn(33, 8, requires_grad=True)
    targets = torch.randint(0, 30, (20,))
    banned = torch.arange(30, 33) if ban else None
    a, b = torch.randn(20), torch.randn(20)
    results = []
    for make in (
        lambda: token_logprobs(
            hidden, weight, targets, temperature=temperature, banned=banned, chunk=chunk
        ),
        lambda: reference(hidden, weight, targets, temperature, banned),
    ):
        logprobs, entropy = make()
        loss = sum(
            (x * y).sum() for x, y, use in ((a, logprobs, used[0]), (b, entropy, used[1])) if use
        )
        grads = torch.autograd.grad(loss, (hidden, weight))
        results.append((logprobs, entropy, *grads))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=3e-6, rtol=3e-6)


def test_bfloat16_hidden_is_computed_in_float32():
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 8).bfloat16(), torch.randn(40, 8).bfloat16()
    targets = torch.randint(0, 40, (5,))
    logprobs, entropy = token_logprobs(hidden, weight, targets, chunk=2)
    expected = reference(hidden, weight, targets, 1.0, None)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close((logprobs, entropy), expected, atol=1e-5, rtol=1e-5)
    assert torch.backends.mkldnn.matmul.fp32_precision != "bf16", (
        "other products keep their precision"
    )


@pytest.mark.parametrize("ban", [False, True])
def test_logprobs_alone(ban):
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(9, 8), torch.randn(33, 8), torch.randint(0, 30, (9,))
    banned = torch.arange(30, 33) if ban else None
    logprobs, entropy = token_logprobs(
        hidden, weight, targets, temperature=0.7, banned=banned, chunk=4, with_entropy=False
    )
    assert entropy is None
    torch.testing.assert_close(
        logprobs, reference(hidden, weight, targets, 0.7, banned)[0], atol=3e-6, rtol=3e-6
    )


def test_no_response_tokens():
    hidden = torch.randn(0, 8, requires_grad=True)
    weight = torch.randn(40, 8, requires_grad=True)
    logprobs, entropy = token_logprobs(hidden, weight, torch.zeros(0, dtype=torch.int64))
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.shape == entropy.shape == (0,)
    assert (weight.grad == 0).all()


def test_peak_memory_is_a_chunk_not_the_whole():
    rows, vocab, chunk = 4096, 8000, 64  # whole float32 logits would be 131 MB
    hidden = torch.randn(rows, 16, requires_grad=True)
    weight = torch.randn(vocab, 16, requires_grad=True)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():
        logprobs, _ = token_logprobs(hidden, weight, torch.randint(0, vocab, (rows,)), chunk=chunk)
        logprobs.sum().backward()
    assert largest <= chunk * vocab


@pytest.mark.parametrize("ban", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_several_targets_at_each_position(ban, with_entropy):
    """Values and gradients of K columns, one of them asked twice, are those of torch's own log-softmax."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 8, requires_grad=True) for n in (9, 33))
    targets = torch.stack([torch.randperm(30)[:4] for _ in range(9)])
    targets[:, 3] = targets[:, 0]
    banned = torch.arange(30, 33) if ban else None
    settings = {"temperature": 0.7, "banned": banned, "chunk": 4}
    logprobs, entropy = token_logprobs(
        hidden, weight, targets, **settings, with_entropy=with_entropy
    )
    expected = [reference(hidden, weight, column, 0.7, banned) for column in targets.T]
    torch.testing.assert_close(
        logprobs, torch.stack([logp for logp, _ in expected], dim=1), atol=3e-6, rtol=3e-6
    )
    factors = torch.randn(9, 4)
    ours, theirs = (
        (logprobs * factors).sum(),
        sum((logp * f).sum() for (logp, _), f in zip(expected, factors.T, strict=True)),
    )
    if with_entropy:
        ours, theirs = ours + entropy.sum(), theirs + expected[0][1].sum()
    grads = (torch.autograd.grad(loss, (hidden, weight)) for loss in (ours, theirs))
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-5)


def test_the_likeliest_are_those_of_the_sampled_distribution():
    torch.manual_seed(0)
    hidden, weight, banned = torch.randn(9, 8), torch.randn(33, 8), torch.tensor([3, 8])
    logits = (hidden @ weight.t()).index_fill(1, banned, -torch.inf)
    assert torch.equal(likeliest(hidden, weight, 5, banned=banned, chunk=4), logits.topk(5).indices)
    everything = likeliest(hidden, weight, 100, banned=banned)
    assert everything.shape == (9, 31) and not torch.isin(everything, banned).any()
