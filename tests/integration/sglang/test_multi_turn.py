"""Conversations with pictures on SGLang: every turn sends all ids and images again, and computes what is new."""

import asyncio

import numpy as np
import pytest
import torch

from rlinf_vl.envs import StepResult
from rlinf_vl.models.families import family_of
from rlinf_vl.rollout.observation import Observation
from rlinf_vl.rollout.player import Player
from rlinf_vl.types import Problem, Request, SamplingParams

pytestmark = pytest.mark.integration
TOLERANCE = 1e-4


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
        self.ask([self.next(r, s, shown) for r, s, shown in zip(self.asked[-1], self.samples[-1], images, strict=True)])

    def next(self, request, sample, images):
        parts = [{"type": "image_url", "image_url": {"url": image.url}} for image in images]
        observed = {"role": "user", "content": [*parts, {"type": "text", "text": "What now?"}]}
        said = np.concatenate([request.ids, sample.ids])
        asked = Observation(({"role": "user", "content": "?"},), ())  # stands for all that was said before
        ids, grids = self.toy.renderer.follow(said, asked, [(sample.ids, Observation((observed,), tuple(images)))])
        grids = np.concatenate([request.image_grids, grids])
        return Request(ids, request.images + tuple(images), grids, request.sampling, request.seeds)

    def new_tokens(self):
        """Prompt tokens of each turn that were in no turn before."""
        first, *later = self.asked
        said = [
            len(r.ids) + len(s.ids)
            for turn, done in zip(self.asked, self.samples, strict=True)
            for r, s in zip(turn, done, strict=True)
        ]
        return sum(len(r.ids) for turn in self.asked for r in turn) - sum(said[: len(first) * len(later)])

    def assert_exact(self, model=None, turns=slice(None)):
        for requests, samples in zip(self.asked[turns], self.samples[turns], strict=True):
            for request, sample in zip(requests, samples, strict=True):
                expected = self.toy.of_tokens(request, sample, model=model)
                np.testing.assert_allclose(sample.logprobs, expected, atol=TOLERANCE)


def images_of(toy, seed, n):
    rng = np.random.default_rng([9, seed])
    return tuple(toy.image(rng, (48 + 16 * (i % 2), 48)) for i in range(n))


@pytest.mark.parametrize("again", [False, True])
def test_turns_are_exact_and_only_what_is_new_is_computed(engine, toy, again):
    """Sixteen episodes, of which each turn shows no image, one or two; `again`: the second one is the first, shown again."""
    before = engine.prefilled_tokens
    episodes = Episodes(toy, engine, [toy.request(k % 3, seed=100 + k + 50 * again) for k in range(16)])
    for turn in range(2):
        shown = [images_of(toy, (k, turn), (k + turn) % 3) for k in range(16)]
        episodes.go_on([episodes.asked[0][k].images[:2] if again else images for k, images in enumerate(shown)])
    episodes.assert_exact()
    new = episodes.new_tokens()
    assert 0.9 * new <= engine.prefilled_tokens - before <= 1.1 * new, "less: prompts without images are alike"


def test_an_update_in_mid_episode_is_followed_from_the_next_turn_on(engine, toy):
    """All of the prompt is computed again, images by the new tower."""
    episodes = Episodes(toy, engine, [toy.request(1 + k % 2, seed=200 + k) for k in range(6)])
    changed = toy.perturbed("visual")[1] | toy.perturbed("language_model")[1]
    engine.load_weights([changed], version=5)
    before = engine.prefilled_tokens
    episodes.go_on([images_of(toy, (k, 7), 1) for k in range(6)])
    whole = sum(len(request.ids) for request in episodes.asked[1])
    assert 0.9 * whole <= engine.prefilled_tokens - before <= whole, "the first ids of all prompts are the same"
    versions = [{int(v) for sample in samples for v in sample.versions} for samples in episodes.samples]
    assert versions == [{0}, {5}]
    episodes.assert_exact(turns=slice(1))
    episodes.assert_exact(toy.with_weights(changed), slice(1, None))


def test_a_tower_that_stays_encodes_an_image_once_and_one_that_changes_again(engine, toy, monkeypatch):
    """The pixels are swapped for blank ones: who encodes the image again is blind."""
    requests = [toy.request(2, seed=300 + k) for k in range(4)]
    engine.generate(requests)

    def logprobs_are_those_of(model):
        def off(request, sample):
            return float(np.abs(sample.logprobs - toy.of_tokens(request, sample, model=model)).max())

        done = engine.generate(requests)
        return max(off(r, completion.samples[0]) for r, completion in zip(requests, done, strict=True)) < TOLERANCE

    language, tower = toy.perturbed("language_model")[1], toy.perturbed("visual")[1]
    monkeypatch.setattr(engine.pixels, "_pixels", lambda image: np.zeros_like(toy.pixels(image)))
    engine.pixels.close()
    engine.load_weights([language], version=1)
    assert logprobs_are_those_of(toy.with_weights(language)), "its pixels were read again"
    engine.load_weights([tower], version=2)
    assert not logprobs_are_those_of(toy.with_weights(language | tower))
    monkeypatch.undo()
    engine.pixels.close()
    engine.load_weights([{name: tower[name]} for name in tower], version=3)
    assert logprobs_are_those_of(toy.with_weights(language | tower))


