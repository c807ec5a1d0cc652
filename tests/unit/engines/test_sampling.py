"""The draw itself: it follows the distribution, and never gives an id without probability, whatever rounding does."""

import numpy as np
import pytest
import torch

from rlinf_vl.engines.torch.sampling import Sampler, uniforms
from rlinf_vl.types import SamplingParams

P = torch.tensor([0.0, 0.35, 0.0, 0.25, 0.02, 0.0, 0.2, 0.08, 0.1, 0.0])
BANNED = P == 0
N = 20_000


def sampler(n, **sampling):
    return Sampler([SamplingParams(**sampling)] * n, BANNED)


def logits(n):
    out = P.log().repeat(n, 1)
    out[:, BANNED] = 3.0  # likelier than any other, were they not banned
    return out


def excess(counts, p):
    """Pearson's χ² of the counts, as standard deviations above what the distribution p gives (normal approximation)."""
    expected = p * counts.sum()
    assert counts[p == 0].sum() == 0 and expected[p > 0].min() >= 5
    chi2 = ((counts - expected)[p > 0] ** 2 / expected[p > 0]).sum()
    freedom = int((p > 0).sum()) - 1
    return float((chi2 - freedom) / np.sqrt(2 * freedom))


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, P),
        ({"temperature": 0.5}, P**2),
        ({"top_k": 3}, torch.where(P >= 0.2, P, 0.0)),
        (
            {"top_p": 0.65},
            torch.where(P >= 0.2, P, 0.0),
        ),  # 0.35 + 0.25 are less than 0.65: one more is kept
        ({"top_p": 0.59}, torch.where(P >= 0.25, P, 0.0)),
        ({"top_p": 0.01}, torch.where(P >= 0.35, P, 0.0)),
    ],
)
def test_draws_follow_the_distribution(sampling, expected):
    p = (expected / expected.sum()).numpy()
    ids, logprobs = sampler(N, **sampling)(logits(N), torch.from_numpy(uniforms(7, N)))
    counts = np.bincount(ids.numpy(), minlength=len(P))
    if (p > 0).sum() > 1:
        assert excess(counts, p) < 4
        without = np.where(np.arange(len(p)) == p.argmax(), 0, counts)
        assert excess(without, p) > 100, (
            "an engine that never draws the likeliest token must not pass"
        )
        shifted = np.where(np.arange(len(p)) == p.argmax(), counts * 0.9, counts)
        assert excess(shifted, p) > 4, "nor one that draws it a little too rarely"
    else:
        assert counts[p.argmax()] == N
    # What is reported is the distribution that the trainer scores: tempered, banned ids left out, not truncated.
    whole = P ** (1 / sampling.get("temperature", 1.0))
    torch.testing.assert_close(logprobs, (whole / whole.sum()).log()[ids], atol=1e-5, rtol=1e-5)


def test_greedy_rows_take_the_likeliest_at_any_number():
    params = [SamplingParams(0.0), SamplingParams(1.0)] * 500
    ids, logprobs = Sampler(params, BANNED)(logits(1000), torch.from_numpy(uniforms(1, 1000)))
    assert (ids[::2] == 1).all() and len(ids[1::2].unique()) == int((P > 0).sum())
    torch.testing.assert_close(logprobs[::2], P.log()[1].expand(500))


# Where an id has no probability.
RISES = torch.zeros(len(P)).index_fill(0, torch.tensor([0, 2, 5, 9]), 1e-3)
CUMULATIVES = {
    "rises at banned ids": P.cumsum(0) + RISES,
    "falls behind banned ids": P.cumsum(0) + RISES - 2 * RISES.roll(1),
    "ends below its largest value": torch.cat([P.cumsum(0)[:-1], P.cumsum(0)[-1:] - 1e-3]),
    "ends above": torch.cat([P.cumsum(0)[:-1], P.cumsum(0)[-1:] + 1e-3]),
    "zeros": torch.zeros(len(P)),
}


@pytest.mark.parametrize("cumulative", CUMULATIVES)
def test_no_banned_id_is_drawn_whatever_the_cumulative_sum_is(cumulative, monkeypatch):
    """A parallel sum rounds differently at every place: on CUDA it need not be monotone, nor constant where nothing is added."""
    n = 4001
    monkeypatch.setattr(
        torch.Tensor, "cumsum", lambda x, dim: CUMULATIVES[cumulative].repeat(len(x), 1)
    )
    u = torch.cat([torch.linspace(0, 1, n)[:-1], torch.tensor([1 - 2**-24])])
    ids, logprobs = sampler(n)(logits(n), u)
    assert not BANNED[ids].any()
    assert torch.isfinite(logprobs).all()
    if cumulative != "zeros":  # and the draw is no further off than the sum is
        exact = np.searchsorted(np.cumsum(P.double().numpy()), u.numpy(), side="right")
        assert np.mean(ids.numpy() != exact) < 0.02


def test_a_number_that_rounds_up_to_the_total_draws_the_last_id_with_probability():
    u = torch.tensor([1.0])  # beyond every number of the stream
    assert sampler(1)(logits(1), u)[0].tolist() == [8]
