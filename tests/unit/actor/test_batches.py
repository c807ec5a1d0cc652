"""Micro-batches made in the background, and images encoded once per step however they are split."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import group, pixels, tiny_collator, tiny_policy

from rlinf_vl.actor.batch_types import RankMiniBatch
from rlinf_vl.actor.batches import BatchMaker, prefetched
from rlinf_vl.config.schema import FsdpConfig, MixedPrecisionConfig
from rlinf_vl.models.loading import freeze
from rlinf_vl.models.vision_cache import VisionCache
from rlinf_vl.packing.planner import Item


def test_the_next_item_is_made_while_the_last_is_used():
    second = threading.Event()

    def source():
        yield 1
        second.set()
        yield 2

    items = prefetched(source())
    assert next(items) == 1
    assert second.wait(5), "the second was not made ahead"
    assert list(items) == [2]


def test_an_error_while_making_reaches_the_caller():
    def source():
        yield 1
        raise ValueError("a bad image")

    items = prefetched(source())
    next(items)
    with pytest.raises(ValueError, match="a bad image"):
        next(items)


@pytest.fixture
def policy(mesh):
    policy = tiny_policy()
    freeze(policy.model, policy.family)
    return mesh.shard(policy, FsdpConfig(mixed_precision=MixedPrecisionConfig("fp32")))


@pytest.mark.parametrize("max_tokens", [1, 7, 250])
def test_every_image_is_encoded_once_and_fits_where_it_stands(policy, max_tokens):
    rng = np.random.default_rng(0)
    first = group(rng, [(2, 3), (1, 2)], [4, 2], "a")
    groups = {
        0: first,
        1: group(rng, [], [3], "b"),
        2: replace(first, id="c"),
        3: group(rng, [(3, 3)], [5, 6], "d"),
    }
    encoded = []

    def counted(image):
        encoded.append(image.hash)
        return pixels(image)

    collate = replace(tiny_collator(), pixels=counted)
    cached = BatchMaker(policy, collate, VisionCache(2**20, "cpu"), max_tokens)
    steps = [[(0, 0), (1, 0)], [(2, 0), (3, 1)], [(0, 1), (3, 0)], []]
    mini = RankMiniBatch(
        tuple(tuple(Item(g, i, 1, 1) for g, i in step) for step in steps), (True,) * 4, 1
    )
    advantages = {g: [[0.0]] * 2 for g in groups}
    for _ in range(2):
        cached.prepare(groups.values())
    assert sorted(encoded) == sorted({i.hash for g in groups.values() for i, _ in g.images})

    plain = BatchMaker(policy, tiny_collator(), None, max_tokens)
    with torch.no_grad():
        a, b = (
            [policy(batch, features)[0] for batch, features in make(mini, groups, advantages)]
            for make in (cached, plain)
        )
    for ours, theirs in zip(a, b, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-6)


def test_weights_stay_sharded_after_encoding(policy):
    g = group(np.random.default_rng(0), [(2, 3)], [4], "a")
    make = BatchMaker(policy, tiny_collator(), VisionCache(2**20, "cpu"), 100)
    before = {name: id(p) for name, p in policy.named_parameters()}
    make.prepare([g])
    assert {name: id(p) for name, p in policy.named_parameters()} == before, (
        "an optimizer would hold other parameters"
    )
