"""Conversations with videos beside pictures: trainer and torch engine against transformers' own forward."""

from functools import cache

import numpy as np
import pytest
import torch
from clips import SIZES, clip, picture, transformers_logprobs, user
from sglang_toy import write_member

from rlinf_vl.engines.torch.engine import TorchEngine
from rlinf_vl.models.families import family_of
from rlinf_vl.models.loading import freeze, use_packed_attention
from rlinf_vl.models.policy import PolicyModel
from rlinf_vl.models.processing import Processor
from rlinf_vl.models.vision_cache import VisionCache
from rlinf_vl.packing.collator import Collator, Member
from rlinf_vl.rollout.episode.observation import Observation
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.rollout.episode.rollout_state import RolloutState
from rlinf_vl.types import (
    Group,
    GroupSummary,
    Problem,
    Request,
    Sample,
    SamplingParams,
    shared_prefix,
)

FAMILIES = list(SIZES)
TOLERANCE = 2e-5
#: Gated delta nets are further from a float64 run than other layers, in transformers' rule as well.
LIMITS = {"qwen3_5": 1e-4, "qwen3_5_moe": 1e-4}


class Talks:
    """A tiny member of a family with a tokenizer, and random conversations for it."""

    def __init__(self, family, folder):
        write_member(family, SIZES[family], folder)
        self.family, self.folder = family_of(family), folder
        self.processor = Processor(folder, self.family)
        self.renderer = Renderer(self.processor)
        self.vocabulary = len(self.processor.tokenizer)

    def model(self):
        model = self.family.model_class.from_pretrained(self.folder, dtype=torch.float32)
        for name, weight in model.named_parameters():
            if "visual" in name and weight.ndim > 1:
                weight.data *= 2  # so that frames matter
        return model.eval()

    @property
    def banned(self):
        width = self.family.model_class.from_pretrained(self.folder).config.get_text_config()
        return self.processor.banned_ids(width.vocab_size)

    def policy(self):
        model = use_packed_attention(self.model(), self.family)
        return PolicyModel(model, self.family, self.banned, temperature=1.0, chunk=None)

    def collator(self, **settings):
        settings = {"pixels": self.processor.pixels} | settings
        return Collator(
            self.family, self.processor.image_tokens, pad_id=self.processor.pad_id, **settings
        )

    def request(self, *parts, n=1):
        observation = self.observed(*parts)
        ids, grids = self.renderer.prompt(observation.messages, observation.images)
        return Request(ids, observation.images, grids, SamplingParams(), tuple(range(n)))

    @staticmethod
    def observed(*parts):
        images = tuple(part for part in parts if not isinstance(part, str))
        return Observation((user(*parts),), images)

    def answer(self, rng, n):
        # Not an id that ends a turn: the next prompt writes it.
        ids = rng.integers(5, 60, n).astype(np.int32)
        return Sample(ids, np.full(n, -3, np.float32), np.zeros(n, np.int32), "stop")

    def played(self, name, rng, start, turns, rewritten=False):
        """A group of two episodes, each an answer to `start` and to each observation of `turns`.

        Args:
            rewritten: the second turn leaves the half of the first answer away, as a template that drops thoughts does.
        """
        trajectories = []
        first = self.observed(*start)
        for _ in range(2):
            state = RolloutState(Problem(name, (), ""), 0)
            request, answers = self.request(*start), []
            images = request.images
            state.add_sample(request, sample := self.answer(rng, 5), self.processor)
            for turn in turns:
                answers.append((sample.ids, self.observed(*turn)))
                history = state.sequences[state.turns[-1].sequence].ids
                ids, grids = self.renderer.follow(history, first, answers)
                if rewritten:
                    ids = np.concatenate([ids[: len(request.ids) + 2], ids[len(history) :]])
                images += answers[-1][1].images
                later = Request(ids, images, grids, SamplingParams(), (0,))
                state.add_sample(later, sample := self.answer(rng, 4), self.processor)
            trajectories.append(state.trajectory(True, 0.0))
        prefix = shared_prefix(trajectories, self.processor.placeholder_ids)
        return Group(name, name, prefix, tuple(trajectories))

    @cache  # noqa: B019
    def groups(self):
        """Videos of 2 to 32 frames beside pictures, in one turn and in several; one without any."""
        rng = np.random.default_rng(0)
        shown = clip(rng, 6, interval=1.5)
        return [
            self.played("long", rng, ["See", clip(rng, 32, 20, 24, 0.3), "?"], []),
            self.played("beside", rng, [picture(rng), "then", clip(rng, 3), "?"], []),
            self.played("text", rng, ["no video"], []),
            self.played("turns", rng, [shown, "and?"], [[clip(rng, 2), picture(rng)], [shown]]),
            self.played("tree", rng, [clip(rng, 5), "x"], [["so?", clip(rng, 4)]], rewritten=True),
        ]

    def members(self, groups=None):
        return [
            Member(g, i, [0.0] * len(t.turns))
            for g in groups or self.groups()
            for i, t in enumerate(g.trajectories)
        ]

    @cache  # noqa: B019
    def reference(self):
        """Logprobs of all sampled tokens by transformers, and gradients of a sum of them."""
        model = self.model()
        sequences = [s for m in self.members() for s in m.trajectory.sequences]
        logprobs = torch.cat(
            [transformers_logprobs(self.processor, model, s, self.banned) for s in sequences]
        )
        weighted(logprobs).backward()
        return logprobs.detach(), {n: p.grad for n, p in model.named_parameters()}


