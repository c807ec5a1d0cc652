"""What a trainer takes from a checkpoint, and what it takes from the config: a real FSDP2 trainer, alone over gloo."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from rlinf_vl.actor.load import load_trainer
from rlinf_vl.actor.optimizer import make_optimizer, make_scheduler
from rlinf_vl.config import load_config
from rlinf_vl.config.schema import OptimConfig

TOTAL = 10


def started(mesh, toy_folder, *overrides, step=None, folder=None):
    """A trainer with these settings, from the checkpoint of `step` in `folder` if one is named."""
    settings = (
        "algorithm.n_minibatches=2",
        "actor.fsdp_config.mixed_precision.param_dtype=fp32",
        *overrides,
    )
    trainer = load_trainer(load_config("toy-grpo-cpu", settings), str(toy_folder), mesh, TOTAL)
    if folder is not None:
        trainer.load(str(folder), step)
    return trainer


def train(trainer, steps, moved=None):
    """Steps of two mini-batches each, with gradients that depend on the weights only; of weights named `moved` if given."""
    for _ in range(2 * steps):
        for name, param in trainer.policy.named_parameters():
            if param.requires_grad and (moved is None or moved in name):
                param.grad = 0.1 * param.detach().cos()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad(set_to_none=True)
        trainer.scheduler.step()


def local(tensor):
    tensor = tensor.detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()


def weights(trainer):
    return {name: local(param) for name, param in trainer.policy.named_parameters()}


def moments(trainer):
    state = trainer.optimizer.state
    return {
        n: local(state[p]["exp_avg"]) for n, p in trainer.policy.named_parameters() if p in state
    }


def settings_of(optimizer):
    """What a step depends on, per group: the number of weights in it stands for the group."""
    names = ("lr", "initial_lr", "betas", "eps", "weight_decay")
    return [
        {name: group[name] for name in names} | {"n": len(group["params"])}
        for group in optimizer.param_groups
    ]


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


OPTIM = ("actor.optim.lr=0.01", "actor.optim.weight_decay=0.1", "actor.optim.lr_scheduler=cosine")


@pytest.fixture(scope="module")
def saved(mesh, toy_folder, tmp_path_factory):
    """The checkpoint of step 3, its weights and moments, and the weights two steps later."""
    folder = tmp_path_factory.mktemp("saved")
    trainer = started(mesh, toy_folder, *OPTIM)
    train(trainer, 3)
    trainer.stage()
    trainer.write(str(folder))
    then = weights(trainer), moments(trainer), settings_of(trainer.optimizer)
    train(trainer, 2)
    return folder, *then, weights(trainer), settings_of(trainer.optimizer)


def test_with_the_same_settings_a_rank_goes_on_as_if_it_had_never_stopped(mesh, toy_folder, saved):
    folder, at_save, moments_then, settings_then, later, settings_later = saved
    trainer = started(mesh, toy_folder, *OPTIM, step=3, folder=folder)
    assert equal(weights(trainer), at_save) and equal(moments(trainer), moments_then)
    assert settings_of(trainer.optimizer) == settings_then
    train(trainer, 2)
    assert equal(weights(trainer), later) and settings_of(trainer.optimizer) == settings_later


def test_settings_that_have_changed_count_and_the_schedule_goes_on_from_its_step(
    mesh, toy_folder, saved
):
    folder, at_save, moments_then, *_ = saved
    changed = {
        "lr": "0.002",
        "weight_decay": "0.03",
        "adam_beta1": "0.5",
        "adam_beta2": "0.75",
        "adam_eps": "1e-4",
        "lr_warmup_steps": "8",
        "min_lr_ratio": "0.5",
    }
    overrides = [f"actor.optim.{name}={value}" for name, value in changed.items()]
    trainer = started(mesh, toy_folder, *OPTIM, *overrides, step=3, folder=folder)
    assert equal(weights(trainer), at_save) and equal(moments(trainer), moments_then)
    optim = OptimConfig(
        lr=0.002,
        lr_warmup_steps=8,
        lr_scheduler="cosine",
        min_lr_ratio=0.5,
        adam_beta1=0.5,
        adam_beta2=0.75,
        adam_eps=1e-4,
        weight_decay=0.03,
    )
    optimizer = make_optimizer(trainer.policy, optim)
    schedule = make_scheduler(optimizer, optim, total=2 * TOTAL)
    for taken in range(6, 2 * TOTAL, 2):  # two optimizer steps a step, three steps done
        while schedule.last_epoch < taken:
            optimizer.step()
            schedule.step()
        assert settings_of(trainer.optimizer) == settings_of(optimizer)
        assert trainer.scheduler.get_last_lr() == schedule.get_last_lr()
        train(trainer, 1)
    assert {group["weight_decay"] for group in trainer.optimizer.param_groups} == {0.03, 0.0}, (
        "vectors are spared"
    )


def test_other_mini_batches_a_step_leave_the_schedule_at_its_step(mesh, toy_folder, saved):
    folder = saved[0]
    trainer = started(mesh, toy_folder, *OPTIM, "algorithm.n_minibatches=1", step=3, folder=folder)
    assert trainer.scheduler.last_epoch == 3


# --- a vision tower that was trained, and is now frozen -----------------------------------------------------------------


@pytest.fixture(scope="module")
def towers(mesh, toy_folder, tmp_path_factory):
    """Two checkpoints of step 1, one with a tower that was trained, one without; and the former's weights."""
    folders = [tmp_path_factory.mktemp(name) for name in ("trained", "base")]
    trainer = started(mesh, toy_folder, "actor.model.freeze_vision_tower=false")
    train(trainer, 1)
    trainer.stage()
    trainer.write(str(folders[0]))
    trained = sent(trainer)
    trainer = started(mesh, toy_folder, "actor.model.freeze_vision_tower=true")
    train(trainer, 1)
    trainer.stage()
    trainer.write(str(folders[1]))
    return *folders, trained


