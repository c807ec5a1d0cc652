"""Rollout workers that are killed or stopped in the middle of a rollout: every group comes back exactly once."""

import os
import signal
import threading

import psutil
import pytest
import ray

from rlinf_vl.config import load_config
from rlinf_vl.rollout.worker import Task

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def pool(toy_folder):
    from rlinf_vl.rollout.pool import RolloutPool
    from rlinf_vl.runtime.launch import place, ray_cluster

    overrides = [
        "cluster.component_placement={actor: 0, rollout: 0-1}",
        "runner.heartbeat_timeout=8",
        "algorithm.sampling_params.max_new_tokens=24",
        "rollout.max_running_requests=16",  # slow enough to be caught in the middle
    ]
    config = load_config("toy-grpo-cpu", overrides)
    with ray_cluster(config), place(config) as placement:
        pool = RolloutPool(config, str(toy_folder), placement.device, placement.rollout)
        pool.start()
        yield pool
        pool.stop()


def tasks(n: int) -> list[Task]:
    return [Task(f"g{i}", "train", i, tuple(range(8 * i, 8 * i + 8))) for i in range(n)]


def generate(pool, n: int):
    results = pool.generate(tasks(n))
    assert [summary.id for summary, _ in results] == [f"g{i}" for i in range(n)]
    groups = ray.get([reference for _, reference in results])
    pool.release([summary for summary, _ in results])
    return [[t.ids.tolist() for t in group.trajectories] for group in groups]


def test_a_pool_answers_every_task_in_order(pool):
    assert len(generate(pool, 30)) == 30
    assert pool.restarts == 0


def test_rows_that_share_an_image_go_to_one_worker(pool, monkeypatch):
    kept, too_long, bad = pool.filter_rows("train", range(12))
    assert (kept, too_long, bad) == (list(range(12)), 0, {})
    monkeypatch.setattr(pool, "_shared", {("train", row): row % 2 for row in (0, 1, 4, 5, 6, 7)})
    monkeypatch.setattr(pool, "max_running", 12 * 8)  # both workers get all of their share at once
    generate(pool, 12)
    rows = [{task.row for task in slot.tasks.values()} for slot in pool._slots]
    assert sorted(map(len, rows)) == [6, 6]
    assert any({0, 4, 6} <= part and {1, 5, 7} <= part for part in rows)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_is_killed_or_stopped_is_replaced(pool, number):
    undisturbed, before = generate(pool, 60), pool.restarts
    _, pid = ray.get(pool.workers[0].process.remote())
    seen = []

    def strike(summary):
        seen.append(summary.id)
        if len(seen) == 5:
            os.kill(pid, number)

    results = pool.generate(tasks(60), strike)
    assert pool.restarts == before + 1
    assert sorted(summary.id for summary, _ in results) == sorted(f"g{i}" for i in range(60))
    groups = ray.get([reference for _, reference in results])
    # the random stream of a sample is its own, so even what was sent again is the same
    assert [[t.ids.tolist() for t in group.trajectories] for group in groups] == undisturbed
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert all(not t.is_alive() for t in threading.enumerate() if t.name == "torch-engine")


def test_the_replacement_has_the_current_weights(pool, toy_folder):
    import torch

    from rlinf_vl.models.families import family_of
    from rlinf_vl.models.loading import load_model
    from rlinf_vl.transport import pack

    start = generate(pool, 4)
    model = load_model(toy_folder, family_of("qwen3_vl"), torch.float32)
    with torch.no_grad():
        shaken = [(name, p + 0.3 * torch.randn_like(p)) for name, p in model.named_parameters()]
    pool.load_weights([ray.put(bucket) for bucket in pack(shaken)], version=7)
    moved = generate(pool, 4)
    assert moved != start
    _, pid = ray.get(pool.workers[0].process.remote())
    os.kill(pid, signal.SIGKILL)
    assert generate(pool, 4) == moved
    results = pool.generate(tasks(2))
    assert {summary.min_version for summary, _ in results} == {7}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_dies_or_hangs_in_a_weight_sync_is_replaced(pool, toy_folder, number):
    import torch

    from rlinf_vl.models.families import family_of
    from rlinf_vl.models.loading import load_model
    from rlinf_vl.transport import pack

    model = load_model(toy_folder, family_of("qwen3_vl"), torch.float32)
    buckets = [ray.put(bucket) for bucket in pack((name, p.detach()) for name, p in model.named_parameters())]
    before, (_, pid) = pool.restarts, ray.get(pool.workers[1].process.remote())
    os.kill(pid, number)
    pool.load_weights(buckets, version=20 + number)
    assert pool.restarts == before + 1
    results = pool.generate(tasks(6))
    assert {summary.min_version for summary, _ in results} == {20 + number}


