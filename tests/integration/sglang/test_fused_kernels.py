"""The Triton kernels in Triton's interpreter, on a CPU: against PyTorch's operations in float64. (Triton comes with the PyTorch of
SGLang's environment. On a GPU, tests/gpu runs them compiled.)"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.integration
@pytest.mark.parametrize("part", ["rotate", "swiglu", "head"])
def test_equals_the_formulas(part):
    pytest.importorskip("triton")
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, __file__, part],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def close(ours, exact, tolerance=1e-5):
    assert (ours.double() - exact).norm() <= tolerance * exact.norm() + 1e-12, (ours, exact)


def rotate(torch, fused):
    """All columns, some of them, several leading dimensions, an input that isn't dense."""
    for shape, turned, lead in (
        ((1, 5, 3, 16), 16, (1, 5)),
        ((1, 4, 6, 24), 8, (1, 4)),
        ((3, 1, 2, 8), 8, (3, 1)),
    ):
        x = torch.randn(shape, requires_grad=True)
        angles = torch.randn(*lead, 1, turned)
        cos, sin = angles.cos(), angles.sin()
        for given in (x, x.transpose(0, 1).contiguous().transpose(0, 1)):
            out = fused.rotate(given, cos, sin)
            exact = x.detach().double().requires_grad_()
            a, rest = exact.split([turned, shape[-1] - turned], -1)
            first, second = a.chunk(2, -1)
            expected = torch.cat([a * cos + torch.cat([-second, first], -1) * sin, rest], -1)
            grad = torch.randn(shape)
            close(out, expected)
            close(
                torch.autograd.grad(out, x, grad)[0],
                torch.autograd.grad(expected, exact, grad.double())[0],
            )
    # A vision tower's queries and keys at once.
    x, angles = (
        torch.randn(4, 2, 3, 8),
        torch.randn(4, 1, 1, 8),
    )
    first, second = x.chunk(2, -1)
    expected = x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()
    close(fused.rotate(x, angles.cos(), angles.sin()), expected.double())


def swiglu(torch, fused):
    for shape in ((3, 5), (7, 1000)):
        inputs = [torch.randn(shape, requires_grad=True) for _ in range(2)]
        exact = [x.detach().double().requires_grad_() for x in inputs]
        out, expected = fused.swiglu(*inputs), torch.nn.functional.silu(exact[0]) * exact[1]
        grad = torch.randn(shape)
        close(out, expected)
        made = (
            torch.autograd.grad(out, inputs, grad),
            torch.autograd.grad(expected, exact, grad.double()),
        )
        for a, b in zip(*made, strict=True):
            close(a, b)


def head(torch, fused):
    """Vocabularies below and above a block, banned ids (a whole block of them), a temperature, large logits."""
    for vocab, scale in ((50, 1.0), (9000, 1.0), (9000, 30.0)):
        for bans in (False, True):
            logits = scale * torch.randn(4, vocab)
            banned = torch.zeros(vocab, dtype=torch.uint8) if bans else None
            if banned is not None:
                banned[: vocab // 2] = 1
            exact = logits.double().requires_grad_()
            tempered = exact / 0.7
            if banned is not None:
                tempered = tempered.masked_fill(banned.bool(), -torch.inf)
            logp = tempered.log_softmax(-1)
            p = logp.exp()
            entropy = -(p * logp.masked_fill(p == 0, 0)).sum(-1)
            targets = torch.randint(vocab // 2, vocab, (4, 1))
            lse, found = fused.head_statistics(logits, banned, 0.7, True)
            close(lse[:, 0], tempered.logsumexp(-1))
            close(found, entropy.detach(), 1e-4)
            assert fused.head_statistics(logits, banned, 0.7, False)[1] is None
            for g, h in (
                (torch.randn(4, 1), torch.randn(4, 1)),
                (torch.randn(4, 1), None),
                (None, torch.randn(4, 1)),
            ):
                loss = sum(
                    (x * w.double()).sum()
                    for x, w in ((logp.gather(1, targets), g), (entropy[:, None], h))
                    if w is not None
                )
                ours = fused.head_gradient(
                    logits, banned, 0.7, (targets, lse, g, found, h), torch.float32
                )
                close(ours, torch.autograd.grad(loss, exact, retain_graph=True)[0], 1e-4)


if __name__ == "__main__":
    import torch

    from rlinf_vl.models.kernels import fused

    torch.manual_seed(0)
    {"rotate": rotate, "swiglu": swiglu, "head": head}[sys.argv[1]](torch, fused)