def sent(trainer):
    """The weights that a sync sends."""
    return dict(trainer.weights(torch.float32))


def tower_of(policy):
    return {n: local(p) for n, p in policy.named_parameters() if ".visual." in n}


@pytest.mark.slow
@pytest.mark.parametrize("kl_beta", [0.0, 0.1])
def test_engines_get_a_frozen_tower_that_was_trained_and_the_reference_keeps_the_base_model(
    mesh, toy_folder, towers, kl_beta
):
    folder, _, trained = towers
    overrides = (
        "actor.model.freeze_vision_tower=true",
        "rollout.model.precision=fp32",
        f"algorithm.kl_beta={kl_beta}",
    )
    trainer = started(mesh, toy_folder, *overrides)
    base = tower_of(trainer.policy)
    trainer.load(str(folder), 1)
    assert not equal(tower_of(trainer.policy), base)
    for _ in range(2):  # in every sync: a worker that is replaced is given the last one's weights
        assert equal(sent(trainer), trained)
    if kl_beta:
        assert equal(tower_of(trainer.reference), base)
        assert trainer.batches.cache is None, (
            "features of the policy's tower are not the reference's"
        )
    else:
        assert trainer.batches.cache is not None


@pytest.mark.slow
def test_a_frozen_tower_that_is_the_base_models_is_neither_sent_nor_encoded_twice(
    mesh, toy_folder, towers
):
    _, folder, _ = towers
    overrides = ("actor.model.freeze_vision_tower=true", "algorithm.kl_beta=0.1")
    trainer = started(mesh, toy_folder, *overrides, step=1, folder=folder)
    assert not any(".visual." in name for name in sent(trainer))
    assert trainer.batches.cache is not None


def test_a_tower_that_was_frozen_and_is_now_trained_starts_without_optimizer_state(
    mesh, toy_folder, towers
):
    _, folder, _ = towers
    trainer = started(
        mesh, toy_folder, "actor.model.freeze_vision_tower=false", step=1, folder=folder
    )
    state, parameters = trainer.optimizer.state, dict(trainer.policy.named_parameters())
    assert {".visual." in name for name, param in parameters.items() if param in state} == {False}
    train(trainer, 1)
    steps = {
        (".visual." in name, float(state[param]["step"])) for name, param in parameters.items()
    }
    # Two mini-batches a step, of which the others have had one more.
    assert steps == {
        (True, 2.0),
        (False, 4.0),
    }