@pytest.fixture
def dying_starts():
    """`strike(n)`: the next n rollout workers that start die in their constructor."""
    left, ended = 0, threading.Event()

    def watch():
        nonlocal left
        while not ended.wait(0.02):
            for process in psutil.Process().children(recursive=True) if left else ():
                try:
                    if left and process.cmdline()[0].startswith("ray::RolloutRank.__init__"):
                        process.kill()
                        process.wait(10)
                        left -= 1
                except (psutil.Error, IndexError):
                    continue

    thread = threading.Thread(target=watch)
    thread.start()

    def strike(n):
        nonlocal left
        left = n

    yield strike
    ended.set()
    thread.join()


def kill_worker(pool, i: int) -> None:
    _, pid = ray.get(pool.workers[i].process.remote())
    os.kill(pid, signal.SIGKILL)


def test_a_replacement_that_dies_while_it_starts_is_replaced(pool, dying_starts):
    undisturbed, before = generate(pool, 4), pool.restarts
    dying_starts(2)
    kill_worker(pool, 0)
    assert generate(pool, 4) == undisturbed
    assert pool.restarts == before + 3


def test_a_worker_that_dies_while_the_run_starts_is_replaced(pool, dying_starts):
    undisturbed, before = generate(pool, 4), pool.restarts
    dying_starts(1)
    pool._start_again(pool._slots[0])
    assert pool.start()["train"] > 0
    assert pool.restarts == before + 2
    assert generate(pool, 4) == undisturbed


def test_replacements_that_keep_dying_end_the_run_in_words(pool, dying_starts, monkeypatch):
    from rlinf_vl.rollout import pool as pool_module

    undisturbed = generate(pool, 4)
    monkeypatch.setattr(pool_module, "MAX_REPLACEMENTS", 2)
    dying_starts(2)
    kill_worker(pool, 0)
    with pytest.raises(pool_module.WorkersLost, match="3 rollout workers failed since"):
        generate(pool, 4)
    monkeypatch.undo()
    assert generate(pool, 4) == undisturbed


def test_a_replacement_that_dies_taking_the_current_weights_is_replaced(pool, toy_folder):
    import torch

    from rlinf_vl.models.families import family_of
    from rlinf_vl.models.loading import load_model
    from rlinf_vl.transport import pack

    model = load_model(toy_folder, family_of("qwen3_vl"), torch.float32)
    buckets = [ray.put(bucket) for bucket in pack((name, p.detach()) for name, p in model.named_parameters())]
    asked = []

    def spare():
        asked.append(len(asked))
        if len(asked) == 1:
            kill_worker(pool, 1)
        return buckets

    before = pool.restarts
    pool.settle(pool.take_weights("object_store", buckets, 40, spare))
    kill_worker(pool, 1)
    results = pool.generate(tasks(6))
    assert (pool.restarts, asked) == (before + 2, [0, 1])
    assert {summary.min_version for summary, _ in results} == {40}


def test_a_worker_that_dies_while_rows_are_checked_is_replaced(pool):
    expected, before = pool.filter_rows("train", range(40)), pool.restarts
    kill_worker(pool, 0)
    assert pool.filter_rows("train", range(40)) == expected
    assert pool.restarts == before + 1


def test_workers_that_die_asleep_are_replaced_and_none_stays_asleep(pool):
    """On the CPU nothing is freed, but an engine that generates in its sleep is an error there too."""
    undisturbed, before = generate(pool, 4), pool.restarts
    assert pool.release_tags() == ("weights", "kv_cache")
    pool.restore_memory(("weights", "kv_cache"))  # they are awake: nothing happens
    kill_worker(pool, 0)
    pool.release_memory(("weights", "kv_cache"))
    assert pool.restarts == before + 1
    with pytest.raises(ray.exceptions.RayTaskError, match="asked to generate while its memory is released"):
        generate(pool, 4)
    kill_worker(pool, 1)
    pool.restore_memory(("weights",))
    kill_worker(pool, 0)
    pool.restore_memory(("kv_cache",))
    assert pool.restarts == before + 3
    assert generate(pool, 4) == undisturbed


def test_a_worker_that_died_since_does_not_spoil_the_end(pool):
    """The last test: the pool is of no use behind it."""
    kill_worker(pool, 0)
    pool.stop()
