"""A rollout worker whose SGLang scheduler is killed or stopped in the middle of a rollout: every group comes back once."""

import logging
import os
import signal
import time

import numpy as np
import psutil
import pytest
import ray

from rlinf_vl.config import load_config
from rlinf_vl.rollout.submission import Task

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]  # engines start, one after the other
GROUPS, SAMPLES = 24, 8
HEARTBEAT_TIMEOUT = 20.0


@pytest.fixture(scope="module")
def pool(toy):
    """One SGLang worker with weights of its own, as version 7."""
    from rlinf_vl.rollout.pool import RolloutPool
    from rlinf_vl.runtime.launch import ray_cluster, reserve
    from rlinf_vl.transport import pack

    overrides = [
        "cluster.component_placement={actor: 0, rollout: 0}",
        f"runner.heartbeat_timeout={HEARTBEAT_TIMEOUT}",
        "rollout.max_running_requests=16",  # slow enough to be caught in the middle
    ]
    config = load_config("toy-grpo-cpu-sglang", overrides)
    with ray_cluster(config), reserve(config) as placement:
        pool = RolloutPool(config, toy.path, placement.device, placement.rollout)
        pool.start()
        weights, changed = toy.weights(), toy.perturbed("language_model")[1]
        pool.load_weights([ray.put(bucket) for bucket in pack((weights | changed).items())], version=7)
        yield pool
        pool.stop()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_is_killed_or_stopped_is_replaced(pool, toy, number, caplog):
    before = pool.restarts
    _, worker = ray.get(pool.workers[0].process.remote())
    engine = psutil.Process(worker).children(recursive=True)
    (scheduler,) = [p for p in engine if "scheduler" in " ".join(p.cmdline())]
    arrived, found, struck = [], {}, 0.0

    tasks = [Task(f"g{i}", "train", i, tuple(range(SAMPLES * i, SAMPLES * (i + 1)))) for i in range(GROUPS)]
    with caplog.at_level(logging.WARNING, "rlinf_vl"):
        for summary, group in pool.submit(tasks):
            found[summary.id] = summary, group
            arrived.append(summary.id)
            if len(arrived) == 5:
                os.kill(scheduler.pid, number)
                struck = time.time()
    assert pool.restarts == before + 1
    (noticed,) = [r for r in caplog.records if "a rollout worker is replaced" in r.getMessage()]
    assert noticed.created - struck < HEARTBEAT_TIMEOUT + 30, "the heartbeat's period, and a busy machine's moment"
    _, alive = psutil.wait_procs([psutil.Process(worker), *engine] if psutil.pid_exists(worker) else engine, 10)
    assert not alive

    results = [found[task.group_id] for task in tasks]
    assert len(set(arrived)) == GROUPS < len(arrived), "what the dead engine had answered was asked again"
    assert {(s.min_version, s.max_version) for s, _ in results} == {(7, 7)}
    assert all(error is None for s, _ in results for error in s.errors)
    groups = ray.get([reference for _, reference in results])
    pool.release([summary for summary, _ in results])
    assert [group.id for group in groups] == [task.group_id for task in tasks]
    assert all(
        len(group.trajectories) == SAMPLES and all(t.n_response_tokens for t in group.trajectories) for group in groups
    )

    other, _ = toy.perturbed("language_model")
    for group in groups[:4]:
        request = toy.request_of(group)
        for trajectory in group.trajectories[:2]:
            expected = toy.of_tokens(request, trajectory, model=other)
            np.testing.assert_allclose(trajectory.logprobs, expected, atol=1e-4)
