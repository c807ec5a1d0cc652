"""Old policies over several mini-batches: what is compared with the engine are the weights before the step's first one."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import IMAGE_ID, group, tiny_model, tiny_trainer, transformers_logprobs

from rlinf_vl.config.presets import with_presets
from rlinf_vl.config.schema import ActorConfig, AlgorithmConfig, OptimConfig
from rlinf_vl.config.schema.algorithm import RejectionConfig
from rlinf_vl.controller.step_plan import plan_step
from rlinf_vl.types import GroupSummary

MINIBATCHES = 3
REJECTION = RejectionConfig(level="token", low=0.3, high=1.5)


@pytest.fixture(scope="module")
def groups():
    """Six groups of two, sampled by the engine with logprobs a little off the weights' own."""
    model, random = tiny_model(0), np.random.default_rng(7)
    made = []
    for number in range(6):
        drawn = group(np.random.default_rng(number), [], [6 + number, 9], name=f"g{number}")
        trajectories = []
        for i, t in enumerate(drawn.trajectories):
            (sequence,) = t.sequences
            with torch.no_grad():
                exact = transformers_logprobs(model, drawn, i).numpy()
            logprobs = np.zeros(len(sequence.ids), np.float32)
            logprobs[sequence.loss_mask] = exact + random.normal(0, 0.5, len(exact))
            turns = (replace(t.turns[0], reward=float(i)),)
            sequences = (replace(sequence, logprobs=logprobs),)
            trajectories.append(replace(t, sequences=sequences, turns=turns, reward=float(i)))
        made.append(replace(drawn, trajectories=tuple(trajectories)))
    return made


def step(mesh, groups, forwards=None, **algorithm):
    """Train a step whose optimizer steps change the weights much.

    Returns (metrics, groups by mini-batch, recorded logprobs). For each forward of the policy,
    `forwards` gets whether it was one with gradients.
    """
    settings = with_presets(
        AlgorithmConfig(
            n_minibatches=MINIBATCHES, kl_beta=0.0, importance_sampling_fix=False, **algorithm
        )
    )
    actor = ActorConfig(optim=OptimConfig(lr=0.05, clip_grad=1e9))
    actor.fsdp_config.mixed_precision.param_dtype = "fp32"
    trainer = tiny_trainer(mesh, actor=actor, algorithm=settings)
    if forwards is not None:
        trainer.policy.register_forward_pre_hook(
            lambda *_: forwards.append(torch.is_grad_enabled())
        )
    summaries = [GroupSummary.of(g, IMAGE_ID) for g in groups]
    plan = plan_step(summaries, settings, ranks=1, budget=60, micro_batch_size=2)
    minibatches = [ranks[0] for ranks in plan.minibatches]
    numbers = dict(enumerate(groups))
    sums, recorded = trainer.update(numbers, minibatches, plan.advantages, recorded=numbers)
    members = [
        {item.group for items in mini.micro_batches for item in items} for mini in minibatches
    ]
    return sums.compute(), members, recorded


def plain_differences(groups, numbers) -> np.ndarray:
    """Start's logprob minus the sampler's, of each response token, by transformers' own forward of the first weights."""
    model, found = tiny_model(0), []
    for g in (groups[number] for number in sorted(numbers)):
        for i, t in enumerate(g.trajectories):
            with torch.no_grad():
                start = transformers_logprobs(model, g, i).double().numpy()
            (sequence,) = t.sequences
            found.append(start - sequence.logprobs[sequence.loss_mask])
    return np.concatenate(found)


