"""Weights by what changed, between two FSDP ranks and two workers with bfloat16 engines: equal bit for bit, whoever dies."""

import os
import signal

import pytest
import ray
import torch

from rlinf_vl.config import load_config
from rlinf_vl.transport.buckets import WeightsDiffer
from rlinf_vl.transport.sender import Offer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
#: Several buckets even for the toy.
BUCKET_BYTES = 2**18
SYNCS = 50


@pytest.fixture(scope="module")
def parts(toy_folder):
    from rlinf_vl.actor.group import ActorGroup
    from rlinf_vl.rollout.pool import RolloutPool
    from rlinf_vl.runtime.launch import ray_cluster, reserve

    placed = "cluster.component_placement={actor: 0-1, rollout: 0-1}"
    config = load_config("toy-grpo-cpu", [placed, "rollout.model.precision=bf16"])
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
        rank.__ray_call__.remote(lambda self: {n: w.clone() for n, w in self.trainer.weights(torch.bfloat16)})
        for rank in actors.ranks
    ]
    return ray.get(gathered)[0]


def of_engines(pool):
    return ray.get(
        [
            worker.__ray_call__.remote(lambda self: {n: p.clone() for n, p in self.engine.model.named_parameters()})
            for worker in pool.workers
        ]
    )


def assert_equal(actors, pool):
    expected = of_ranks(actors)
    for held in of_engines(pool):
        assert all(torch.equal(held[name].view(torch.int16), w.view(torch.int16)) for name, w in expected.items())


def test_fifty_syncs_with_deaths_between_leave_every_engine_with_the_ranks_weights(parts):
    from rlinf_vl.controller.weight_sync import WeightSync

    actors, pool = parts
    sync = WeightSync("delta", actors, pool, device="cpu", bucket_bytes=BUCKET_BYTES)
    shares, before = [], of_ranks(actors)
    for step in range(1, SYNCS + 1):
        move(actors, step)
        if step in (3, 20):
            _, pid = ray.get(pool.workers[step % 2].process.remote())
            os.kill(pid, signal.SIGKILL)
        if step % 3:
            sync.begin(step)  # queued behind what the ranks do
        shares.append(sync(step)["sync/bytes_share"])
        if step in (1, 2, 3, 20, SYNCS):
            assert_equal(actors, pool)
    assert pool.restarts == 2
    assert shares[0] == 1 and max(shares[1:]) < 0.1, "whole once, and then what changed"
    after = of_ranks(actors)
    assert not any(torch.equal(before[name], after[name]) for name in before if before[name].ndim > 1)
    assert {worker["version"] for worker in ray.get([version_of(w) for w in pool.workers])} == {SYNCS}


def version_of(worker):
    return worker.__ray_call__.remote(lambda self: {"version": self.engine.version})


def test_an_engine_of_another_version_refuses_changes(parts):
    actors, pool = parts
    version = ray.get(version_of(pool.workers[0]))["version"]
    offers = [ray.put(offer) for offer in actors.call("sender.offer", version + 7, False)]
    stray = actors.call("sender.offer", version + 8, False)
    assert all(isinstance(offer, Offer) for offer in stray)
    with pytest.raises(ray.exceptions.RayTaskError, match=f"as changes of version {version + 7}, but the engine has"):
        ray.get(pool.workers[0].take_weights.remote("delta", [ray.put(offer) for offer in stray], version + 8))
    assert issubclass(WeightsDiffer, RuntimeError)
    ray.get([worker.take_weights.remote("delta", offers, version + 7) for worker in pool.workers])
    assert_equal(actors, pool)
