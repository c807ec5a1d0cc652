"""What a rank takes from a checkpoint, and what it takes from the config: a real FSDP2 rank, alone over gloo."""

import socket
from contextlib import contextmanager

import pytest
import torch

from rlinf_vl.actor.fsdp import make_optimizer, make_scheduler, whole_weights
from rlinf_vl.actor.worker import ActorRank
from rlinf_vl.config import load_config

TOTAL = 10


@contextmanager
def started(toy_folder, *overrides, step=None, folder=None):
    """A rank with these settings, from the checkpoint of `step` in `folder` if one is named."""
    settings = ("algorithm.n_minibatches=2", "actor.fsdp_config.mixed_precision.param_dtype=fp32", *overrides)
    rank = ActorRank(load_config("toy-grpo-cpu", settings), str(toy_folder), "cpu", 0, 1)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    rank.start("127.0.0.1", port, TOTAL)
    try:
        if folder is not None:
            rank.load(str(folder), step)
        yield rank
    finally:
        rank.stop()


def train(rank, steps, moved=None):
    """Steps of two mini-batches each, with gradients that depend on the weights only; of weights named `moved` if given."""
    for _ in range(2 * steps):
        for name, param in rank.policy.named_parameters():
            if param.requires_grad and (moved is None or moved in name):
                param.grad = 0.1 * param.detach().cos()
        rank.optimizer.step()
        rank.optimizer.zero_grad(set_to_none=True)
        rank.scheduler.step()


def local(tensor):
    return tensor.detach().to_local().clone()


def weights(rank):
    return {name: local(param) for name, param in rank.policy.named_parameters()}


def moments(rank):
    state = rank.optimizer.state
    return {n: local(state[p]["exp_avg"]) for n, p in rank.policy.named_parameters() if p in state}


def settings_of(optimizer):
    """What a step depends on, per group: the number of weights in it stands for the group."""
    names = ("lr", "initial_lr", "betas", "eps", "weight_decay")
    return [{name: group[name] for name in names} | {"n": len(group["params"])} for group in optimizer.param_groups]


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


OPTIM = ("actor.optim.lr=0.01", "actor.optim.weight_decay=0.1", "actor.optim.lr_scheduler=cosine")


@pytest.fixture(scope="module")
def saved(toy_folder, tmp_path_factory):
    """The checkpoint of step 3, its weights and moments, and the weights two steps later."""
    folder = tmp_path_factory.mktemp("saved")
    with started(toy_folder, *OPTIM) as rank:
        train(rank, 3)
        rank.save(str(folder))
        then = weights(rank), moments(rank), settings_of(rank.optimizer)
        train(rank, 2)
        return folder, *then, weights(rank), settings_of(rank.optimizer)


def test_with_the_same_settings_a_rank_goes_on_as_if_it_had_never_stopped(toy_folder, saved):
    folder, at_save, moments_then, settings_then, later, settings_later = saved
    with started(toy_folder, *OPTIM, step=3, folder=folder) as rank:
        assert equal(weights(rank), at_save) and equal(moments(rank), moments_then)
        assert settings_of(rank.optimizer) == settings_then
        train(rank, 2)
        assert equal(weights(rank), later) and settings_of(rank.optimizer) == settings_later


def test_settings_that_have_changed_count_and_the_schedule_goes_on_from_its_step(toy_folder, saved):
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
    with started(toy_folder, *OPTIM, *overrides, step=3, folder=folder) as rank:
        assert equal(weights(rank), at_save) and equal(moments(rank), moments_then)
        optimizer = make_optimizer(rank.policy, lr=0.002, betas=(0.5, 0.75), eps=1e-4, weight_decay=0.03)
        schedule = make_scheduler(optimizer, "cosine", warmup=8, total=2 * TOTAL, min_ratio=0.5)
        for taken in range(6, 2 * TOTAL, 2):  # two optimizer steps a step, three steps done
            while schedule.last_epoch < taken:
                optimizer.step()
                schedule.step()
            assert settings_of(rank.optimizer) == settings_of(optimizer)
            assert rank.scheduler.get_last_lr() == schedule.get_last_lr()
            train(rank, 1)
        assert {group["weight_decay"] for group in rank.optimizer.param_groups} == {0.03, 0.0}, "vectors are spared"


