"""Every way to sync weights, from an FSDP rank to a real SGLang engine in its worker."""

import os
import shutil
import signal

import numpy as np
import pytest
import ray

from rlinf_vl.config import load_config
from rlinf_vl.rollout.submission import Task
from rlinf_vl.transport import pack

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]  # engines start, one after the other
#: Several buckets even for the toy.
BUCKET_BYTES = 2**18


@pytest.fixture(scope="module")
def other(toy):
    """A model with other weights everywhere."""
    return toy.with_weights(toy.weights() | toy.perturbed("visual")[1] | toy.perturbed("language_model")[1])


@pytest.fixture(scope="module")
def parts(toy, other, tmp_path_factory):
    """Actors that hold the other model, and a pool of one worker that starts with the toy's."""
    from rlinf_vl.actor.group import ActorGroup
    from rlinf_vl.rollout.pool import RolloutPool
    from rlinf_vl.runtime.launch import ray_cluster, reserve

    folder = tmp_path_factory.mktemp("other") / "checkpoint"
    shutil.copytree(toy.path, folder)
    other.save_pretrained(folder)
    overrides = [
        "cluster.component_placement={actor: 0, rollout: 0}",
        "rollout.model.precision=fp32",
        "actor.model.freeze_vision_tower=false",
    ]
    config = load_config("toy-grpo-cpu-sglang", overrides)
    with ray_cluster(config), reserve(config) as placement:
        pool = RolloutPool(config, toy.path, placement.device, placement.rollout)
        actors = ActorGroup(config, str(folder), placement.device, placement.actor)
        pool.start()
        actors.start(total_steps=2)
        yield actors, pool
        pool.stop()
        actors.stop()


def assert_sampled_from(pool, toy, model, version):
    results = pool.submit([Task(f"g{i}", "train", i, (2 * i, 2 * i + 1)) for i in range(4)]).results()
    groups = ray.get([reference for _, reference in results])
    pool.release([summary for summary, _ in results])
    for group in groups:
        for trajectory in group.trajectories:
            assert trajectory.error is None
            assert (trajectory.versions == version).all()
            expected = toy.of_tokens(toy.request_of(group), trajectory, model=model)
            np.testing.assert_allclose(trajectory.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("way", ["object_store", "shared_memory", "broadcast"])
def test_engine_follows_the_ranks(parts, toy, other, way):
    from rlinf_vl.controller.weight_sync import WeightSync

    actors, pool = parts
    pool.load_weights([ray.put(bucket) for bucket in pack(toy.weights().items())], version=0)
    assert_sampled_from(pool, toy, toy.model, 0)
    sync = WeightSync(way, actors, pool, device="cpu", engine_ranks=1, bucket_bytes=BUCKET_BYTES)
    sync(version=3)
    assert_sampled_from(pool, toy, other, 3)
    sync(version=4)
    assert_sampled_from(pool, toy, other, 4)
    if way != "broadcast":
        return
    _, pid = ray.get(pool.workers[0].process.remote())
    os.kill(pid, signal.SIGKILL)
    assert_sampled_from(pool, toy, other, 4)  # a new engine, given the same weights
    pool.load_weights([ray.put(bucket) for bucket in pack(toy.weights().items())], version=0)
    sync(version=5)  # in a new group
    assert_sampled_from(pool, toy, other, 5)
