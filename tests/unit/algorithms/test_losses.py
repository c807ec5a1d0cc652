"""The clipped policy loss: closed forms, a loop, analytic gradients, statistics, and micro-batches = the whole."""

import importlib
import math

import pytest
import torch

from rlinf_vl.algorithms import AGGREGATION_MODES, LossInputs, aggregate, policy_loss
from rlinf_vl.algorithms.losses import (
    LOSS_TYPES,
    MiniBatchTokens,
    TokenLoss,
    formula_of,
    weighted_loss,
)

NAN, INF = float("nan"), float("inf")


def naive(
    logprob: float, old: float, advantage: float, low: float, high: float, c: float | None
) -> float:
    ratio = math.exp(logprob - old)
    loss = max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))
    return min(loss, -advantage * c) if c is not None and advantage < 0 else loss


#: ratio, advantage, loss and d loss / d logprob for clip 0.2 / 0.3 and dual clip 3.
CASES = [
    (1.0, 2.0, -2.0, -2.0),  # on policy
    (1.0, -2.0, 2.0, 2.0),
    (1.5, 1.0, -1.3, 0.0),  # clipped above
    (1.5, -1.0, 1.5, 1.5),  # not clipped: moving back is wanted
    (0.5, 1.0, -0.5, -0.5),
    (0.5, -1.0, 0.8, 0.0),  # clipped below
    (1.25, 1.0, -1.25, -1.25),  # inside the wider upper bound
    (5.0, -1.0, 3.0, 0.0),  # dual clip
    (5.0, 1.0, -1.3, 0.0),  # dual clip leaves positive advantages alone
    (1.5, 0.0, 0.0, 0.0),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient"), CASES)
@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_values_and_gradients_by_hand(ratio, advantage, loss, gradient, weight):
    old = torch.tensor([-2.0], dtype=torch.float64)
    logprobs = (old + math.log(ratio)).requires_grad_()
    result, _ = policy_loss(
        logprobs,
        old,
        torch.tensor([advantage], dtype=torch.float64),
        torch.tensor([True]),
        clip_low=0.2,
        clip_high=0.3,
        clip_c=3.0,
        weights=torch.tensor([weight], dtype=torch.float64),
    )
    result.sum().backward()
    assert result.item() == pytest.approx(loss * weight)
    assert logprobs.grad.item() == pytest.approx(gradient * weight)


def test_the_ratio_of_a_sequence_by_hand():
    """Two sequences of two tokens and a masked one: log ratios (0.2, 0.4) and (-0.3, 0.1) have means 0.3 and -0.1."""
    old = torch.tensor([-1.0, -2.0, NAN, -3.0, -1.0], dtype=torch.float64)
    logprobs = (
        old + torch.tensor([0.2, 0.4, 0.0, -0.3, 0.1], dtype=torch.float64)
    ).requires_grad_()
    advantages = torch.tensor([1.0, 1.0, 9.0, -2.0, -2.0], dtype=torch.float64)
    mask = torch.tensor([True, True, False, True, True])
    loss, stats = policy_loss(
        logprobs, old, advantages, mask, clip_low=0.05, clip_high=0.4, loss_type="gspo",
        segment_ids=torch.tensor([4, 4, 4, 7, 7]),
    )  # fmt: skip
    up, down = math.exp(0.3), math.exp(-0.1)
    # The second is clipped below: max(2·0.905, 2·0.95)
    expected = [
        -up,
        -up,
        0.0,
        2 * 0.95,
        2 * 0.95,
    ]
    torch.testing.assert_close(loss.detach(), torch.tensor(expected, dtype=torch.float64))
    assert stats["clip_fraction"] == 0.5 and stats["ratio_max"].item() == pytest.approx(up)
    # Each token has half of the sequence's, twice.
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    torch.testing.assert_close(
        gradient, torch.tensor([-up, -up, 0.0, 0.0, 0.0], dtype=torch.float64)
    )
    assert stats["ratio_mean"].item() == pytest.approx((up + down) / 2)


def test_one_token_a_sequence_makes_the_levels_equal():
    generator = torch.Generator().manual_seed(5)
    logprobs, old, advantages = (
        torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    mask, segments = torch.ones(7, dtype=torch.bool), torch.arange(7)
    clips = {"clip_low": 0.1, "clip_high": 0.2, "clip_c": 3.0}
    token, _ = policy_loss(logprobs, old, advantages, mask, **clips)
    sequence, _ = policy_loss(
        logprobs, old, advantages, mask, **clips, loss_type="gspo", segment_ids=segments
    )
    torch.testing.assert_close(sequence, token)
    with pytest.raises(
        ValueError,
        match="loss_type must be one of actor, cispo, .*, gspo, gspo_token, .*sapo; got 'ppo'",
    ):
        policy_loss(logprobs, old, advantages, mask, **clips, loss_type="ppo")


@pytest.mark.parametrize("clip_c", [None, 2.0])
def test_matches_a_loop(clip_c):
    generator = torch.Generator().manual_seed(3)
    logprobs, old, advantages = (
        torch.randn(4, 9, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    mask = torch.rand(4, 9, generator=generator) < 0.7
    loss, stats = policy_loss(
        logprobs, old, advantages, mask, clip_low=0.2, clip_high=0.28, clip_c=clip_c
    )
    clipped = dual = total = kl = 0
    ratios = []
    for i in range(4):
        for j in range(9):
            if not mask[i, j]:
                assert loss[i, j] == 0
                continue
            new, before, advantage = (
                logprobs[i, j].item(),
                old[i, j].item(),
                advantages[i, j].item(),
            )
            assert loss[i, j].item() == pytest.approx(
                naive(new, before, advantage, 0.2, 0.28, clip_c)
            )
            ratio = math.exp(new - before)
            ratios.append(ratio)
            total += 1
            clipped += (advantage > 0 and ratio > 1.28) or (advantage < 0 and ratio < 0.8)
            dual += clip_c is not None and advantage < 0 and ratio > clip_c
            kl += ratio - 1 - math.log(ratio)
    assert clipped > 0 and (clip_c is None or dual > 0)
    expected = {
        "clip_fraction": clipped / total,
        "dual_clip_fraction": dual / total,
        "ratio_mean": sum(ratios) / total,
        "ratio_max": max(ratios),
        "approx_kl": kl / total,
    }
    assert {name: value.item() for name, value in stats.items()} == pytest.approx(expected)
    assert not any(value.requires_grad or value.ndim for value in stats.values())


def test_on_policy_gradient_is_that_of_reinforce():
    """ρ = 1 everywhere, even with bounds of no width: d loss / d logprob = -A."""
    logprobs = torch.randn(8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    advantages = torch.linspace(-2, 2, 8)
    mask = torch.ones(8, dtype=torch.bool)
    for low, high in ((0.2, 0.2), (0.0, 0.0)):
        logprobs.grad = None
        loss, stats = policy_loss(
            logprobs, logprobs.detach(), advantages, mask, clip_low=low, clip_high=high
        )
        loss.sum().backward()
        torch.testing.assert_close(logprobs.grad, -advantages)
        assert stats["clip_fraction"] == 0 and stats["ratio_mean"] == 1 and stats["approx_kl"] == 0


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_on_policy_every_loss_has_the_gradient_of_reinforce(loss_type):
    logprobs = torch.randn(
        8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ).requires_grad_()
    advantages, mask = (
        torch.linspace(-2, 2, 8, dtype=torch.float64),
        torch.ones(8, dtype=torch.bool),
    )
    loss, _ = policy_loss(
        logprobs, logprobs.detach(), advantages, mask, clip_low=0.2, clip_high=0.2, loss_type=loss_type,
        segment_ids=torch.arange(8),
    )  # fmt: skip
    loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, -advantages)


def test_cispo_by_hand():
    """Ratios 2, 1/2 and 1 and a masked token; the weight is clipped, the gradient is -A times it and never 0."""
    old = torch.tensor([-1.0, -2.0, -0.5, NAN], dtype=torch.float64)
    logprobs = (old + torch.tensor([math.log(2), -math.log(2), 0.0, 0.0])).requires_grad_()
    advantages = torch.tensor([3.0, -1.0, 2.0, 9.0], dtype=torch.float64)
    mask = torch.tensor([True, True, True, False])
    loss, stats = policy_loss(
        logprobs, old, advantages, mask, loss_type="cispo", clip_low=0.2, clip_high=0.5
    )
    weights = [1.5, 0.8, 1.0]
    expected = [
        -w * a * x for w, a, x in zip(weights, [3.0, -1.0, 2.0], logprobs.tolist(), strict=False)
    ]
    torch.testing.assert_close(loss.detach(), torch.tensor([*expected, 0.0], dtype=torch.float64))
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    torch.testing.assert_close(gradient, torch.tensor([-4.5, 0.8, -2.0, 0.0], dtype=torch.float64))
    assert (
        stats["clip_fraction"].item() == pytest.approx(2 / 3) and "dual_clip_fraction" not in stats
    )


def test_sapo_by_hand(monkeypatch):
    """f(ρ) = 4/τ · sigmoid(τ(ρ - 1)), so ∂L/∂Δ = -A · ρ · 4 · s(1 - s): it fades on either side of ρ = 1."""
    old = torch.full((4,), -1.0, dtype=torch.float64)
    delta = [0.0, 1.5, -0.7, 1.5]
    logprobs = (old + torch.tensor(delta, dtype=torch.float64)).requires_grad_()
    advantages, mask = (
        torch.tensor([1.0, 2.0, 2.0, -3.0], dtype=torch.float64),
        torch.ones(4, dtype=torch.bool),
    )
    monkeypatch.setattr("rlinf_vl.algorithms.losses.sapo.TAU_NEG", 2.0)
    loss, stats = policy_loss(logprobs, old, advantages, mask, loss_type="sapo")
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    for k, (d, advantage, tau) in enumerate(
        zip(delta, advantages.tolist(), (1.0, 1.0, 1.0, 2.0), strict=True)
    ):
        ratio = math.exp(d)
        s = 1 / (1 + math.exp(-tau * (ratio - 1)))
        assert loss[k].item() == pytest.approx(-advantage * 4 / tau * s)
        assert gradient[k].item() == pytest.approx(-advantage * ratio * 4 * s * (1 - s))
    assert "clip_fraction" not in stats
    assert abs(gradient[3].item()) < 0.05 * 3 * math.exp(1.5), "far from 1 little is left"


def test_a_function_of_the_inputs_may_be_the_loss():
    """It sees every tensor that there is, 0 outside the mask, and may tell what its clip has changed."""

    def of_one_version(inputs):
        assert inputs.segment_ids.tolist() == [0, 0, 1] and inputs.clip_high == 0.3
        fresh = inputs.versions == inputs.version
        weight = (inputs.start_logprobs - inputs.rollout_logprobs).exp() * inputs.columns["scale"]
        loss = -inputs.advantages * weight * inputs.logprobs * fresh
        return TokenLoss(loss, inputs.ratio(), clipped=~fresh)

    logprobs = torch.tensor([-1.0, -2.0, NAN], requires_grad=True)
    inputs = LossInputs(
        logprobs=logprobs, old_logprobs=torch.tensor([-1.0, -2.5, NAN]), advantages=torch.tensor([1.0, 2.0, NAN]),
        mask=torch.tensor([True, True, False]), segment_ids=torch.tensor([0, 0, 1]), n_segments=2,
        start_logprobs=torch.tensor([-1.0, -2.5, NAN]), rollout_logprobs=torch.tensor([-1.5, -2.5, INF]),
        versions=torch.tensor([7, 6, 7]), version=7, columns={"scale": torch.tensor([4.0, 5.0, 6.0])},
        weights=torch.tensor([0.5, 1.0, NAN]), clip_high=0.3,
    )  # fmt: skip
    loss, stats = weighted_loss(inputs, formula_of(of_one_version))
    loss.sum().backward()
    scale = 0.5 * 4 * math.exp(0.5)
    assert loss.tolist() == pytest.approx([scale, 0, 0])
    assert logprobs.grad.tolist() == pytest.approx([-scale, 0, 0])
    assert stats["clip_fraction"] == 0.5 and "dual_clip_fraction" not in stats
    loss, stats = policy_loss(
        logprobs, logprobs, logprobs, inputs.mask, loss_type=lambda inputs: -inputs.logprobs
    )
    assert loss.tolist() == [1, 2, 0] and "clip_fraction" not in stats


def test_a_function_of_six_arguments_is_accepted_for_a_release():
    def squared(logprobs, old_logprobs, advantages, segment_ids, clip_low, clip_high):
        assert segment_ids.tolist() == [0, 0, 1] and (clip_low, clip_high) == (0.1, 0.3)
        return -advantages * logprobs + (logprobs - old_logprobs) ** 2

    logprobs = torch.tensor([-1.0, -2.0, NAN], requires_grad=True)
    mask, segments = torch.tensor([True, True, False]), torch.tensor([0, 0, 1])
    loss, stats = policy_loss(
        logprobs, torch.tensor([-1.0, -2.5, 0.0]), torch.tensor([1.0, 2.0, 3.0]), mask, clip_low=0.1, clip_high=0.3,
        weights=torch.tensor([1.0, 0.5, 1.0]), loss_type=squared, segment_ids=segments,
    )  # fmt: skip
    assert loss.tolist() == [1.0, 0.5 * (4.0 + 0.25), 0.0] and "clip_fraction" not in stats
    for wrong, found in ((lambda *_: None, "NoneType"), (lambda *_: torch.zeros(()), r"\(\)")):
        with pytest.raises(
            ValueError, match=rf"the loss of each token, a tensor of shape \(3,\); returned {found}"
        ):
            policy_loss(logprobs, logprobs, logprobs, mask, loss_type=wrong)


def test_only_logprobs_get_a_gradient():
    inputs = [torch.full((2, 3), -1.0, requires_grad=True) for _ in range(4)]
    logprobs, old, advantages, weights = inputs
    mask = torch.ones(2, 3, dtype=torch.bool)
    loss, _ = policy_loss(
        logprobs, old, advantages, mask, clip_low=0.2, clip_high=0.2, weights=weights
    )
    loss.sum().backward()
    assert logprobs.grad is not None
    assert all(leaf.grad is None for leaf in (old, advantages, weights))


def test_garbage_outside_the_mask_changes_neither_value_nor_gradient():
    mask = torch.tensor([True, False, False, False, True])
    logprobs = torch.tensor([-1.0, NAN, INF, -1.0, -1.2], requires_grad=True)
    old = torch.tensor([-1.1, 0.0, -INF, NAN, -1.0])
    advantages = torch.tensor([1.0, NAN, INF, -INF, -1.0])
    weights = torch.tensor([1.0, INF, NAN, 1.0, 0.5])
    loss, stats = policy_loss(
        logprobs, old, advantages, mask, clip_low=0.2, clip_high=0.2, clip_c=3.0, weights=weights
    )
    loss.sum().backward()
    keep = mask.nonzero().squeeze(1)
    leaf = logprobs.detach()[keep].requires_grad_()
    alone, alone_stats = policy_loss(
        leaf,
        old[keep],
        advantages[keep],
        mask[keep],
        clip_low=0.2,
        clip_high=0.2,
        clip_c=3.0,
        weights=weights[keep],
    )
    alone.sum().backward()
    assert torch.equal(loss[~mask], torch.zeros(3)) and torch.equal(
        logprobs.grad[~mask], torch.zeros(3)
    )
    torch.testing.assert_close(loss[keep], alone)
    torch.testing.assert_close(logprobs.grad[keep], leaf.grad)
    torch.testing.assert_close(stats, alone_stats)


@pytest.mark.parametrize("shape", [(0,), (3,), (2, 3)])
def test_an_empty_mask_gives_zeros(shape):
    leaf = torch.full(shape, NAN).requires_grad_()
    mask = torch.zeros(shape, dtype=torch.bool)
    loss, stats = policy_loss(leaf, leaf, leaf, mask, clip_low=0.2, clip_high=0.2)
    loss.sum().backward()
    assert torch.equal(loss, torch.zeros(shape)) and torch.equal(leaf.grad, torch.zeros(shape))
    assert all(value == 0 for value in stats.values())


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_a_huge_ratio_stays_finite(advantage):
    logprobs = torch.tensor([0.0], requires_grad=True)
    loss, stats = policy_loss(
        logprobs,
        torch.tensor([-500.0]),
        torch.tensor([advantage]),
        torch.tensor([True]),
        clip_low=0.2,
        clip_high=0.2,
    )
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(logprobs.grad).all()
    assert all(torch.isfinite(value) for value in stats.values())


def test_advantages_broadcast_from_rows_and_half_precision_is_computed_in_float32():
    logprobs = torch.full((2, 3), -1.0, dtype=torch.bfloat16)
    mask = torch.ones(2, 3, dtype=torch.bool)
    loss, _ = policy_loss(
        logprobs, logprobs, torch.tensor([[1.0], [-2.0]]), mask, clip_low=0.2, clip_high=0.2
    )
    assert loss.dtype == torch.float32
    assert loss.tolist() == [[-1.0] * 3, [2.0] * 3]


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_loss_and_gradient_do_not_depend_on_packing(mode):
    """Padded whole = packed 1-D micro-batches under global denominators, to 1e-5 in float32."""
    generator = torch.Generator().manual_seed(5)
    old, noise = (torch.randn(6, 20, generator=generator) for _ in range(2))
    advantages = torch.randn(6, 1, generator=generator)
    lengths = torch.tensor([20, 3, 0, 11, 7, 1])
    mask = torch.arange(20) < lengths.unsqueeze(1)
    clips = {"clip_low": 0.2, "clip_high": 0.28, "clip_c": 3.0}

    whole = (old + 0.3 * noise).requires_grad_()
    expected = aggregate(policy_loss(whole, old, advantages, mask, **clips)[0], mask, None, mode)
    expected.backward()

    denominator = int(lengths.sum()) if mode == "token-mean" else int((lengths > 0).sum())
    parts = (old + 0.3 * noise).requires_grad_()
    total = 0.0
    for rows in ([5, 0], [3], [1, 4, 2]):
        inside = torch.cat([mask[r].nonzero().squeeze(1) + 20 * r for r in rows])

        def pick(tensor: torch.Tensor, inside: torch.Tensor = inside) -> torch.Tensor:
            return tensor.expand(6, 20).reshape(-1)[inside]

        per_token, _ = policy_loss(pick(parts), pick(old), pick(advantages), pick(mask), **clips)
        loss = aggregate(per_token, pick(mask), inside // 20, mode, denominator=denominator)
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(expected.item(), abs=1e-5)
    torch.testing.assert_close(parts.grad, whole.grad, atol=1e-6, rtol=1e-5)


def test_wrong_input_is_named():
    zeros, mask = torch.zeros(3), torch.ones(3, dtype=torch.bool)
    clips = {"clip_low": 0.2, "clip_high": 0.2}
    with pytest.raises(ValueError, match=r"old_logprobs has shape \(2,\), mask \(3,\)"):
        policy_loss(zeros, zeros[:2], zeros, mask, **clips)
    with pytest.raises(ValueError, match=r"advantages of shape \(2,\).*\(3,\)"):
        policy_loss(zeros, zeros, zeros[:2], mask, **clips)
    with pytest.raises(ValueError, match=r"weights of shape \(2, 3\).*\(3,\)"):
        policy_loss(zeros, zeros, zeros, mask, **clips, weights=torch.ones(2, 3))
    with pytest.raises(ValueError, match="clip_c"):
        policy_loss(zeros, zeros, zeros, mask, **clips, clip_c=0.5)
    with pytest.raises(ValueError, match="clip_low"):
        policy_loss(zeros, zeros, zeros, mask, clip_low=-0.1, clip_high=0.2)


def test_what_a_loss_logs_is_a_sum_and_a_count():
    def logs(inputs):
        inputs.log("large/ratio", inputs.ratio(), inputs.advantages > 1)
        inputs.log("logprob", inputs.logprobs)
        inputs.log("logprob", inputs.logprobs * 0)
        inputs.log("sequences", torch.tensor([3.0, NAN]), torch.tensor([True, False]))
        inputs.log("nothing", inputs.logprobs, inputs.mask & (inputs.advantages > 9))
        return -inputs.advantages * inputs.logprobs

    inputs = LossInputs(
        logprobs=torch.tensor([-1.0, -2.0, NAN], requires_grad=True),
        old_logprobs=torch.tensor([-1.0, -2.5, NAN]),
        advantages=torch.tensor([1.0, 2.0, NAN]),
        mask=torch.tensor([True, True, False]),
    )
    weighted_loss(inputs, formula_of(logs))
    logged = {name: (x.item(), n.item()) for name, (x, n) in inputs.measurements.items()}
    assert logged == {
        "large/ratio": (pytest.approx(math.exp(0.5)), 1),
        "logprob": (-3.0, 4),
        "sequences": (3.0, 1),
        "nothing": (0.0, 0),
    }
    assert not any(x.requires_grad for x, _ in inputs.measurements.values())
    for name, values, mask, message in (
        ("a b", inputs.logprobs, None, "the name 'a b' must consist of letters"),
        ("x", torch.tensor(1.0), None, "'x' is a single number; give a value for each token"),
        ("x", torch.zeros(2), None, r"'x' has values of shape \(2,\) and a mask of torch.bool of"),
        ("x", inputs.logprobs, torch.ones(3), r"a mask of torch.float32 of shape \(3,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            inputs.log(name, values, mask)


@pytest.mark.parametrize("cuts", [(), (7,), (1, 30, 31)])
@pytest.mark.parametrize("name", ["kl_cov", "clip_cov"])
def test_a_choice_among_all_tokens_of_a_mini_batch_does_not_depend_on_packing(
    monkeypatch, name, cuts
):
    generator = torch.Generator().manual_seed(4)
    advantages, start = (torch.randn(60, generator=generator) for _ in range(2))
    start = -start.abs()
    logprobs, rollout = start + 0.01, start - 0.02
    file = importlib.import_module(f"rlinf_vl.algorithms.losses.{name}")
    monkeypatch.setattr(file, "SHARE", 0.1)
    if name == "clip_cov":
        monkeypatch.setattr(file, "LOW", -1.0)
    order = torch.randperm(60, generator=generator)
    whole = MiniBatchTokens(advantages[order], start[order], rollout[order])
    chosen = []
    for first, end in zip((0, *cuts), (*cuts, 60), strict=True):
        part = slice(first, end)
        inputs = LossInputs(
            logprobs=logprobs[part], old_logprobs=start[part], advantages=advantages[part],
            mask=torch.ones(end - first, dtype=torch.bool), start_logprobs=start[part],
            rollout_logprobs=rollout[part], clip_low=0.2, clip_high=0.2, minibatch=whole,
        )  # fmt: skip
        plain = -inputs.advantages * inputs.ratio()
        chosen += (file.loss(inputs).loss != plain).tolist()
    assert sum(chosen) == 6
    covariance = (advantages - advantages.mean()) * (start - start.mean())
    if name == "kl_cov":
        assert torch.tensor(chosen)[covariance.topk(6).indices].all()
    else:
        among = (covariance > -1) & (covariance < 5)
        assert among.sum() > 12 and among[torch.tensor(chosen)].all()