def test_other_mini_batches_a_step_leave_the_schedule_at_its_step(toy_folder, saved):
    folder = saved[0]
    with started(toy_folder, *OPTIM, "algorithm.n_minibatches=1", step=3, folder=folder) as rank:
        assert rank.scheduler.last_epoch == 3


# --- a vision tower that was trained, and is now frozen -----------------------------------------------------------------


@pytest.fixture(scope="module")
def towers(toy_folder, tmp_path_factory):
    """Two checkpoints of step 1, one with a tower that was trained, one without; and the former's weights."""
    folders = [tmp_path_factory.mktemp(name) for name in ("trained", "base")]
    with started(toy_folder, "actor.model.freeze_vision_tower=false") as rank:
        train(rank, 1)
        rank.save(str(folders[0]))
        trained = dict(whole_weights(rank.policy, torch.float32))
    with started(toy_folder, "actor.model.freeze_vision_tower=true") as rank:
        train(rank, 1)
        rank.save(str(folders[1]))
    return *folders, trained


def offered(rank, monkeypatch):
    """The weights that a sync would send."""
    import ray

    from rlinf_vl.transport import unpack

    monkeypatch.setattr(ray, "put", lambda bucket: bucket)
    rank.set_weight_sync("object_store", 2**28)
    return {name: value for bucket in rank.offer_weights(check=True) for name, value in unpack(bucket).items()}


def tower_of(policy):
    return {n: local(p) for n, p in policy.named_parameters() if ".visual." in n}


@pytest.mark.parametrize("kl_beta", [0.0, 0.1])
def test_engines_get_a_frozen_tower_that_was_trained_and_the_reference_keeps_the_base_model(
    toy_folder, towers, monkeypatch, kl_beta
):
    folder, _, trained = towers
    overrides = ("actor.model.freeze_vision_tower=true", "rollout.model.precision=fp32", f"algorithm.kl_beta={kl_beta}")
    with started(toy_folder, *overrides) as rank:
        base = tower_of(rank.policy)
        rank.load(str(folder), 1)
        assert not equal(tower_of(rank.policy), base)
        for _ in range(2):  # in every sync: a worker that is replaced is given the last one's weights
            assert equal(offered(rank, monkeypatch), trained)
        if kl_beta:
            assert equal(tower_of(rank.reference), base)
            assert rank.make.cache is None, "features of the policy's tower are not the reference's"
        else:
            assert rank.make.cache is not None


def test_a_frozen_tower_that_is_the_base_models_is_neither_sent_nor_encoded_twice(toy_folder, towers, monkeypatch):
    _, folder, _ = towers
    overrides = ("actor.model.freeze_vision_tower=true", "algorithm.kl_beta=0.1")
    with started(toy_folder, *overrides, step=1, folder=folder) as rank:
        assert not any(".visual." in name for name in offered(rank, monkeypatch))
        assert rank.make.cache is not None


def test_a_tower_that_was_frozen_and_is_now_trained_starts_without_optimizer_state(toy_folder, towers):
    _, folder, _ = towers
    with started(toy_folder, "actor.model.freeze_vision_tower=false", step=1, folder=folder) as rank:
        state, parameters = rank.optimizer.state, dict(rank.policy.named_parameters())
        assert {".visual." in name for name, param in parameters.items() if param in state} == {False}
        train(rank, 1)
        steps = {(".visual." in name, float(state[param]["step"])) for name, param in parameters.items()}
        assert steps == {(True, 2.0), (False, 4.0)}  # two mini-batches a step, of which the others have had one more
