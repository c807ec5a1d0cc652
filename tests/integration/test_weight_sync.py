"""Every strategy of weight syncs, and one registered here, between two FSDP ranks and two workers: engines sample from the
ranks' weights, exactly."""

import gc
import os
import signal

import file_strategy
import numpy as np
import pytest
import ray
import torch
from pool_weights import load_weights

from rlinf_vl.config import load_config
from rlinf_vl.rollout.submission import Task
from rlinf_vl.weights import STRATEGIES, Listing
from rlinf_vl.weights.sender import Offer
from rlinf_vl.weights.strategy import strategy_named

pytestmark = pytest.mark.integration
OWN = Listing("file_strategy:FileStrategy", "files in a folder that all processes see")
#: Several buckets even for the toy, which has 92 weights.
BUCKET_BYTES = 2**18


@pytest.fixture(scope="module")
def models(toy_folder, tmp_path_factory):
    """The toy's model, which the engines start with, and another, in whose folder the ranks find theirs."""
    import shutil

    from transformers import AutoModelForImageTextToText

    folder = tmp_path_factory.mktemp("other") / "checkpoint"
    shutil.copytree(toy_folder, folder)
    old, new = (
        AutoModelForImageTextToText.from_pretrained(toy_folder, dtype=torch.float32).eval()
        for _ in range(2)
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in new.parameters():
            p.add_(0.3 * p.std(correction=0) * torch.randn(p.shape, generator=generator))
    new.save_pretrained(folder)
    return old, new, folder


@pytest.fixture(scope="module")
def parts(toy_folder, models):
    from rlinf_vl.actor.group import ActorGroup
    from rlinf_vl.rollout.pool.pool import RolloutPool
    from rlinf_vl.runtime.launch import ray_cluster, reserve

    overrides = [
        "cluster.component_placement={actor: 0-1, rollout: 0-1}",
        "rollout.model.precision=fp32",
        "actor.model.freeze_vision_tower=false",
    ]
    config = load_config("toy-grpo-cpu", overrides)
    # Ranks and workers have no path to the tests' folder.
    ray.cloudpickle.register_pickle_by_value(file_strategy)
    with ray_cluster(config), reserve(config) as placement:
        pool = RolloutPool(config, str(toy_folder), placement)
        actors = ActorGroup(config, str(models[2]), placement.device, placement.actor)
        pool.start()
        actors.start(total_steps=2)
        yield actors, pool
        pool.stop()
        actors.stop()


@pytest.fixture
def synced(parts, models, request, monkeypatch):
    """(sync, actors, pool) for one way, the engines holding the toy's own weights as version 0."""
    from rlinf_vl.controller.weight_sync import WeightSync

    actors, pool = parts
    monkeypatch.setitem(STRATEGIES, "files", OWN)
    load_weights(pool, models[0].named_parameters(), version=0)
    return (
        WeightSync(
            strategy_named(request.param), actors, pool, device="cpu", bucket_bytes=BUCKET_BYTES
        ),
        actors,
        pool,
    )


def sampled(pool, n=8):
    """Groups of two samples to the first n training rows, and the workers that made them: half each."""
    results = pool.submit(
        [Task(f"g{i}", "train", i, (2 * i, 2 * i + 1)) for i in range(n)]
    ).results()
    groups = ray.get([reference for _, reference in results])
    pool.release([summary for summary, _ in results])
    return groups


@torch.no_grad()
def of_model(model, toy_folder, group, trajectory):
    """float32 [R]: transformers' own logprobs of a trajectory's tokens."""
    from rlinf_vl.models.families import family_of
    from rlinf_vl.models.processing import Processor

    processor = Processor(str(toy_folder), family_of("qwen3_vl"))
    (sequence,) = trajectory.sequences
    ids = torch.from_numpy(sequence.ids.astype(np.int64))[None]
    model.model.rope_deltas = None
    logits = model(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        pixel_values=torch.from_numpy(np.concatenate([processor.pixels(image) for image, _ in sequence.images])),
        image_grid_thw=torch.tensor([grid for _, grid in sequence.images]),
        mm_token_type_ids=(ids == processor.image_token_id).int(),
    ).logits[0].float()  # fmt: skip
    logits[:, torch.from_numpy(processor.banned_ids(logits.shape[-1]))] = -torch.inf
    table = logits[group.prefix_length - 1 : -1].log_softmax(-1)
    return table.gather(1, ids[0, group.prefix_length :, None])[:, 0].numpy()


def assert_sampled_from(pool, model, toy_folder, version):
    for group in sampled(pool):
        for trajectory in group.trajectories:
            assert trajectory.error is None
            (sequence,) = trajectory.sequences
            mask = sequence.loss_mask
            assert (sequence.versions[mask] == version).all()
            expected = of_model(model, toy_folder, group, trajectory)
            np.testing.assert_allclose(sequence.logprobs[mask], expected, atol=1e-4)


@pytest.mark.sample("delta", "shared_memory")
@pytest.mark.parametrize("synced", [*STRATEGIES, "files"], indirect=True)
def test_engines_follow_the_ranks_and_so_does_a_new_worker(synced, models, toy_folder):
    sync, _, pool = synced
    old, new, _ = models
    assert_sampled_from(pool, old, toy_folder, 0)
    metrics = sync(version=3)  # with fingerprints
    assert (
        metrics["sync/bytes"] == sum(p.nbytes for p in new.parameters())
        and metrics["sync/bytes_share"] == 1
    )
    assert metrics["sync/load_seconds"] > 0 and metrics["sync/offer_seconds"] > 0
    assert_sampled_from(pool, new, toy_folder, 3)
    sync(version=4)  # without
    assert_sampled_from(pool, new, toy_folder, 4)

    restarts = pool.restarts
    _, pid = ray.get(pool.workers[1].process.remote())
    os.kill(pid, signal.SIGKILL)
    # Replaced on the way, and given what the other one has.
    assert_sampled_from(pool, new, toy_folder, 4)
    assert pool.restarts == restarts + 1
    # Which refuses to change weights of a version that it did not send.
    if sync.strategy.name != "delta":
        load_weights(pool, old.named_parameters(), version=0)
    sync(version=5)  # the new worker takes part
    assert_sampled_from(pool, new, toy_folder, 5)


@pytest.mark.parametrize("synced", [*STRATEGIES, "files"], indirect=True)
def test_weights_that_differ_stop_the_first_sync(synced, monkeypatch):
    """A fingerprint that is not that of what arrives: the error names the weights, and nothing waits for anything."""
    from dataclasses import replace

    sync, _, pool = synced
    take = pool.take_weights

    def wrong(strategy, offers, version, *rest):
        labels = [label for offer in ray.get(offers) for label in offer.labels]
        if strategy.through_store:
            labels = [ray.put(replace(b, fingerprint=b.fingerprint ^ 1)) for b in ray.get(labels)]
        else:
            labels = [replace(label, fingerprint=label.fingerprint ^ 1) for label in labels]
        return take(strategy, [ray.put(Offer(labels))], version, *rest)

    monkeypatch.setattr(pool, "take_weights", wrong)
    with pytest.raises(
        ray.exceptions.RayTaskError,
        match="(?s)WeightsDiffer: weights .* are not those the trainer sent",
    ):
        sync(version=9)


@pytest.mark.parametrize("synced", ["shared_memory"], indirect=True)
def test_an_offer_is_kept_by_the_delivery_and_its_memory_goes_with_the_sender(synced, monkeypatch):
    from rlinf_vl.weights import node_memory, shared_memory, staging

    _, actors, _ = synced
    labels = [label for offer in actors.call("sender.offer", 1, True) for label in offer.labels]
    assert len(labels) > 3
    assert len({label.place for label in labels}) == 1  # one node, so one of the two ranks offers
    with monkeypatch.context() as m:
        m.setattr(staging, "TIMEOUT", 0.2)
        with pytest.raises(TimeoutError):
            next(shared_memory.opened(labels))
    actors.call("sender.deliver")
    assert {label.number for label in labels} == set(range(labels[0].number, labels[0].last + 1))
    actors.call("sender.release")
    node_memory.forget_others(set())
    gc.collect()
    with pytest.raises(FileNotFoundError):
        next(shared_memory.opened(labels[-1:]))
    with pytest.raises(ValueError, match="no actor rank is at the place"):
        shared_memory.at("GPU elsewhere", labels)


@pytest.mark.parametrize("synced", ["shared_memory"], indirect=True)
def test_the_sender_knows_the_processes_that_read_beside_it_and_leaves_dead_ones_out(synced):
    """On GPUs it waits for them; which rank offers does so."""
    _, actors, pool = synced
    workers = list(pool.workers)
    places = [worker.reads_at.remote() for worker in workers]
    pids = {pid for _, pid in ray.get(places)}
    assert pids == {pid for _, pid in ray.get([worker.process.remote() for worker in workers])}
    assert actors.call("sender._readers_here", places) == [pids, set()]
    os.kill(ray.get(places[1])[1], signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(workers[1].process.remote())
    late = [worker.reads_at.remote() for worker in workers]
    assert actors.call("sender._readers_here", late)[0] == {ray.get(places[0])[1]}
