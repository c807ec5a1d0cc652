"""Weights by what changed, between two FSDP ranks and two workers with bfloat16 engines: equal bit for bit, whoever dies."""

import os
import signal
import time

import pytest
import ray
import torch

from rlinf_vl.config import load_config
from rlinf_vl.weights.buckets import WeightsDiffer
from rlinf_vl.weights.delta import DeltaStrategy
from rlinf_vl.weights.sender import Offer

pytestmark = pytest.mark.integration
#: Several buckets even for the toy.
BUCKET_BYTES = 2**18
SYNCS = 50
HEARTBEAT_S = 4
#: An environment whose import, and so its worker's constructor, takes as long as a file says.
SLOW = """
import time
from pathlib import Path
from rlinf_vl.envs.single_turn import SingleTurn

time.sleep(float(Path("FILE").read_text()))

class Slow(SingleTurn):
    pass
"""


@pytest.fixture(scope="module")
def constructor_seconds(tmp_path_factory):
    """The file that says for how long constructors take."""
    file = tmp_path_factory.mktemp("slow") / "seconds"
    file.write_text("0")
    return file


@pytest.fixture(scope="module")
def parts(toy_folder, constructor_seconds):
    from rlinf_vl.actor.group import ActorGroup
    from rlinf_vl.rollout.pool.pool import RolloutPool
    from rlinf_vl.runtime.launch import ray_cluster, reserve

    environment = constructor_seconds.with_name("slow.py")
    environment.write_text(SLOW.replace("FILE", str(constructor_seconds)))
    overrides = [
        "cluster.component_placement={actor: 0-1, rollout: 0-1}",
        "rollout.model.precision=bf16",
        f"rollout.env_class={environment}:Slow",
        f"runner.heartbeat_timeout={HEARTBEAT_S}",
    ]
    config = load_config("toy-grpo-cpu", overrides)
    with ray_cluster(config), reserve(config) as placement:
        pool = RolloutPool(config, str(toy_folder), placement)
        actors = ActorGroup(config, str(toy_folder), placement.device, placement.actor)
        pool.start()
        actors.start(total_steps=2)
        yield actors, pool
        pool.stop()
        actors.stop()


def move(actors, step):
    """A step as small as those of reinforcement learning: each value by the same, up or down."""

    @torch.no_grad()
    def of_rank(self):
        for weight in self.trainer.policy.parameters():
            if weight.requires_grad:
                own = weight.to_local()
                generator = torch.Generator().manual_seed(1000 * step + own.numel())
                own += 2e-6 * torch.randn(own.shape, generator=generator).sign()

    ray.get([rank.__ray_call__.remote(of_rank) for rank in actors.ranks])


def of_ranks(actors):
    """The weights that engines must have."""
    gathered = [
        rank.__ray_call__.remote(
            lambda self: {n: w.clone() for n, w in self.trainer.weights(torch.bfloat16)}
        )
        for rank in actors.ranks
    ]
    return ray.get(gathered)[0]


def of_engines(pool):
    return ray.get(
        [
            worker.__ray_call__.remote(
                lambda self: {n: p.clone() for n, p in self.engine.model.named_parameters()}
            )
            for worker in pool.workers
        ]
    )


def assert_equal(actors, pool):
    expected = of_ranks(actors)
    for held in of_engines(pool):
        assert all(
            torch.equal(held[name].view(torch.int16), w.view(torch.int16))
            for name, w in expected.items()
        )


def kill_worker(pool, number):
    _, pid = ray.get(pool.workers[number].process.remote())
    os.kill(pid, signal.SIGKILL)


def wait_for_workers(pool):
    """Wait until every slot is live."""
    pool._call_all("in the test", "ready")


def test_fifty_syncs_with_deaths_between_leave_every_engine_with_the_ranks_weights(parts):
    from rlinf_vl.controller.weight_sync import WeightSync

    actors, pool = parts
    sync = WeightSync(DeltaStrategy(), actors, pool, device="cpu", bucket_bytes=BUCKET_BYTES)
    shares, before = [], of_ranks(actors)
    for step in range(1, SYNCS + 1):
        move(actors, step)
        if step in (3, 20):
            kill_worker(pool, step % 2)
        if step % 3:
            sync.begin(step)  # queued behind what the ranks do
        shares.append(sync(step)["sync/bytes_share"])
        if step in (1, 2, 10, 30, SYNCS):
            wait_for_workers(pool)
            assert_equal(actors, pool)
    assert pool.restarts == 2
    assert shares[0] == 1 and max(shares[1:]) < 0.1, "whole once, and then what changed"
    after = of_ranks(actors)
    assert not any(
        torch.equal(before[name], after[name]) for name in before if before[name].ndim > 1
    )
    assert {worker["version"] for worker in ray.get([version_of(w) for w in pool.workers])} == {
        SYNCS
    }


def test_syncs_go_on_while_a_replacement_starts_for_longer_than_a_heartbeat_and_then_it_has_their_weights(
    parts, constructor_seconds
):
    from rlinf_vl.controller.weight_sync import WeightSync

    actors, pool = parts
    sync = WeightSync(DeltaStrategy(), actors, pool, device="cpu", bucket_bytes=BUCKET_BYTES)
    sync(SYNCS + 1)
    before, first = pool.restarts, SYNCS + 2
    constructor_seconds.write_text(str(3 * HEARTBEAT_S))
    kill_worker(pool, 1)
    begun, step = time.monotonic(), first
    while time.monotonic() < begun + 2 * HEARTBEAT_S:
        move(actors, step)
        sync.begin(step)
        assert sync(step)["sync/load_seconds"] > 0
        step += 1
    assert not pool._supervisor.slots[1].live and step > first + 1, "nobody has waited for it"
    constructor_seconds.write_text("0")
    while not pool._supervisor.slots[1].live:
        move(actors, step)
        sync.begin(step)
        sync(step)
        step += 1
    wait_for_workers(pool)
    assert_equal(actors, pool)
    assert pool.restarts == before + 1, (
        "its constructor took three times as long as a heartbeat may"
    )


def version_of(worker):
    return worker.__ray_call__.remote(lambda self: {"version": self.engine.version})


def test_an_engine_of_another_version_refuses_changes(parts):
    from rlinf_vl.controller.weight_sync import WeightSync

    actors, pool = parts
    version = ray.get(version_of(pool.workers[0]))["version"] + 1
    sync = WeightSync(DeltaStrategy(), actors, pool, device="cpu", bucket_bytes=BUCKET_BYTES)
    sync(version)  # whole, so that there is something that changes refer to
    offers = [ray.put(offer) for offer in actors.call("sender.offer", version + 7, False)]
    stray = actors.call("sender.offer", version + 8, False)
    assert all(isinstance(offer, Offer) for offer in stray)
    with pytest.raises(
        ray.exceptions.RayTaskError,
        match=f"as changes of version {version + 7}, but the engine has",
    ):
        ray.get(
            pool.workers[0].take_weights.remote(
                DeltaStrategy(), [ray.put(offer) for offer in stray], version + 8
            )
        )
    assert issubclass(WeightsDiffer, RuntimeError)
    ray.get(
        [
            worker.take_weights.remote(DeltaStrategy(), offers, version + 7)
            for worker in pool.workers
        ]
    )
    assert_equal(actors, pool)