def weighted(logprobs):
    return (logprobs * torch.linspace(-1, 1, len(logprobs))).sum()


@pytest.fixture(scope="module", params=FAMILIES)
def talks(request, tmp_path_factory):
    return Talks(request.param, tmp_path_factory.mktemp(request.param))


def limit_of(talks):
    return LIMITS.get(talks.family.model_type, TOLERANCE)


def assert_as_transformers(talks, logprobs, model):
    expected, gradients = talks.reference()
    weighted(logprobs).backward()
    limit = limit_of(talks)
    assert float((logprobs.detach() - expected).abs().max()) < limit
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        gradient = gradients[name]
        assert (weight.grad is None) == (gradient is None), name
        if gradient is not None:
            scale = max(1.0, float(gradient.abs().max()))
            assert float((weight.grad - gradient).abs().max()) < limit * scale, name


@pytest.mark.parametrize("share_prompts", [False, True])
def test_packed_rows_are_as_transformers_computes_each_sequence(talks, share_prompts):
    """Logprobs and gradients of all weights, the tower's among them."""
    batch = talks.collator(share_prompts=share_prompts)(talks.members(), run_vision=True)
    assert (batch.grids[:, 0] > 1).sum() >= 5 and (batch.grids[:, 0] == 1).sum() >= 3
    policy = talks.policy().train()
    logprobs, _ = policy(batch)
    assert_as_transformers(talks, logprobs, policy.model)


def test_a_tree_of_turns_shares_what_is_equal(talks):
    """The row is shorter than its sequences, and than it is with prompts alone shared."""
    (tree,) = [g for g in talks.groups() if g.id == "tree"]
    assert all(len(t.sequences) == 2 for t in tree.trajectories)
    members = talks.members([tree])
    rows = [talks.collator(share_prompts=s)(members, run_vision=True) for s in (True, False)]
    total = sum(len(s.ids) for t in tree.trajectories for s in t.sequences)
    assert len(rows[0].ids) < len(rows[1].ids) < total
    summary = GroupSummary.of(tree, talks.processor.placeholder_ids)
    assert summary.patches == rows[0].grids.prod(axis=1).sum() and summary.images == 2


