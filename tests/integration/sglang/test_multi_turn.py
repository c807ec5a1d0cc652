"""Conversations with pictures on SGLang: every turn sends all ids and images again, and computes what is new."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accounting import (
    DROPS,
    END,
    assert_accounted,
    assert_explained,
    assert_scored_alike,
    conversations,
)
from agent_groups import (
    MEMBERS,
    Recorder,
    agent_player,
    assert_trained_as_sampled,
    assert_trained_once,
    assert_varied,
    play,
    play_drawn,
    play_wild,
)
from episodes import Maker, Talk, make_player
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from summaries import values
from thinking import OPENS, assert_pieces, thinking

from rlinf_vl.models.families import family_of
from rlinf_vl.models.loading import load_model
from rlinf_vl.rollout.episode.observation import Observation
from rlinf_vl.types import GroupSummary, Request, SamplingParams

pytestmark = pytest.mark.integration
TOLERANCE = 1e-4
#: Tokens of the engine's context: most tokens of an agent's trajectory, as in a run.
CONTEXT = 512


class Episodes:
    """Episodes side by side, one sample each; `asked` are the requests of every turn, `samples` their answers."""

    def __init__(self, toy, engine, requests):
        self.toy, self.engine = toy, engine
        self.asked, self.samples = [], []
        self.ask(requests)

    def ask(self, requests):
        self.asked.append(requests)
        self.samples.append([done.samples[0] for done in self.engine.generate(requests)])

    def go_on(self, images):
        """The next turn. `images`: of the observation of each episode."""
        self.ask(
            [
                self.next(r, s, shown)
                for r, s, shown in zip(self.asked[-1], self.samples[-1], images, strict=True)
            ]
        )

    def next(self, request, sample, images):
        parts = [{"type": "image_url", "image_url": {"url": image.url}} for image in images]
        observed = {"role": "user", "content": [*parts, {"type": "text", "text": "What now?"}]}
        history = np.concatenate([request.ids, sample.ids])
        # Stands for all that was said before.
        asked = Observation(({"role": "user", "content": "?"},), ())
        ids, grids = self.toy.renderer.follow(
            history, asked, [(sample.ids, Observation((observed,), tuple(images)))]
        )
        grids = np.concatenate([request.image_grids, grids])
        return Request(ids, request.images + tuple(images), grids, request.sampling, request.seeds)

    def new_tokens(self):
        """Prompt tokens of each turn that were in no turn before."""
        first, *later = self.asked
        prompts = [
            len(r.ids) + len(s.ids)
            for turn, done in zip(self.asked, self.samples, strict=True)
            for r, s in zip(turn, done, strict=True)
        ]
        return sum(len(r.ids) for turn in self.asked for r in turn) - sum(
            prompts[: len(first) * len(later)]
        )

    def assert_exact(self, model=None, turns=slice(None)):
        for requests, samples in zip(self.asked[turns], self.samples[turns], strict=True):
            for request, sample in zip(requests, samples, strict=True):
                expected = self.toy.of_tokens(request, sample, model=model)
                np.testing.assert_allclose(sample.logprobs, expected, atol=TOLERANCE)


def prefilled(engine):
    """The count once the scheduler has told it: idle, it does so between two answers."""
    assert engine.alive() and engine.alive()
    return engine.prefilled_tokens


def images_of(toy, seed, n):
    rng = np.random.default_rng([9, seed])
    return tuple(toy.image(rng, (48 + 16 * (i % 2), 48)) for i in range(n))


@pytest.mark.parametrize("again", [False, True])
def test_turns_are_exact_and_only_what_is_new_is_computed(engine, toy, again):
    """Sixteen episodes, of which each turn shows no image, one or two; `again`: the second one is the first, shown again."""
    before = prefilled(engine)
    episodes = Episodes(
        toy, engine, [toy.request(k % 3, seed=100 + k + 50 * again) for k in range(16)]
    )
    for turn in range(2):
        shown = [images_of(toy, (k, turn), (k + turn) % 3) for k in range(16)]
        episodes.go_on(
            [episodes.asked[0][k].images[:2] if again else images for k, images in enumerate(shown)]
        )
    episodes.assert_exact()
    new = episodes.new_tokens()
    assert 0.9 * new <= prefilled(engine) - before <= 1.1 * new, (
        "less: prompts without images are alike"
    )


def test_an_update_in_mid_episode_is_followed_from_the_next_turn_on(engine, toy):
    """All of the prompt is computed again, images by the new tower."""
    episodes = Episodes(toy, engine, [toy.request(1 + k % 2, seed=200 + k) for k in range(6)])
    changed = toy.perturbed("visual")[1] | toy.perturbed("language_model")[1]
    engine.load_weights([changed], version=5)
    before = prefilled(engine)
    episodes.go_on([images_of(toy, (k, 7), 1) for k in range(6)])
    whole = sum(len(request.ids) for request in episodes.asked[1])
    assert 0.9 * whole <= prefilled(engine) - before <= whole, (
        "the first ids of all prompts are the same"
    )
    versions = [
        {int(v) for sample in samples for v in sample.versions} for samples in episodes.samples
    ]
    assert versions == [{0}, {5}]
    episodes.assert_exact(turns=slice(1))
    episodes.assert_exact(toy.with_weights(changed), slice(1, None))


def test_a_tower_that_stays_encodes_an_image_once_and_one_that_changes_again(
    engine, toy, monkeypatch
):
    """The pixels are swapped for blank ones: who encodes the image again is blind."""
    requests = [toy.request(2, seed=300 + k) for k in range(4)]
    engine.generate(requests)

    def logprobs_are_those_of(model):
        def off(request, sample):
            return float(
                np.abs(sample.logprobs - toy.of_tokens(request, sample, model=model)).max()
            )

        done = engine.generate(requests)
        return (
            max(off(r, completion.samples[0]) for r, completion in zip(requests, done, strict=True))
            < TOLERANCE
        )

    language, tower = toy.perturbed("language_model")[1], toy.perturbed("visual")[1]
    monkeypatch.setattr(
        engine.requests.pixels, "_pixels", lambda image: np.zeros_like(toy.pixels(image))
    )
    engine.requests.pixels.close()
    engine.load_weights([language], version=1)
    assert logprobs_are_those_of(toy.with_weights(language)), "its pixels were read again"
    engine.load_weights([tower], version=2)
    assert not logprobs_are_those_of(toy.with_weights(language | tower))
    monkeypatch.undo()
    engine.requests.pixels.close()
    engine.load_weights([{name: tower[name]} for name in tower], version=3)
    assert logprobs_are_those_of(toy.with_weights(language | tower))


@pytest.fixture
def conversing(engine, toy):
    """What `accounting` wants of a toy, on this engine."""
    model = load_model(toy.path, family_of("qwen3_vl"), torch.float32)
    return SimpleNamespace(
        engine=engine, model=model, processor=toy.processor, banned=toy.banned, pixels=toy.pixels
    )


@pytest.mark.parametrize(("seed", "longest"), [(20, 2), (47, 6), (301, 20)])
def test_conversations_are_trained_as_they_were_sampled(conversing, seed, longest):
    groups, asked = conversations(conversing, seed, turns=6, images=3, longest=longest)
    assert max(len(t.turns) for group in groups for t in group.trajectories) > 3
    assert_accounted(conversing, groups, asked)
    assert_scored_alike(conversing, groups, TOLERANCE)


def test_an_agent_plays_as_the_environment_does(conversing):
    """What the endpoint asks of SGLang is what the player asks: only the answers' own digits may differ."""
    sampling = SamplingParams(
        max_new_tokens=8, temperature=1.5, stop_ids=conversing.processor.stop_ids
    )
    seeds = [[1, 2, 3, 4], [5, 6]]
    limits = {"seq_length": 2048, "max_prompt_length": 1024}
    maker = Maker(lambda seed: Talk(seed))
    native = make_player(conversing.engine, conversing.processor, maker, **limits)
    expected = play(native, seeds, sampling)
    groups = play(agent_player(conversing, "talk"), seeds, sampling)
    pairs = [
        pair
        for ours, theirs in zip(groups, expected, strict=True)
        for pair in zip(ours.trajectories, theirs.trajectories, strict=True)
    ]
    for ours, theirs in pairs:
        assert ours.error is None and theirs.error is None
        assert ours.turn_rewards == theirs.turn_rewards
        (sequence,), (other,) = ours.sequences, theirs.sequences
        # Sampling depends on who shares a batch, and an answer that was cut is closed by the prompt.
        asked, asked_natively = (
            [i for i in s.ids[~s.loss_mask].tolist() if i not in sampling.stop_ids]
            for s in (sequence, other)
        )
        assert asked == asked_natively
        assert [i.hash for i, _ in sequence.images] == [i.hash for i, _ in other.images]
    assert max(len(ours.turns) for ours, _ in pairs) > 2
    assert sum(len(ours.sequences[0].images) for ours, _ in pairs) > 6
    assert_scored_alike(conversing, groups, TOLERANCE)


