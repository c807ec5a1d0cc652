"""A step that trains the vision tower, and the engine after it: on the same image prompts its logprobs are the trainer's.

Images that the engine has seen before are asked about again: embeddings kept from the old tower would be found out.
"""

import socket

import numpy as np
import pytest
import ray
from tiny import answered

from rlinf_vl.actor.worker import ActorRank, RankMiniBatch
from rlinf_vl.config import load_config
from rlinf_vl.controller.step_plan import item_of
from rlinf_vl.packing.planner import plan_micro_batches
from rlinf_vl.transport import unpack
from rlinf_vl.types import Group, GroupSummary

pytestmark = pytest.mark.integration
TOLERANCE = 1e-4  # nats, the mean over a group's tokens
CLEARLY = 100 * TOLERANCE


def config_of(toy, temperature):
    return load_config(
        "toy-grpo-cpu-sglang",
        [
            f"rollout.model.model_path={toy.path}",
            f"algorithm.sampling_params.temperature={temperature}",
            "actor.model.freeze_vision_tower=false",
            "actor.optim.lr=5e-3",  # Adam's first step moves every weight by as much
            "actor.optim.lr_warmup_steps=0",
        ],
    )


@pytest.fixture(scope="module")
def cluster(toy):
    from rlinf_vl.runtime.launch import ray_cluster

    with ray_cluster(config_of(toy, 1.0)):
        yield


@pytest.fixture
def rank(cluster, toy, temperature):
    """The only rank of an actor, in this process."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    rank = ActorRank(config_of(toy, temperature), toy.path, "cpu", 0, 1)
    rank.start("127.0.0.1", port, 10)
    rank.set_weight_sync("object_store", bucket_bytes=2**20)  # several
    yield rank
    rank.stop()


def sampled(engine, toy, **sampling) -> list[Group]:
    """Four answers each to prompts with 1, 2 and 3 images, always the same prompts."""
    requests = [toy.request(k, 4, stop_ids=(), **sampling) for k in (1, 2, 3)]
    return [
        answered(r, completion.samples, str(k))
        for k, (r, completion) in enumerate(zip(requests, engine.generate(requests), strict=True))
    ]


def shares(groups) -> tuple[RankMiniBatch, dict[int, ray.ObjectRef]]:
    """All trajectories as one mini-batch of the only rank."""
    summaries = [GroupSummary.of(group, image_token_id=-1) for group in groups]
    items = [item_of(g, i, s) for g, s in enumerate(summaries) for i in range(len(s.tokens))]
    plan = plan_micro_batches(items, ranks=1, budget=600)
    tokens = sum(sum(s.response_tokens) for s in summaries)
    return RankMiniBatch(plan.micro_batches[0], plan.run_vision, tokens), dict(enumerate(map(ray.put, groups)))


def differences(rank, groups) -> dict[int, float]:
    """Images of a prompt → the mean |engine - trainer| over its sampled tokens."""
    mini, references = shares(groups)
    assert rank.fetch_groups(references) == []
    rows = rank.score(mini)
    return {
        len(group.images): sum(seen for g, _, seen, _ in rows if g == number)
        / sum(tokens for g, tokens, *_ in rows if g == number)
        for number, group in enumerate(groups)
    }


def away_from(toy, model, groups, temperature) -> dict[int, float]:
    """As `differences`, of the engine from transformers' own forward with the weights of `model`."""
    found = {}
    for group in groups:
        request = toy.request_of(group)
        theirs = [toy.of_tokens(request, t, temperature, model) for t in group.trajectories]
        ours = [t.logprobs for t in group.trajectories]
        found[len(group.images)] = float(np.abs(np.concatenate(ours) - np.concatenate(theirs)).mean())
    return found


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (0.7, 0.9)])
def test_the_engine_follows_a_step_that_trains_the_vision_tower(engine, toy, rank, temperature, top_p):
    sampling = {"temperature": temperature, "top_p": top_p}
    before = sampled(engine, toy, **sampling)
    assert max(differences(rank, before).values()) <= TOLERANCE

    mini, references = shares(before)
    rank.fetch_groups(references)
    rank.update(1, [mini], {g: (1.0, -1.0, 0.5, -0.5) for g in references})
    buckets = [unpack(ray.get(reference)) for reference in rank.offer_weights(check=False)]
    trained = {name: value for bucket in buckets for name, value in bucket.items()}
    assert any("visual" in name for name in trained)
    moved = differences(rank, before)
    assert min(moved.values()) > CLEARLY, "the step has moved the trainer away from what was sampled"

    engine.load_weights(buckets, version=1)
    after = sampled(engine, toy, **sampling)
    assert all((t.versions == 1).all() for group in after for t in group.trajectories)
    assert max(differences(rank, after).values()) <= TOLERANCE
    # Neither the old weights nor the new ones behind the old tower explain what the engine says now.
    stale = toy.with_weights({name: value for name, value in trained.items() if "visual" not in name})
    for model in (toy.model, stale):
        assert min(away_from(toy, model, after, temperature).values()) > CLEARLY
