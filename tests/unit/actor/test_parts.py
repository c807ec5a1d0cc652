"""Vision tower, projector and language model: which are trained, and at what learning rate."""

import pytest
import torch
import torch.distributed as dist
from tiny import tiny_policy, tiny_trainer

from rlinf_vl.actor.mesh import Mesh
from rlinf_vl.actor.optimizer import make_optimizer, parts_table
from rlinf_vl.config.schema import ActorConfig, ActorModelConfig, FsdpConfig, OptimConfig
from rlinf_vl.models.families import FAMILIES
from rlinf_vl.models.loading import PARTS, freeze, part_of


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_every_weight_belongs_to_one_part(family):
    policy = tiny_policy(model_type=family.model_type)
    found = {
        part: [n for n, _ in policy.model.named_parameters() if part_of(n, family) == part]
        for part in PARTS
    }
    assert all("merger" in name for name in found["projector"])
    assert (
        bool(found["projector"]) == bool(found["vision_tower"]) == (family.vision_tower is not None)
    )
    assert all(
        name.startswith("model.visual.") and "merger" not in name for name in found["vision_tower"]
    )
    assert not any("visual" in name for name in found["language_model"]) and found["language_model"]
    for part, names in found.items():
        freeze(policy.model, family, [other for other in PARTS if other != part])
        assert {n for n, p in policy.model.named_parameters() if p.requires_grad} == set(names)
        policy.model.requires_grad_(True)


@pytest.mark.parametrize(
    ("settings", "frozen"),
    [
        ({}, {"vision_tower", "projector"}),
        ({"freeze_vision_tower": False}, set()),
        ({"freeze_projector": False}, {"vision_tower"}),
        ({"freeze_vision_tower": False, "freeze_language_model": True}, {"language_model"}),
    ],
)
def test_what_the_settings_freeze(mesh, settings, frozen):
    actor = ActorConfig(model=ActorModelConfig(**settings))
    assert set(actor.model.frozen_parts) == frozen
    assert tiny_trainer(mesh, actor=actor).trains_vision == (
        not {"vision_tower", "projector"} <= frozen
    )


def test_each_part_has_its_own_learning_rate():
    policy = tiny_policy()
    optimizer = make_optimizer(policy, OptimConfig(lr=1e-3, weight_decay=0.1, vision_tower_lr=1e-2))
    rates = {
        id(p): (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for p in group["params"]
    }
    wanted = {"language_model": 1e-3, "projector": 1e-3, "vision_tower": 1e-2}
    for name, p in policy.model.named_parameters():
        assert rates[id(p)] == (wanted[part_of(name, policy.family)], 0.1 if p.ndim > 1 else 0.0), (
            name
        )


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield Mesh.make("cpu")
    dist.destroy_process_group()


def test_a_single_rank_gathers_its_weights_once(mesh):
    assert mesh.gathers_once(FsdpConfig(reshard_after_forward=True)), "it has nothing to free"


def test_the_table_says_what_is_trained(mesh):
    actor = ActorConfig(
        model=ActorModelConfig(freeze_projector=False),
        optim=OptimConfig(lr=1e-5),
    )
    actor.fsdp_config.mixed_precision.param_dtype = "fp32"
    trainer = tiny_trainer(mesh, actor=actor)
    assert trainer.batches.cache is None, "a trained projector's features can't be kept"
    header, *lines = parts_table(trainer.policy, mesh, actor).splitlines()
    assert header.split()[:3] == ["part", "parameters", "trained"]
    rows = {line.split()[0]: line.split() for line in lines}
    model = tiny_policy().model
    for part, rate in (
        ("language_model", "1e-05"),
        ("projector", "1e-05"),
        ("vision_tower", "frozen"),
    ):
        size = sum(
            p.numel()
            for n, p in model.named_parameters()
            if part_of(n, trainer.policy.family) == part
        )
        assert rows[part][1:] == [
            f"{size:,}",
            "0" if rate == "frozen" else f"{size:,}",
            "float32,",
            "fp32",
            "1",
            rate,
        ]
    assert {id(p) for group in trainer.optimizer.param_groups for p in group["params"]} == {
        id(p)
        for n, p in trainer.policy.model.named_parameters()
        if part_of(n, trainer.policy.family) != "vision_tower"
    }
    assert torch.equal(next(trainer.policy.model.parameters()), next(model.parameters()))