def test_every_order_of_calls_is_trained_as_it_was_sampled(conversing):
    """Branches, edits, compaction, parallel calls, retries, tools, and streams that are cut in the middle.

    Some 600 tokens; the trainer's logprobs and SGLang's differ by 1.4e-6 at most.
    """
    seeds = random.Random(0).sample(range(10**6), 40)
    by_group = [seeds[i : i + 4] for i in range(0, 40, 4)]
    groups, engine = play_wild(conversing, by_group, timeout_s=300.0, seq_length=CONTEXT)
    assert_trained_as_sampled(conversing, groups, engine, TOLERANCE)
    assert_varied(groups)


class Updating(Recorder):
    """An engine that is sent other weights, as the next version, whenever it has been asked `every` more times."""

    def __init__(self, engine, weights, every):
        super().__init__(engine)
        self.weights, self.every, self.requests = weights, every, 0
        self.updates = ThreadPoolExecutor(1)
        self.updated = []

    def submit(self, requests):
        futures = super().submit(requests)
        before, self.requests = self.requests, self.requests + len(requests)
        if before // self.every < self.requests // self.every:
            version = len(self.updated) + 1
            sent = self.weights[version % len(self.weights)]
            self.updated.append(self.updates.submit(self.engine.load_weights, [sent], version))
        return futures


