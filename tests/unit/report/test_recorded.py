"""Recorded trajectories, read back: the sequences that were sampled, and their log-probabilities."""

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from clips import clip, picture

from rlinf_vl.data.views import blank as blank_view
from rlinf_vl.errors import ConfigError
from rlinf_vl.models.families import family_of
from rlinf_vl.models.loading import load_model, use_packed_attention, vocab_size
from rlinf_vl.models.policy import PolicyModel
from rlinf_vl.models.processing import Processor
from rlinf_vl.observe.trajectories import TrajectoryStore
from rlinf_vl.packing.collator import Collator
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.tools.report.look.recorded import read_recorded, recorded_steps
from rlinf_vl.tools.report.look.scorer import Scorer, with_images
from rlinf_vl.types import Group, TokenSequence, Trajectory, Turn

RNG = np.random.default_rng(1)


@pytest.fixture(scope="module")
def processor(toy_folder):
    return Processor(toy_folder, family_of("qwen3_vl"))


@pytest.fixture(scope="module")
def scorer(toy_folder, processor):
    family = processor.family
    model = load_model(toy_folder, family, torch.float32)
    banned = processor.banned_ids(vocab_size(model))
    policy = PolicyModel(
        use_packed_attention(model, family), family, banned, temperature=1.0, chunk=None
    )
    collate = Collator(family, processor.image_tokens, processor.pixels, processor.pad_id)
    return Scorer(policy, collate, 200)


def group_of(processor, name, images):
    """Two answers to a question with these images, the second one after a rewritten history."""
    parts = [{"type": "text", "text": "What is the area?"}]
    for image in images:
        kind = "video_url" if image.data[:8] == b"rlinf_vl" else "image_url"
        parts.insert(0, {"type": kind, kind: {"url": image.url}})
    ids, grids = Renderer(processor).prompt(({"role": "user", "content": parts},), images[::-1])
    shown = tuple(zip(images[::-1], map(tuple, grids.tolist()), strict=True))
    trajectories = []
    for lengths in ((5,), (3, 4)):
        sequences, turns = [], []
        for number, length in enumerate(lengths):
            answer = RNG.integers(60, 90, length).astype(np.int32)
            all_ids = np.concatenate([ids, answer])
            mask = np.arange(len(all_ids)) >= len(ids)
            logprobs = np.where(mask, -1.5, 0).astype(np.float32)
            versions = np.where(mask, 3, -1).astype(np.int32)
            sequences.append(TokenSequence(all_ids, mask, logprobs, versions, shown))
            turns.append(Turn(number, len(ids), len(all_ids), "stop", 0.0))
        trajectories.append(Trajectory(tuple(sequences), tuple(turns), 1.0, {}, "stop"))
    return Group(name, "p", len(ids), tuple(trajectories))


@pytest.fixture
def run(tmp_path, toy_folder, processor):
    store = TrajectoryStore(
        tmp_path, str(toy_folder), processor.image_tokens.id, 10**9, processor.image_tokens.video_id
    )
    groups = [
        group_of(processor, "val-3-0", [picture(RNG), picture(RNG, 64, 32)]),
        group_of(processor, "val-3-1", [clip(RNG, 4), picture(RNG)]),
    ]
    for group in groups:
        store.add(3, "val", group)
    store.write(3)
    return tmp_path, [(group, t) for group in groups for t in group.trajectories]


@pytest.mark.slow
def test_sequences_are_read_back_as_they_were(run, processor):
    folder, written = run
    assert recorded_steps(folder) == [3]
    found = read_recorded(folder, 3, "val", processor.grid)
    assert len(found) == len(written) and not read_recorded(folder, 3, "train", processor.grid)
    for item, (group, trajectory) in zip(found, written, strict=True):
        assert item.key[:2] == ("val", group.id) and item.version == 3
        for sequence, before in zip(item.trajectory.sequences, trajectory.sequences, strict=True):
            np.testing.assert_array_equal(sequence.ids, before.ids)
            np.testing.assert_array_equal(sequence.loss_mask, before.loss_mask)
            assert [grid for _, grid in sequence.images] == [grid for _, grid in before.images]
            for (image, _), (original, _) in zip(sequence.images, before.images, strict=True):
                np.testing.assert_array_equal(processor.pixels(image), processor.pixels(original))


def test_scores_are_those_of_the_sequences_whatever_the_batch(run, scorer, processor):
    folder, written = run
    found = read_recorded(folder, 3, "val", processor.grid)
    scores = scorer.logprobs([item.trajectory for item in found])
    for score, (_, trajectory) in zip(scores, written, strict=True):
        (alone,) = scorer.logprobs([trajectory])
        assert len(score) == trajectory.n_response_tokens
        np.testing.assert_allclose(score, alone, atol=1e-5)
    images = {image.hash: blank_view(image) for image in found[0].images}
    (blank,) = scorer.logprobs([with_images(found[0].trajectory, images)])
    assert np.abs(blank - scores[0]).max() > 1e-4, "the images are looked at"


@pytest.mark.slow
def test_a_heat_map_spends_its_forwards_and_has_the_pictures_shape(run, scorer, processor):
    item = read_recorded(run[0], 3, "val", processor.grid)[0]
    for image in item.images:
        _, rows, columns = processor.grid(image)
        found = scorer.heat_map(item.trajectory, image, (rows, columns), 40)
        assert found.values.shape == (rows, columns) and found.forwards <= 40
        assert np.abs(found.values).max() > 0
        # Hidden cells of a uniform picture have its colour: a blind run's maps are empty.
        blank = blank_view(image)
        blind = with_images(item.trajectory, {image.hash: blank})
        made = scorer.heat_map(blind, blank, (rows, columns), 20)
        assert np.abs(made.values).max() < 1e-5


def test_files_without_the_prompts_ids_are_told(run, processor):
    file = run[0] / "trajectories/step_3.parquet"
    pq.write_table(pq.read_table(file).drop_columns(["prompt_ids"]), file)
    with pytest.raises(ConfigError, match="did not keep the prompts' token ids"):
        read_recorded(run[0], 3, "val", processor.grid)
