"""Prompts with several images of different sizes are no further from the trainer than those with one."""

import numpy as np
import pytest
from many_images import MOST, differences, ratio
from tiny import IMAGE_ID, MERGE, PAD, banned, pixels, request, tiny_model, tiny_policy

from rlinf_vl.engines.torch.engine import TorchEngine
from rlinf_vl.models.families import FAMILIES
from rlinf_vl.models.loading import use_packed_attention
from rlinf_vl.packing.collator import Collator
from rlinf_vl.types import SamplingParams


@pytest.mark.parametrize("family", [f for f in FAMILIES.values() if f.vision_tower], ids=lambda f: f.model_type)
def test_one_to_eight_images_with_the_torch_engine(family):
    rng, sampling, name = np.random.default_rng(0), SamplingParams(max_new_tokens=12), family.model_type
    counts = [1] * 6 + list(range(2, 9))
    shapes = [[tuple(rng.integers(1, 5, 2)) for _ in range(count)] for count in counts]
    requests = [request(rng, shown, sampling, tuple(range(6))) for shown in shapes]
    engine = TorchEngine(
        use_packed_attention(tiny_model(family=name), family), family, banned=banned(), pixels=pixels,
        image_token_id=IMAGE_ID, merge_size=MERGE, max_running=128,
    )  # fmt: skip
    try:
        off = differences(
            engine, requests, tiny_policy(model_type=name), Collator(family, IMAGE_ID, MERGE, pixels, PAD)
        )
    finally:
        engine.close()
    assert list(off) == list(range(1, 9)) and off[1].mean() < 1e-6
    assert ratio(off) <= MOST