def play_while_weights_come(conversing, toy):
    """Play forty wild agents; the groups, the engine, and transformers' models of its versions."""
    changed = toy.perturbed("language_model", 0.1)[1] | toy.perturbed("visual", 0.1)[1]
    weights = [{name: toy.weights()[name] for name in changed}, changed]
    models = [toy.model, toy.with_weights(changed)]
    engine = Updating(conversing.engine, weights, every=12)
    seeds = random.Random(1).sample(range(10**6), 40)
    by_group = [seeds[i : i + 4] for i in range(0, 40, 4)]
    with engine.updates:
        groups, _ = play_wild(
            conversing, by_group, engine=engine, timeout_s=300.0, seq_length=CONTEXT
        )
    for update in engine.updated:
        update.result()
    assert len(engine.updated) > 5
    versions = range(len(engine.updated) + 1)
    return groups, engine, {version: models[version % 2] for version in versions}


def test_agents_calls_are_trained_as_they_were_sampled_while_weights_come(conversing, toy):
    """Within answers and between them; each token by the version that it says sampled it.

    Some 11 updates reach 70 answers in their middle; the largest difference is 1e-6.
    """
    groups, engine, models = play_while_weights_come(conversing, toy)
    assert_trained_once(groups, engine)
    assert assert_explained(conversing, models, groups, TOLERANCE) > 0


def test_agents_calls_are_trained_once_while_weights_come_and_keys_are_kept(
    conversing, toy, monkeypatch
):
    """Their logprobs are those of decoding, which `test_weights_in_flight` compares; no call's session stays open."""
    requests = conversing.engine.requests
    for part in (conversing.engine, requests):
        monkeypatch.setattr(part, "settings", replace(part.settings, keep_kv=True))
    groups, engine, _ = play_while_weights_come(conversing, toy)
    assert_trained_once(groups, engine)
    mixed = 0
    for trajectory in (t for group in groups for t in group.trajectories):
        for turn in trajectory.turns:
            versions = trajectory.sequences[turn.sequence].versions[turn.start : turn.end]
            assert (np.diff(versions) >= 0).all() and versions[0] >= 0
            mixed += versions[0] != versions[-1]
    assert mixed
    assert not requests.session_updates and not requests.in_flight


# Not shrunk: SGLang draws other tokens when the same agents play again.
@settings(
    max_examples=5,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(MEMBERS, st.integers(0, 10_000), st.sampled_from([120, 250, CONTEXT]))
def test_a_group_of_any_agents_is_trained_as_it_was_sampled(
    conversing, members, first_seed, seq_length
):
    groups, engine = play_drawn(
        conversing, members, first_seed, timeout_s=300.0, seq_length=seq_length
    )
    assert_trained_as_sampled(conversing, groups, engine, TOLERANCE)
    summary = GroupSummary.of(groups[0], conversing.processor.image_token_id)
    assert max(values(summary, "tokens")) <= seq_length


def test_dropped_thoughts_make_sequences_that_are_trained_as_they_were_sampled(
    conversing, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(conversing.processor.tokenizer, "chat_template", DROPS)
        patch.setattr("rlinf_vl.rollout.episode.renderer.END_THINK", END)
        groups, asked = conversations(conversing, 20, turns=6, images=2, longest=12)
    assert len({len(t.sequences) for group in groups for t in group.trajectories}) > 2
    assert_accounted(conversing, groups, asked)
    assert_scored_alike(conversing, groups, TOLERANCE)


def test_thoughts_are_closed_at_their_budget(conversing, monkeypatch):
    """In pieces whose prompts SGLang has computed already."""
    with monkeypatch.context() as patch:
        patch.setattr(conversing.processor.tokenizer, "chat_template", OPENS)
        before = prefilled(conversing.engine)
        groups, asked, replies = thinking(conversing, 5, 2, longest=40)
        assert_pieces(conversing, groups, asked, 5, 40)
    assert any(replies) and any(
        closed for g in groups for t in g.trajectories for _, _, closed in t.turn_thoughts
    )
    assert_scored_alike(conversing, groups, TOLERANCE)
    shown = sum(len(request.ids) for request, _ in asked)
    assert prefilled(conversing.engine) - before < shown / 2
