"""Rollout workers that are killed or stopped: every group comes back exactly once. What the supervisor does in which case is
shown without processes in tests/unit/rollout/test_supervisor.py; here are the strikes that only real ones can take."""

import os
import signal
import threading
import time

import psutil
import pytest
import ray
import torch

from rlinf_vl.config import load_config
from rlinf_vl.models.families import family_of
from rlinf_vl.models.loading import load_model
from rlinf_vl.rollout.submission import Task
from rlinf_vl.weights.buckets import pack
from rlinf_vl.weights.object_store import ObjectStoreStrategy
from rlinf_vl.weights.sender import Offer, Snapshot

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def pool(toy_folder):
    from rlinf_vl.rollout.pool.pool import RolloutPool
    from rlinf_vl.runtime.launch import ray_cluster, reserve

    overrides = [
        "cluster.component_placement={actor: 0, rollout: 0-1}",
        "runner.heartbeat_timeout=8",
        "algorithm.sampling_params.max_new_tokens=24",
    ]
    config = load_config("toy-grpo-cpu", overrides)
    with ray_cluster(config), reserve(config) as placement:
        pool = RolloutPool(config, str(toy_folder), placement)
        pool.start()
        yield pool
        pool.stop()


@pytest.fixture
def buckets(toy_folder):
    model = load_model(toy_folder, family_of("qwen3_vl"), torch.float32)
    return [
        ray.put(bucket)
        for bucket in pack((name, p.detach() * 1.1) for name, p in model.named_parameters())
    ]


def tasks(n: int, prefix: str = "g") -> list[Task]:
    return [Task(f"{prefix}{i}", "train", i, tuple(range(8 * i, 8 * i + 8))) for i in range(n)]


def tokens(pool, results):
    groups = ray.get([reference for _, reference in results])
    pool.release([summary for summary, _ in results])
    return [[s.ids.tolist() for s in group.sequences] for group in groups]


def pid_of(pool, i: int) -> int:
    return ray.get(pool.workers[i].process.remote())[1]


@pytest.mark.sample("9")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_is_killed_or_stopped_while_it_generates_is_replaced(pool, number):
    results = pool.submit(tasks(40)).results()
    assert [summary.id for summary, _ in results] == [f"g{i}" for i in range(40)]
    undisturbed, before, pid = tokens(pool, results), pool.restarts, pid_of(pool, 0)
    training, validation = pool.submit(tasks(40)), pool.submit(tasks(4, "v"))
    while not pool._supervisor.slots[0].streams:
        time.sleep(0.001)
    os.kill(pid, number)
    results = training.results()
    assert pool.restarts == before + 1
    # the random stream of a sample is its own, so even what was sent again is the same
    assert tokens(pool, results) == undisturbed
    assert tokens(pool, validation.results()) == undisturbed[:4], "it was in flight, too"
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert all(not t.is_alive() for t in threading.enumerate() if t.name == "torch-engine")


def test_rows_that_share_an_image_go_to_one_worker(pool, monkeypatch):
    found = pool.filter_rows("train", range(12))
    assert (list(found.kept), found.too_long, found.bad) == (list(range(12)), {}, {})
    shared = {("train", row): row % 2 for row in (0, 1, 4, 5, 6, 7)}
    monkeypatch.setattr(pool._order, "_shared", shared)
    submission, slots = pool.submit(tasks(12)), pool._supervisor.slots
    while not all(submission in slot.sent_tasks for slot in slots):
        time.sleep(0.001)
    sent = {
        slot.number: {task.row for task in slot.sent_tasks[submission].values()} for slot in slots
    }
    submission.results()
    assert sorted(map(len, sent.values())) == [6, 6]
    assert any({0, 4, 6} <= part and {1, 5, 7} <= part for part in sent.values())


