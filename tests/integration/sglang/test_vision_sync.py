"""A step that trains the vision tower, and the engine after it: on the same image prompts its logprobs are the trainer's.

Images that the engine has seen before are asked about again: embeddings kept from the old tower would be found out.
"""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from summaries import values
from tiny import answered

from rlinf_vl.actor.batch_types import RankMiniBatch
from rlinf_vl.actor.load import load_trainer
from rlinf_vl.actor.mesh import Mesh, join_ranks
from rlinf_vl.config import load_config
from rlinf_vl.controller.step_plan import item_of
from rlinf_vl.packing.planner import plan_micro_batches
from rlinf_vl.types import Group, GroupSummary
from rlinf_vl.weights.buckets import pack, unpack

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


@pytest.fixture
def trainer(toy, temperature):
    join_ranks("cpu")
    yield load_trainer(config_of(toy, temperature), toy.path, Mesh.make("cpu"), total_steps=10)
    dist.destroy_process_group()


def sampled(engine, toy, **sampling) -> list[Group]:
    """Four answers each to prompts with 1, 2 and 3 images, always the same prompts."""
    requests = [toy.request(k, 4, stop_ids=(), **sampling) for k in (1, 2, 3)]
    return [
        answered(r, completion.samples, str(k))
        for k, (r, completion) in enumerate(zip(requests, engine.generate(requests), strict=True))
    ]


def minibatch(groups) -> RankMiniBatch:
    """All trajectories, for a single rank."""
    summaries = [GroupSummary.of(group, placeholder_ids=-1) for group in groups]
    items = [
        item_of(g, i, s) for g, s in enumerate(summaries) for i in range(len(values(s, "tokens")))
    ]
    plan = plan_micro_batches(items, ranks=1, budget=600)
    tokens = sum(sum(values(s, "response_tokens")) for s in summaries)
    return RankMiniBatch(plan.micro_batches[0], plan.run_vision, tokens)


def differences(trainer, groups) -> dict[int, float]:
    """Images of a prompt → the mean |engine - trainer| over its sampled tokens."""
    rows = trainer.score(dict(enumerate(groups)), minibatch(groups))
    return {
        len(group.images): sum(seen for g, _, seen, _ in rows if g == number)
        / sum(tokens for g, tokens, *_ in rows if g == number)
        for number, group in enumerate(groups)
    }


def away_from(toy, model, groups, temperature) -> dict[int, float]:
    """As `differences`, of the engine from transformers' own forward with the weights of `model`."""
    found = {}
    for group in groups:
        samples = toy.samples_of(group)
        theirs = [
            toy.of_tokens(toy.request_of(group), sample, temperature, model) for sample in samples
        ]
        ours = [sample.logprobs for sample in samples]
        found[len(group.images)] = float(
            np.abs(np.concatenate(ours) - np.concatenate(theirs)).mean()
        )
    return found


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (0.7, 0.9)])
def test_the_engine_follows_a_step_that_trains_the_vision_tower(
    engine, toy, trainer, temperature, top_p
):
    sampling = {"temperature": temperature, "top_p": top_p}
    before = sampled(engine, toy, **sampling)
    assert max(differences(trainer, before).values()) <= TOLERANCE

    trainer.update(
        dict(enumerate(before)),
        [minibatch(before)],
        [((1.0,), (-1.0,), (0.5,), (-0.5,))] * len(before),
    )
    trained = dict(trainer.weights(torch.float32))
    assert any("visual" in name for name in trained)
    moved = differences(trainer, before)
    assert min(moved.values()) > CLEARLY, (
        "the step has moved the trainer away from what was sampled"
    )

    engine.load_weights(map(unpack, pack(trained.items(), 2**20)), version=1)  # several buckets
    after = sampled(engine, toy, **sampling)
    assert all((s.versions[s.loss_mask] == 1).all() for group in after for s in group.sequences)
    assert max(differences(trainer, after).values()) <= TOLERANCE
    # Neither the old weights nor the new ones behind the old tower explain what the engine says now.
    stale = toy.with_weights(
        {name: value for name, value in trained.items() if "visual" not in name}
    )
    for model in (toy.model, stale):
        assert min(away_from(toy, model, after, temperature).values()) > CLEARLY
