"""SGLang in rollout workers: it follows the ranks by every strategy, and a worker whose engine dies or hangs is replaced."""

import logging
import os
import shutil
import signal
import time

import numpy as np
import psutil
import pytest
import ray
from pool_weights import load_weights
from summaries import values

from rlinf_vl.config import load_config
from rlinf_vl.rollout.submission import Task
from rlinf_vl.weights import STRATEGIES
from rlinf_vl.weights.strategy import strategy_named

# Engines start, one after the other.
pytestmark = [
    pytest.mark.integration,
]
#: Several buckets even for the toy.
BUCKET_BYTES = 2**18
GROUPS, SAMPLES = 24, 8
HEARTBEAT_TIMEOUT = 20.0


@pytest.fixture(scope="module")
def other(toy):
    """A model with other weights everywhere."""
    return toy.with_weights(
        toy.weights() | toy.perturbed("visual")[1] | toy.perturbed("language_model")[1]
    )


@pytest.fixture(scope="module")
def parts(toy, other, tmp_path_factory):
    """Two actors that have the other model's weights, and a pool of one worker, whose engine is over both and starts with the
    toy's."""
    from rlinf_vl.actor.group import ActorGroup
    from rlinf_vl.rollout.pool.pool import RolloutPool
    from rlinf_vl.runtime.launch import ray_cluster, reserve

    folder = tmp_path_factory.mktemp("other") / "checkpoint"
    shutil.copytree(toy.path, folder)
    other.save_pretrained(folder)
    overrides = [
        "cluster.component_placement={actor: 0-1, rollout: 0-1}",
        "rollout.tensor_parallel_size=2",
        "rollout.model.precision=fp32",
        "actor.model.freeze_vision_tower=false",
        f"runner.heartbeat_timeout={HEARTBEAT_TIMEOUT}",
        "rollout.max_running_requests=16",  # slow enough to be caught in the middle
    ]
    config = load_config("toy-grpo-cpu-sglang", overrides)
    with ray_cluster(config), reserve(config) as placement:
        pool = RolloutPool(config, toy.path, placement)
        actors = ActorGroup(config, str(folder), placement.device, placement.actor)
        pool.start()
        actors.start(total_steps=2)
        yield actors, pool
        pool.stop()
        actors.stop()


def assert_sampled_from(pool, toy, model, version):
    results = pool.submit(
        [Task(f"g{i}", "train", i, (2 * i, 2 * i + 1)) for i in range(4)]
    ).results()
    groups = ray.get([reference for _, reference in results])
    pool.release([summary for summary, _ in results])
    for group in groups:
        assert all(trajectory.error is None for trajectory in group.trajectories)
        for sample in toy.samples_of(group):
            assert (sample.versions == version).all()
            expected = toy.of_tokens(toy.request_of(group), sample, model=model)
            np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_engine_follows_the_ranks(parts, toy, other, strategy):
    from rlinf_vl.controller.weight_sync import WeightSync

    actors, pool = parts
    load_weights(pool, toy.weights().items(), version=0)
    assert_sampled_from(pool, toy, toy.model, 0)
    sync = WeightSync(
        strategy_named(strategy), actors, pool, device="cpu", bucket_bytes=BUCKET_BYTES
    )
    sync(version=3)
    assert_sampled_from(pool, toy, other, 3)
    sync(version=4)
    assert_sampled_from(pool, toy, other, 4)
    if strategy != "broadcast":
        return
    _, pid = ray.get(pool.workers[0].process.remote())
    os.kill(pid, signal.SIGKILL)
    assert_sampled_from(pool, toy, other, 4)  # a new engine, given the same weights
    load_weights(pool, toy.weights().items(), version=0)
    sync(version=5)  # in a new group
    assert_sampled_from(pool, toy, other, 5)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_is_killed_or_stopped_is_replaced(parts, toy, number, caplog):
    """In the middle of a rollout: every group comes back once, sampled by the same weights."""
    _, pool = parts
    other, changed = toy.perturbed("language_model")
    load_weights(pool, (toy.weights() | changed).items(), version=7)
    before = pool.restarts
    _, worker = ray.get(pool.workers[0].process.remote())
    engine = psutil.Process(worker).children(recursive=True)
    scheduler = max(engine, key=lambda p: p.memory_info().rss)  # its title is not always there
    arrived, found, struck = [], {}, 0.0

    tasks = [
        Task(f"g{i}", "train", i, tuple(range(SAMPLES * i, SAMPLES * (i + 1))))
        for i in range(GROUPS)
    ]
    with caplog.at_level(logging.WARNING, "rlinf_vl"):
        for summary, group in pool.submit(tasks):
            found[summary.id] = summary, group
            arrived.append(summary.id)
            if len(arrived) == 5:
                os.kill(scheduler.pid, number)
                struck = time.time()
    assert pool.restarts == before + 1
    (noticed,) = [r for r in caplog.records if "a rollout worker is replaced" in r.getMessage()]
    assert noticed.created - struck < HEARTBEAT_TIMEOUT + 30, (
        "the heartbeat's period, and a busy machine's moment"
    )
    _, alive = psutil.wait_procs(
        [psutil.Process(worker), *engine] if psutil.pid_exists(worker) else engine, 10
    )
    assert not alive

    results = [found[task.group_id] for task in tasks]
    assert len(set(arrived)) == GROUPS < len(arrived), (
        "what the dead engine had answered was asked again"
    )
    assert {(s.min_version, s.max_version) for s, _ in results} == {(7, 7)}
    assert all(error is None for s, _ in results for error in values(s, "error"))
    groups = ray.get([reference for _, reference in results])
    pool.release([summary for summary, _ in results])
    assert [group.id for group in groups] == [task.group_id for task in tasks]
    assert all(
        len(group.trajectories) == SAMPLES and all(t.n_response_tokens for t in group.trajectories)
        for group in groups
    )

    for group in groups[:4]:
        request = toy.request_of(group)
        for sample in toy.samples_of(group)[:2]:
            expected = toy.of_tokens(request, sample, model=other)
            np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)
