"""Prompts with several images of different sizes are no further from the trainer than those with one."""

import numpy as np
import pytest
import torch
from figures import keep
from many_images import MOST, differences, ratio
from tiny import (
    IMAGE_TOKENS,
    PAD,
    answered,
    banned,
    image,
    pixels,
    request,
    request_about,
    tiny_model,
    tiny_policy,
    transformers_logprobs,
)

from rlinf_vl.engines.torch.engine import TorchEngine
from rlinf_vl.models.families import FAMILIES
from rlinf_vl.models.loading import use_packed_attention
from rlinf_vl.packing.collator import Collator, Member
from rlinf_vl.types import Sample, SamplingParams


@pytest.mark.parametrize(
    "family", [f for f in FAMILIES.values() if f.vision_tower], ids=lambda f: f.model_type
)
def test_one_to_eight_images_with_the_torch_engine(family):
    rng, sampling, name = (
        np.random.default_rng(0),
        SamplingParams(max_new_tokens=12),
        family.model_type,
    )
    counts = [1] * 6 + list(range(2, 9))
    shapes = [[tuple(rng.integers(1, 5, 2)) for _ in range(count)] for count in counts]
    requests = [request(rng, shown, sampling, tuple(range(6))) for shown in shapes]
    engine = TorchEngine(
        use_packed_attention(tiny_model(family=name), family), family, banned=banned(), pixels=pixels,
        image_tokens=IMAGE_TOKENS, max_running=128,
    )  # fmt: skip
    try:
        off = differences(
            engine,
            requests,
            tiny_policy(model_type=name),
            Collator(family, IMAGE_TOKENS, pixels, PAD),
        )
    finally:
        engine.close()
    assert list(off) == list(range(1, 9)) and off[1].mean() < 1e-6
    keep(name, "images", ratio(off), limit=MOST)


@pytest.mark.parametrize(
    "family", [f for f in FAMILIES.values() if f.vision_tower], ids=lambda f: f.model_type
)
def test_one_to_eight_images_train_as_in_transformers(family):
    """Of all sizes, one in several rows and twice in one, prompts shared or not: logprobs, and the gradients of every weight."""
    rng, name = np.random.default_rng(3), family.model_type
    again = image(rng, 2, 3)
    groups = []
    for count in (1, 2, 5, 8):
        images = [image(rng, *rng.integers(1, 5, 2)) for _ in range(count)]
        images[-1] = again
        images[0] = again if count == 8 else images[0]
        asked = request_about(rng, images)
        drawn = [rng.integers(2, 60, n).astype(np.int32) for n in (4, 7)]
        samples = [
            Sample(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32), "stop")
            for ids in drawn
        ]
        groups.append(answered(asked, samples, str(count)))
    members = [Member(g, i, [0.0]) for g in groups for i in range(2)]
    theirs = tiny_model(family=name).train()
    expected = torch.cat([transformers_logprobs(theirs, m.group, m.index) for m in members])
    weights = torch.linspace(-1, 1, len(expected))
    (expected * weights).sum().backward()
    for share in (True, False):
        policy = tiny_policy(model_type=name)
        policy.train()
        got, _ = policy(
            Collator(family, IMAGE_TOKENS, pixels, PAD, None, share)(members, run_vision=True)
        )
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
        (got * weights).sum().backward()
        ours = dict(policy.named_parameters())
        assert len(ours) == len(list(theirs.parameters()))
        for (of, a), b in zip(theirs.named_parameters(), ours.values(), strict=True):
            assert (a.grad is None) == (b.grad is None), of
            if a.grad is not None:
                limit = 2e-5 * max(1.0, float(a.grad.abs().max()))
                torch.testing.assert_close(b.grad, a.grad, atol=limit, rtol=0, msg=of)
