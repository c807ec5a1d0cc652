"""A packed row through `PolicyModel` against transformers' own unpacked forward, sample by sample."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import (
    IMAGE_ID,
    IMAGE_TOKENS,
    PAD,
    banned,
    grids,
    group,
    pixels,
    tiny_model,
    transformers_logprobs,
)

from rlinf_vl.models.families import family_of
from rlinf_vl.models.loading import use_packed_attention
from rlinf_vl.models.policy import PolicyModel
from rlinf_vl.packing.collator import Collator, Member

FAMILY = family_of("qwen3_vl")


def collator(pad_to=None, share=True):
    return Collator(FAMILY, IMAGE_TOKENS, pixels, PAD, pad_to, share)


def policy(model, temperature=1.0):
    return PolicyModel(
        use_packed_attention(model, FAMILY), FAMILY, banned(), temperature=temperature, chunk=5
    )


def some_groups():
    rng = np.random.default_rng(0)
    return [
        group(rng, [(2, 3)], [5, 1, 9], "one image"),
        group(rng, [], [4, 6], "text only"),
        group(rng, [(1, 1), (3, 2), (2, 2)], [7, 3], "three images"),
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("pad_to", [None, 300])
@pytest.mark.parametrize("share", [True, False])
def test_packed_equals_transformers_unpacked(temperature, pad_to, share):
    groups = some_groups()
    members = [Member(g, i, [0.0]) for g in groups for i in range(len(g.trajectories))]
    expected = torch.cat(
        [transformers_logprobs(tiny_model(), m.group, m.index, temperature) for m in members]
    )
    batch = collator(pad_to, share)(members, run_vision=True)
    assert len(batch.ids) == (pad_to or batch.cu_seqlens[-1])
    ours, _ = policy(tiny_model(), temperature)(batch)
    torch.testing.assert_close(ours, expected, atol=5e-6, rtol=1e-5)


def test_an_image_is_encoded_once_however_often_it_is_named():
    g = some_groups()[2]
    batch = collator()([Member(g, 0, [0.0]), Member(g, 1, [0.0])], run_vision=True)
    assert len(batch.grids) == len(g.images)
    assert len(batch.pixel_values) == grids(g.images).prod(axis=1).sum()
    assert len(batch.image_positions) == (g.prefix == IMAGE_ID).sum()
    repeated = collator(share=False)([Member(g, 0, [0.0]), Member(g, 1, [0.0])], run_vision=True)
    assert len(repeated.pixel_values) == len(batch.pixel_values)
    assert len(repeated.image_positions) == 2 * len(batch.image_positions)


def test_a_shared_prompt_stands_in_the_row_once():
    g, other = some_groups()[:2]
    members = [Member(g, i, [0.0]) for i in (0, 1, 2)] + [Member(other, 0, [0.0])]
    batch = collator()(members, run_vision=True)
    lengths = [len(g.prefix), 5, 1, 9, len(other.prefix) + 4]
    assert np.diff(batch.cu_seqlens).tolist() == lengths
    assert batch.prefix.tolist() == [-1, 0, 0, 0, -1]
    last = len(g.prefix) - 1
    assert (
        batch.predict[np.flatnonzero(np.diff(batch.trajectories, prepend=-1))[:3]] == last
    ).all()
    assert (batch.positions[0] == np.concatenate([np.arange(last + 1), *[last + 1 + np.arange(n) for n in (5, 1, 9)],
                                                  np.arange(lengths[-1])])).all()  # fmt: skip


def test_features_by_hash_stand_in_for_pixels():
    groups = some_groups()
    members = [Member(g, 0, [0.0]) for g in groups]
    model = policy(tiny_model())
    with_pixels = collator()(members, run_vision=True)
    without = replace(collator(), pixels=None)(members, run_vision=False)
    assert without.pixel_values is None and without.images == with_pixels.images
    features = model.encode(with_pixels.pixel_values, with_pixels.grids)
    torch.testing.assert_close(
        model(without, features)[0], model(with_pixels)[0], atol=1e-6, rtol=1e-6
    )


def test_images_matter_and_stay_with_their_own_sample():
    groups = some_groups()
    members = [Member(groups[0], 0, [0.0]), Member(groups[2], 0, [0.0])]
    model = policy(tiny_model())
    seen, _ = model(collator()(members, run_vision=True))
    blind = Collator(FAMILY, IMAGE_TOKENS, lambda i: np.zeros_like(pixels(i)), PAD)
    unseen, _ = model(blind(members, run_vision=True))
    assert (seen - unseen).abs().max() > 1e-2
    swapped, _ = model(collator()(members[::-1], run_vision=True))
    n = groups[0].trajectories[0].n_response_tokens
    torch.testing.assert_close(torch.cat([swapped[-n:], swapped[:-n]]), seen, atol=5e-6, rtol=1e-5)


def test_filler_row_has_no_loss_and_calls_the_tower_with_gradient():
    model = policy(tiny_model())
    batch = collator()([], run_vision=True)
    assert batch.pixel_values is None and len(batch.targets) == 0
    logprobs, entropy = model(batch)
    (logprobs.sum() + entropy.sum()).backward()
    tower = [p.grad for p in model.model.model.visual.parameters()]
    assert all(g is not None and (g == 0).all() for g in tower if g is not None)
    assert any(g is not None for g in tower)


def test_a_wrong_placeholder_count_is_refused():
    g = some_groups()[0]
    g.sequences[0].ids[-1] = IMAGE_ID
    with pytest.raises(ValueError, match="image placeholder ids"):
        collator()([Member(g, 0, [0.0])], run_vision=True)