def test_cached_features_are_those_of_the_tower(talks):
    policy = talks.policy().train()
    freeze(policy.model, talks.family)
    images = {
        i.hash: (i, g) for m in talks.members() for s in m.trajectory.sequences for i, g in s.images
    }
    cache_of_features = VisionCache(2**30, "cpu")
    cache_of_features.pin(images)
    for names in (list(images)[::2], list(images)[1::2]):
        grids = np.array([images[name][1] for name in names])
        patches = np.concatenate([talks.processor.pixels(images[name][0]) for name in names])
        tokens = talks.processor.image_tokens(grids).tolist()
        cache_of_features.put(names, policy.encode(patches, grids), tokens)
    batch = talks.collator(pixels=None)(talks.members(), run_vision=False)
    logprobs, _ = policy(batch, cache_of_features.get(batch.images))
    assert_as_transformers(talks, logprobs, policy.model)


def test_frames_in_another_order_are_another_video(talks):
    """What the policy says of an answer depends on the order of frames, and on their times."""
    rng = np.random.default_rng(3)
    from rlinf_vl.data.clips import clip_of, clip_ref

    shown = clip(rng, 6)
    frames, times = clip_of(shown).frames, clip_of(shown).timestamps
    policy, answer = talks.policy(), talks.answer(rng, 5)
    said = []
    for image in (shown, clip_ref(frames[::-1], times), clip_ref(frames, [4 * t for t in times])):
        state = RolloutState(Problem("a", (), ""), 0)
        state.add_sample(talks.request(image, "Which way?"), answer, talks.processor)
        group = Group("a", "a", 0, (state.trajectory(True, 0.0),))
        with torch.no_grad():
            said.append(policy(talks.collator()(talks.members([group]), run_vision=True))[0])
    assert (said[0] - said[1]).abs().max() > 1e-3 < (said[0] - said[2]).abs().max()


@pytest.mark.parametrize("with_sessions", [False, True])
def test_the_torch_engine_samples_as_transformers_computes(talks, with_sessions):
    """Of videos of 2 to 32 frames, beside pictures, as groups, and over turns with cached prefixes."""
    rng, model = np.random.default_rng(4), talks.model()
    policy = talks.policy()
    engine = TorchEngine(
        policy.model,
        talks.family,
        banned=talks.banned,
        pixels=talks.processor.pixels,
        image_tokens=talks.processor.image_tokens,
        max_running=64,
    )
    starts = [
        (clip(rng, n, 20, 24, interval), *more)
        for n, interval, more in ((2, 0.5, ("?",)), (7, 2.0, (picture(rng), "and")), (32, 0.25, ()))
    ]
    sampling = SamplingParams(max_new_tokens=8, stop_ids=talks.processor.stop_ids)
    worst = 0.0
    try:
        states = [RolloutState(Problem(str(i), (), ""), 0) for i in range(len(starts))]
        answers = [[] for _ in starts]
        for turn in range(3):
            requests = []
            for i, (start, state) in enumerate(zip(starts, states, strict=True)):
                request = talks.request(*start)
                if turn:
                    later = talks.observed(picture(rng), clip(rng, 3 + turn, interval=1.0), "so?")
                    sampled = state.sequences[-1]
                    answers[i].append((sampled.ids[state.turns[-1].start :], later))
                    ids, grids = talks.renderer.follow(
                        sampled.ids, talks.observed(*start), answers[i]
                    )
                    images = tuple(image for image, _ in sampled.images) + later.images
                    request = Request(ids, images, grids, sampling, ())
                names = (f"session {i}",) if with_sessions else ()
                requests.append(
                    Request(
                        request.ids, request.images, request.image_grids, sampling, (turn,), names
                    )
                )
            for state, request, done in zip(
                states, requests, engine.generate(requests), strict=True
            ):
                state.add_sample(request, done.samples[0], talks.processor)
        prefilled = engine.prefilled_tokens
        for state in states:
            (sequence,) = state.sequences
            with torch.no_grad():
                expected = transformers_logprobs(talks.processor, model, sequence, talks.banned)
            sampled = torch.from_numpy(sequence.logprobs[sequence.loss_mask])
            worst = max(worst, float((sampled - expected).abs().max()))
    finally:
        engine.close()
    assert worst < limit_of(talks)
    total = sum(len(state.sequences[0].ids) for state in states)
    assert (prefilled < total) == with_sessions