@pytest.mark.parametrize("old_policy", ["start", "sampler", "interpolated"])
def test_rejection_and_mismatch_are_of_the_weights_before_the_step(mesh, groups, old_policy):
    metrics, members, recorded = step(mesh, groups, old_policy=old_policy, rejection=REJECTION)
    assert len(members) == MINIBATCHES and metrics["actor/grad_norm"] > 0
    delta = plain_differences(groups, range(len(groups)))
    ratios = np.exp(delta)
    assert metrics["actor/rejection_ratio_min"] == pytest.approx(ratios.min(), rel=1e-4)
    assert metrics["actor/rejection_ratio_max"] == pytest.approx(ratios.max(), rel=1e-4)
    rejected = (ratios < REJECTION.low) | (ratios > REJECTION.high)
    assert metrics["actor/rejected_tokens"] == pytest.approx(rejected.mean())
    assert metrics["actor/rollout_train_kl"] == pytest.approx(-delta.mean(), abs=1e-4)
    assert metrics["actor/rollout_train_k3"] == pytest.approx(
        (np.exp(delta) - 1 - delta).mean(), rel=1e-4
    )
    assert metrics["actor/rollout_train_abs_diff_max"] == pytest.approx(abs(delta).max(), rel=1e-4)
    with torch.no_grad():
        for number, g in enumerate(groups):
            for i, logprobs in recorded[number].items():
                expected = transformers_logprobs(tiny_model(0), g, i).numpy()
                np.testing.assert_allclose(logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("old_policy", ["sampler", "interpolated"])
def test_without_rejection_the_first_mini_batch_alone_is_compared_and_no_pass_is_made(
    mesh, groups, old_policy
):
    metrics, members, _ = step(mesh, groups, old_policy=old_policy)
    delta = plain_differences(groups, members[0])
    assert metrics["actor/rollout_train_kl"] == pytest.approx(-delta.mean(), abs=1e-4)
    assert metrics["actor/rollout_train_abs_diff_mean"] == pytest.approx(
        abs(delta).mean(), rel=1e-4
    )
    assert metrics["actor/rollout_train_abs_diff_max"] == pytest.approx(abs(delta).max(), rel=1e-4)


@pytest.mark.parametrize(("recompute", "steps_with_a_forward_before"), [("auto", 2), ("true", 3)])
def test_the_first_optimizer_steps_own_forward_gives_its_old_logprobs(
    mesh, groups, recompute, steps_with_a_forward_before
):
    forwards = []
    step(mesh, groups, forwards, recompute_logprobs=recompute)
    # Each mini-batch has two groups of two, in micro-batches of two trajectories.
    assert forwards.count(True) == 2 * MINIBATCHES
    assert forwards.count(False) == 2 * steps_with_a_forward_before


def test_what_is_measured_without_training_is_plain(mesh, groups):
    """Losses, scores, the KL of a reward and copies of weights, against transformers' own forward."""
    groups = groups[:2]
    settings = with_presets(
        AlgorithmConfig(kl_beta=0.1, kl_placement="reward", kl_penalty_type="k1", n_minibatches=2)
    )
    actor = ActorConfig()
    actor.fsdp_config.mixed_precision.param_dtype = "fp32"
    trainer, moved = tiny_trainer(mesh, actor=actor, algorithm=settings), tiny_model(0)
    with torch.no_grad():
        for p in (*trainer.policy.parameters(), *moved.parameters()):
            p.mul_(1.1)
        logprobs = {
            (n, i): tuple(
                transformers_logprobs(model, g, i).double().numpy()
                for model in (moved, tiny_model(0))
            )
            for n, g in enumerate(groups)
            for i in range(len(g.trajectories))
        }
    summaries = [GroupSummary.of(g, IMAGE_ID) for g in groups]
    plan = plan_step(summaries, settings, ranks=1, budget=60, micro_batch_size=1)
    numbers, minibatches = dict(enumerate(groups)), [ranks[0] for ranks in plan.minibatches]
    assert len(minibatches) == 2
    kl_by_trajectory, reference_pass = trainer.reference_kl(numbers, minibatches)
    assert kl_by_trajectory.keys() == logprobs.keys()
    for key, (policy, reference) in logprobs.items():
        kl = policy - reference
        to_end = np.cumsum(kl[::-1])[::-1]
        ((total, total_to_end, squares),) = kl_by_trajectory[key]
        expected = kl.sum(), to_end.sum(), (to_end**2).sum()
        assert (total, total_to_end, squares) == pytest.approx(expected, rel=1e-3, abs=1e-4)
    for mini, old, to_end in zip(
        minibatches, reference_pass.old_logprobs, reference_pass.kl_to_end, strict=True
    ):
        items = [item for (item,) in mini.micro_batches]
        wanted = [logprobs[item.group, item.index] for item in items]
        for (policy, reference), found, kl in zip(wanted, old, to_end, strict=True):
            np.testing.assert_allclose(found.numpy(), policy, atol=1e-4)
            suffix_sums = np.cumsum((policy - reference)[::-1])[::-1]
            np.testing.assert_allclose(kl, suffix_sums, atol=1e-3)
        total, n = trainer.total_loss(numbers, mini)
        assert n == sum(len(policy) for policy, _ in wanted)
        assert total == pytest.approx(-sum(policy.sum() for policy, _ in wanted), rel=1e-4)
        scores = trainer.score(numbers, mini)
        for item, (policy, _), (number, n, gap, blank_gap) in zip(
            items, wanted, scores, strict=True
        ):
            (sequence,) = groups[item.group].trajectories[item.index].sequences
            expected = np.abs(sequence.logprobs[sequence.loss_mask] - policy).sum()
            assert (number, n) == (item.group, len(policy))
            assert gap == blank_gap == pytest.approx(expected, rel=1e-3), "it shows no image"
    assert trainer.policy.training
    copies = trainer.replay_weights()
    assert copies.keys() == dict(moved.named_parameters()).keys()
    assert all((copies[name] == p.detach().numpy()).all() for name, p in moved.named_parameters())
    n_bytes = sum(p.nbytes for p in moved.parameters())
    assert trainer.replay_weights(n_bytes) and trainer.replay_weights(n_bytes - 1) == {}