def test_a_worker_that_dies_in_a_weight_sync_is_replaced_and_so_is_its_replacement(pool, buckets):
    before, replacements = pool.restarts, []

    def snapshot():
        replacements.append(pid_of(pool, 1))
        if len(replacements) == 1:
            os.kill(replacements[0], signal.SIGKILL)
        return Snapshot(40, buckets)

    os.kill(pid_of(pool, 1), signal.SIGKILL)
    settled = pool.settle(
        pool.take_weights(ObjectStoreStrategy(), [ray.put(Offer(buckets))], 40, snapshot)
    )
    assert len(settled) == 2 and None in settled and not replacements, (
        "the sync has not waited for the replacement"
    )
    assert {summary.min_version for summary, _ in pool.submit(tasks(6)).results()} == {40}
    assert (pool.restarts, len(replacements)) == (before + 2, 2)


def test_weights_are_taken_while_groups_are_sampled_and_a_worker_that_dies_meanwhile_loses_none(
    pool, buckets
):
    """Its groups are sampled again, by the new weights alone; those of the other one go on, and so have tokens of both versions."""
    before, first = pool.restarts, 50
    pool.settle(
        pool.take_weights(
            ObjectStoreStrategy(),
            [ray.put(Offer(buckets))],
            first,
            lambda: Snapshot(first, buckets),
        )
    )
    submission, slots = pool.submit(tasks(40)), pool._supervisor.slots
    while not all(slot.streams for slot in slots):
        time.sleep(0.001)
    time.sleep(0.1)
    newer = Snapshot(first + 1, buckets)
    taken = pool.take_weights(
        ObjectStoreStrategy(), [ray.put(Offer(buckets))], first + 1, lambda: newer
    )
    os.kill(pid_of(pool, 0), signal.SIGKILL)
    pool.settle(taken)
    results = submission.results()
    assert [summary.id for summary, _ in results] == [f"g{i}" for i in range(40)]
    assert pool.restarts == before + 1
    groups = ray.get([reference for _, reference in results])
    mixed = 0
    for (summary, _), group in zip(results, groups, strict=True):
        for sequence in group.sequences:
            versions = sequence.versions[sequence.loss_mask]
            assert (
                set(versions.tolist()) <= {first, first + 1}
                and (versions[1:] >= versions[:-1]).all()
            )
            assert (sequence.versions[~sequence.loss_mask] == -1).all()
        seen = [s.versions[s.loss_mask] for s in group.sequences]
        assert (summary.min_version, summary.max_version) == (
            min(map(min, seen)),
            max(map(max, seen)),
        )
        mixed += summary.min_version < summary.max_version
    assert mixed, "the weights came when nothing was under way"
    pool.release([summary for summary, _ in results])
    assert {summary.min_version for summary, _ in pool.submit(tasks(6)).results()} == {first + 1}


def test_workers_that_die_asleep_are_replaced_and_none_stays_asleep(pool):
    """On the CPU nothing is freed, but an engine that generates in its sleep is an error there too."""
    undisturbed, before = tokens(pool, pool.submit(tasks(4)).results()), pool.restarts
    assert pool.release_tags() == ("weights", "kv_cache")
    pool.restore_memory(("weights", "kv_cache"))  # they are awake: nothing happens
    os.kill(pid_of(pool, 0), signal.SIGKILL)
    pool.release_memory(("weights", "kv_cache"))
    assert pool.restarts == before + 1
    with pytest.raises(
        ray.exceptions.RayTaskError, match="asked to generate while its memory is released"
    ):
        pool.submit(tasks(4)).results()
    os.kill(pid_of(pool, 1), signal.SIGKILL)
    pool.restore_memory(("weights",))
    pool.restore_memory(("kv_cache",))
    assert pool.restarts == before + 2
    assert tokens(pool, pool.submit(tasks(4)).results()) == undisturbed


def test_a_worker_that_died_since_does_not_spoil_the_end(pool):
    """The last test: the pool is of no use behind it."""
    os.kill(pid_of(pool, 0), signal.SIGKILL)
    pool.stop()
