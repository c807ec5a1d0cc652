"""Updates of a trainer whose language model is frozen, or whose batches give nothing to learn."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import IMAGE_ID, group, tiny_policy, tiny_trainer

from rlinf_vl.config.presets import with_presets
from rlinf_vl.config.schema import ActorConfig, ActorModelConfig, AlgorithmConfig, LoraConfig
from rlinf_vl.controller.step_plan import plan_step
from rlinf_vl.models.families import FAMILIES
from rlinf_vl.types import GroupSummary

VISION_FAMILIES = [name for name, family in FAMILIES.items() if family.vision_tower]
TRAINED = {
    "tower": {
        "freeze_vision_tower": False,
        "freeze_projector": True,
        "freeze_language_model": True,
    },
    "projector": {"freeze_projector": False, "freeze_language_model": True},
    "adapters of the tower": {
        "is_lora": True,
        "lora": LoraConfig(rank=2, target_modules=["vision"]),
    },
}


def trainer_of(mesh, family: str = "qwen3_vl", checkpointing: bool = False, **model):
    actor = ActorConfig(model=ActorModelConfig(**model))
    actor.fsdp_config.mixed_precision.param_dtype = "fp32"
    actor.fsdp_config.gradient_checkpointing = "full" if checkpointing else "none"
    algorithm = with_presets(AlgorithmConfig(entropy_bonus=0.0, kl_beta=0.0))
    return tiny_trainer(
        mesh, lambda dtype: tiny_policy(dtype, model_type=family), actor=actor, algorithm=algorithm
    )


def update(trainer, shapes, rewards=(0.0, 1.0), scale=1.0) -> dict[str, float]:
    """Train on groups of one image list each, with advantages times `scale`; return the metrics."""
    groups = []
    for i, images in enumerate(shapes):
        made = group(np.random.default_rng(i), images, [9, 7], name=f"g{i}")
        paid = [replace(t, reward=r) for t, r in zip(made.trajectories, rewards, strict=True)]
        paid = [replace(t, turns=(replace(t.turns[0], reward=t.reward),)) for t in paid]
        groups.append(replace(made, trajectories=tuple(paid)))
    summaries = [GroupSummary.of(g, IMAGE_ID) for g in groups]
    plan = plan_step(summaries, trainer.algorithm, ranks=1, budget=60, micro_batch_size=2)
    minibatches = [ranks[0] for ranks in plan.minibatches]
    advantages = []
    for group_advantages in plan.advantages:
        advantages.append([[scale * a for a in turns] for turns in group_advantages])
    sums, _ = trainer.update(dict(enumerate(groups)), minibatches, advantages)
    return sums.compute()


def weights_of(trainer) -> dict[str, torch.Tensor]:
    named = trainer.policy.model.named_parameters()
    return {
        name: getattr(p, "full_tensor", lambda p=p: p)().detach().clone()
        for name, p in named
        if p.requires_grad
    }


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, value in before.items() if not torch.equal(value, after[name])}


@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
def test_rows_without_images_train_nothing_of_the_tower_and_end_no_run(
    mesh, trained, checkpointing
):
    trainer = trainer_of(mesh, checkpointing=checkpointing, **TRAINED[trained])
    before = weights_of(trainer)
    assert update(trainer, [[], []])["actor/grad_norm"] == 0
    assert not changed(before, weights_of(trainer))
    alone = update(trainer, [[(2, 3)]])["actor/grad_norm"]
    assert alone > 0 and changed(before, weights_of(trainer))


@pytest.mark.parametrize("last", [[], [(2, 3)]], ids=["text last", "image last"])
def test_the_gradient_is_that_of_the_rows_with_images_wherever_text_stands(mesh, last):
    """Gradients of several micro-batches are reduced in the last one's backward."""
    shapes = [[(2, 3)], last] if not last else [[], last]
    trainer = trainer_of(mesh, **TRAINED["projector"])
    before = weights_of(trainer)
    assert update(trainer, shapes)["actor/grad_norm"] > 0
    assert changed(before, weights_of(trainer))


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_a_mini_batch_with_nothing_to_learn_leaves_the_weights(mesh, family):
    """AdamW's momentum and weight decay would move them."""
    trainer = trainer_of(mesh, family)
    update(trainer, [[], []])
    before = weights_of(trainer)
    metrics = update(trainer, [[], []], rewards=(1.0, 1.0))
    assert metrics["actor/grad_norm"] == 0 and metrics["actor/skipped_steps"] == 0
    assert metrics["actor/idle_steps"] == 1
    assert not changed(before, weights_of(trainer))


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_with_the_projector_alone_nothing_runs_back_through_the_tower(mesh, family, checkpointing):
    trainer = trainer_of(mesh, family, checkpointing, **TRAINED["projector"])
    blocks = trainer.policy.model.get_submodule(trainer.policy.family.vision_blocks)
    calls = Counter[str]()
    for name, block in blocks.named_children():
        block.mlp.register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
        block.mlp.register_forward_hook(
            lambda *args, name=name: calls.update([f"graph {args[-1].requires_grad}"])
        )
    update(trainer, [[(2, 3)]])
    assert calls["graph True"] == 0
    assert {calls[name] for name, _ in blocks.named_children()} == {1}


def test_a_gradient_that_is_not_finite_leaves_the_weights_and_is_counted(mesh):
    trainer = trainer_of(mesh)
    before = weights_of(trainer)
    metrics = update(trainer, [[], []], scale=float("inf"))
    assert metrics["actor/skipped_steps"] == 1
    assert not changed(before, weights_of(trainer))
    assert update(trainer, [[], []])["actor/skipped_steps"] == 0
