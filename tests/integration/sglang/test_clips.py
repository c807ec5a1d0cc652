"""Videos on the real SGLang engine, in float32: what it samples has the logprobs of transformers' own forward."""

import numpy as np
import pytest
import torch
from clips import SIZES, clip, picture, transformers_logprobs, user
from sglang_toy import Toy, engine_of, write_member

from rlinf_vl.models.families import family_of
from rlinf_vl.rollout.episode.observation import Observation
from rlinf_vl.rollout.episode.rollout_state import RolloutState
from rlinf_vl.types import Problem, Request, SamplingParams

pytestmark = pytest.mark.integration
TOLERANCE = 2e-5


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl", "qwen3_vl_moe"])
def member(request, tmp_path_factory):
    family = family_of(request.param)
    sizes = SIZES[request.param]
    made = Toy(
        tmp_path_factory.mktemp(request.param),
        family,
        lambda path: write_member(request.param, sizes, path),
    )
    engine = engine_of(made, context_length=2048)
    yield made, engine
    engine.close()


def furthest(made, state):
    """The largest difference of an episode's logprobs from transformers'."""
    worst = 0.0
    for sequence in state.sequences:
        with torch.no_grad():
            expected = transformers_logprobs(made.processor, made.model, sequence, made.banned)
        sampled = torch.from_numpy(sequence.logprobs[sequence.loss_mask])
        worst = max(worst, float((sampled - expected).abs().max()))
    return worst


def test_episodes_with_videos_are_as_transformers_computes_them(member):
    """Videos of 2 to 32 frames beside pictures, over three turns, all episodes in one batch."""
    made, engine = member
    rng = np.random.default_rng(0)
    sampling = SamplingParams(max_new_tokens=8, stop_ids=made.processor.stop_ids)
    starts = []
    for frames, interval in ((2, 0.5), (5, 2.0), (16, 1.0), (32, 0.25)):
        images = (clip(rng, frames, 20, 24, interval), picture(rng))
        starts.append(Observation((user("See", *images, "?"),), images))
    text = Observation((user("no video"),), ())
    starts.append(text)
    states = [RolloutState(Problem(str(i), (), ""), 0) for i in range(len(starts))]
    answers = [[] for _ in starts]
    for turn in range(3):
        requests = []
        for start, state, said in zip(starts, states, answers, strict=True):
            ids, grids = made.renderer.prompt(start.messages, start.images)
            images = start.images
            if turn:
                sequence, images = state.sequences[-1], (picture(rng), clip(rng, 2 + turn))
                later = Observation((user(*images, "so?"),), images)
                said.append((sequence.ids[state.turns[-1].start :], later))
                ids, grids = made.renderer.follow(sequence.ids, start, said)
                images = tuple(image for image, _ in sequence.images) + images
            requests.append(Request(ids, images, grids, sampling, (turn,)))
        for state, request, done in zip(states, requests, engine.generate(requests), strict=True):
            state.add_sample(request, done.samples[0], made.processor)
    assert all(len(state.turns) == 3 for state in states)
    assert max(furthest(made, state) for state in states) < TOLERANCE


def test_samples_of_a_group_share_a_video(member):
    """Again from the prefix cache; and another order of its frames is another video."""
    made, engine = member
    from rlinf_vl.data.clips import clip_of, clip_ref

    first = clip(np.random.default_rng(1), 6)
    frames, times = clip_of(first).frames, clip_of(first).timestamps
    sampling = SamplingParams(max_new_tokens=6, stop_ids=made.processor.stop_ids)
    for image in (first, first, clip_ref(frames[::-1], times)):
        ids, grids = made.renderer.prompt([user(image, "Which way?")], (image,))
        request = Request(ids, (image,), grids, sampling, (0, 1, 2))
        (done,) = engine.generate([request])
        for sample in done.samples:
            state = RolloutState(Problem("a", (), ""), 0)
            state.add_sample(request, sample, made.processor)
            assert furthest(made, state) < TOLERANCE