class Talk:
    """An environment that talks for one to six turns, and shows up to three pictures in each, of the same and other sizes; the
    group has its beginning in common."""

    def __init__(self, seed, group_seed):
        self.common, self.own = np.random.default_rng(group_seed), np.random.default_rng([group_seed, seed])
        self.turns = int(self.own.integers(1, 7))

    def say(self, rng):
        pictures = [
            {"type": "image", "image": rng.integers(0, 256, (48, 48 + 32 * rng.integers(2), 3), dtype=np.uint8)}
            for _ in range(rng.integers(4))
        ]
        texts = ["What now?", "<tool_response> error: no such tool </tool_response>", "and <|image_pad|> again"]
        said = [*pictures, {"type": "text", "text": texts[rng.integers(3)]}]
        return [{"role": "user", "content": [said[i] for i in rng.permutation(len(said))]}]

    def start(self, problem):
        return self.say(self.common)

    def step(self, response):
        self.turns -= 1
        return StepResult(self.say(self.own) if self.turns else (), 0.0, not self.turns)

    def close(self):
        pass


class Talks:
    """As an `EnvMaker`."""

    def __call__(self, problem, seed, group_seed):
        return Talk(seed, group_seed)

    def name_of(self, problem):
        return "talk"


@pytest.fixture
def heard(engine, monkeypatch):
    """Every request, and the future of its completion."""
    pairs, submit = [], engine.submit

    def submitting(requests):
        futures = submit(requests)
        pairs.extend(zip(requests, futures, strict=True))
        return futures

    monkeypatch.setattr(engine, "submit", submitting)
    return pairs


def test_every_trained_token_was_sampled_as_recorded_and_the_trainer_scores_it_alike(engine, toy, heard):
    """Random conversations, answers cut and ended, through the real player; the trainer's rows alone, packed and shared."""
    from rlinf_vl.models.loading import load_model
    from rlinf_vl.models.policy import PolicyModel
    from rlinf_vl.packing.collator import Collator, Member

    player = Player(
        engine,
        toy.renderer,
        toy.processor,
        Talks(),
        seq_length=400,
        max_prompt_length=300,
        reward_min=0.0,
        return_logprobs=True,
        alive_timeout_s=60.0,
    )

    async def play():
        plays = []
        for seed in range(6):
            sampling = SamplingParams(
                max_new_tokens=2 + 4 * (seed % 3), stop_ids=(*toy.processor.stop_ids, *range(5, 15))
            )
            opening = await player.open(Problem(str(seed), (), ""), range(3), sampling, group_seed=seed)
            player.submit([opening])
            plays.append(player.play(str(seed), opening))
        return await asyncio.gather(*plays)

    groups = asyncio.run(play())
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    assert {t.error for t in trajectories} == {None}
    assert {turn.finish_reason for t in trajectories for turn in t.turns} == {"stop", "length"}
    assert max(len(t.turns) for t in trajectories) >= 5 and any(len(t.sequences[0].images) >= 8 for t in trajectories)

    sampled = {
        (request.ids.tobytes(), sample.ids.tobytes(), sample.logprobs.tobytes())
        for request, future in heard
        for sample in future.result().samples
    }
    for trajectory in trajectories:
        ours = [np.zeros_like(sequence.loss_mask) for sequence in trajectory.sequences]
        for turn in trajectory.turns:
            sequence = trajectory.sequences[turn.sequence]
            ours[turn.sequence][turn.start : turn.end] = True
            parts = (
                sequence.ids[: turn.start],
                sequence.ids[turn.start : turn.end],
                sequence.logprobs[turn.start : turn.end],
            )
            assert tuple(part.tobytes() for part in parts) in sampled
        for mask, sequence in zip(ours, trajectory.sequences, strict=True):
            assert np.array_equal(mask, sequence.loss_mask) and (sequence.versions[mask] == 0).all()

    policy = PolicyModel(
        load_model(toy.path, family_of("qwen3_vl"), torch.float32),
        family_of("qwen3_vl"),
        toy.banned,
        temperature=1.0,
        chunk=None,
    )
    members = [[Member(group, i, [0.0] * len(t.turns)) for i, t in enumerate(group.trajectories)] for group in groups]
    flat = [member for own in members for member in own]
    for rows, share in (([[member] for member in flat], False), ([flat], False), (members, True), ([flat], True)):
        collate = Collator(
            family_of("qwen3_vl"),
            toy.processor.image_token_id,
            toy.processor.merge_size,
            toy.pixels,
            toy.processor.pad_id,
            share_prompts=share,
        )
        for row in rows:
            batch = collate(row, run_vision=True)
            assert len(batch.targets) == sum(m.trajectory.n_response_tokens for m in row)
            with torch.no_grad():
                logprobs, _ = policy(batch)
            torch.testing.assert_close(logprobs, torch.from_numpy(batch.rollout_logprobs), atol=TOLERANCE, rtol=0)
