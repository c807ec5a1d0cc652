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
