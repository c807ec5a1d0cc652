"""Random conversations through a player, and what must hold of them on any engine: all that is trained was sampled, once, as it is
recorded, and the trainer's model scores it alike.

`toy` has processor, model, banned, pixels and engine.
"""

from collections import Counter

import numpy as np
import torch
from episodes import Maker, Talk, make_player, play

from rlinf_vl.models.families import family_of
from rlinf_vl.models.policy import PolicyModel
from rlinf_vl.packing.collator import Collator, Member
from rlinf_vl.types import SamplingParams

#: What ends thoughts here: a letter that is in many a token of the toy.
END = "a"
#: Shows an answer without its thoughts, as templates of thinking models do.
DROPS = (
    "{%- for m in messages -%}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content.split('"
    + END
    + "')[-1] }}"
    "{% else %}{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
)


class Recorded:
    """An engine that keeps what it was asked, and what it answered."""

    def __init__(self, engine):
        self.engine, self.asked = engine, []

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def submit(self, requests):
        futures = self.engine.submit(requests)
        self.asked += zip(requests, futures, strict=True)
        return futures


class TalkOfGroup(Talk):
    """Members of a group of four begin alike."""

    def __init__(self, seed, turns, images):
        super().__init__(seed // 4, turns, images)
        self.own = seed

    def start(self, problem):
        messages = super().start(problem)
        self.random.seed(self.own)
        return messages


def conversations(toy, seed, turns, images, longest, seq_length=500):
    engine = Recorded(toy.engine)
    player = make_player(
        engine,
        toy.processor,
        Maker(lambda seed: TalkOfGroup(seed, turns, images)),
        seq_length=seq_length,
        max_prompt_length=300,
    )
    sampling = SamplingParams(
        temperature=1.5, max_new_tokens=longest, stop_ids=toy.processor.stop_ids
    )
    seeds = [range(4 * (seed + g), 4 * (seed + g) + 4) for g in range(3)]
    return play(player, seeds, sampling), engine.asked


def assert_accounted(toy, groups, asked):
    """Each sampled token carries loss once, with the logprob and version that it was sampled with, behind the prompt that it was
    sampled from, and nothing else does."""
    answers = {}
    for request, future in asked:
        for sample in future.result().samples:
            shown = tuple(image.hash for image in request.images)
            answers.setdefault((request.ids.tobytes(), shown, sample.ids.tobytes()), []).append(
                sample
            )
    trained = Counter()
    for trajectory in (t for group in groups for t in group.trajectories):
        assert trajectory.error is None
        masks = [np.zeros(len(sequence.ids), bool) for sequence in trajectory.sequences]
        for turn in trajectory.turns:
            sequence, at = trajectory.sequences[turn.sequence], slice(turn.start, turn.end)
            assert not masks[turn.sequence][at].any()
            masks[turn.sequence][at] = True
            before = sequence.ids[: turn.start]
            ends = np.cumsum(
                [toy.processor.image_tokens(np.array([grid])) for _, grid in sequence.images]
            )
            n = int((ends <= (before == toy.processor.image_token_id).sum()).sum())
            shown = tuple(image.hash for image, _ in sequence.images[:n])
            key = before.tobytes(), shown, sequence.ids[at].tobytes()
            sampled = [(s.logprobs.tolist(), s.versions.tolist()) for s in answers[key]]
            assert (sequence.logprobs[at].tolist(), sequence.versions[at].tolist()) in sampled
            trained[key] += 1
        for mask, sequence in zip(masks, trajectory.sequences, strict=True):
            assert np.array_equal(mask, sequence.loss_mask)
            assert (sequence.logprobs[~mask] == 0).all() and (sequence.versions[~mask] == -1).all()
            toy.processor.image_tokens.assert_placed(sequence)
    assert trained == Counter({key: len(samples) for key, samples in answers.items()}), (
        "all that was sampled, once"
    )


def assert_explained(toy, models, groups, tolerance=5e-5):
    """Each token has the logprob that transformers' own forward of its sequence gives by `models[version]`; how many answers have
    tokens of several versions."""
    mixed = 0
    for sequence in (s for group in groups for s in group.sequences):
        ids = torch.from_numpy(sequence.ids.astype(np.int64))[None]
        inputs = {}
        if sequence.images:
            inputs = {
                "pixel_values": torch.from_numpy(
                    np.concatenate([toy.pixels(image) for image, _ in sequence.images])
                ),
                "image_grid_thw": torch.tensor([grid for _, grid in sequence.images]),
                "mm_token_type_ids": (ids == toy.processor.image_token_id).int(),
            }
        where = np.flatnonzero(sequence.loss_mask)
        for version in np.unique(sequence.versions[where]):
            models[version].model.rope_deltas = None
            with torch.no_grad():
                logits = (
                    models[version](
                        input_ids=ids, attention_mask=torch.ones_like(ids), **inputs
                    ).logits[0]
                    / 1.5
                )
            logits[:, torch.from_numpy(toy.banned)] = -torch.inf
            own = where[sequence.versions[where] == version]
            expected = logits.log_softmax(-1)[own - 1, ids[0, own]].numpy()
            np.testing.assert_allclose(sequence.logprobs[own], expected, atol=tolerance)
    for trajectory in (t for group in groups for t in group.trajectories):
        versions = (
            trajectory.sequences[turn.sequence].versions[turn.start : turn.end]
            for turn in trajectory.turns
        )
        mixed += sum(len(set(own[own >= 0])) > 1 for own in versions)
    return mixed


def assert_scored_alike(toy, groups, tolerance=2e-5):
    """In rows of every kind: each trajectory alone, all packed, prompts of a group shared; sequences of a trajectory are trees."""
    family = family_of(toy.model.config.model_type)
    policy = PolicyModel(toy.model, family, toy.banned, temperature=1.5, chunk=None)
    members = [
        [Member(g, i, [0.0] * len(t.turns)) for i, t in enumerate(g.trajectories)] for g in groups
    ]
    everything = [member for own in members for member in own]
    for share, rows in (
        (False, [[m] for m in everything]),
        (False, [everything]),
        (True, members),
        (True, [everything]),
    ):
        collate = Collator(
            family,
            toy.processor.image_tokens,
            toy.pixels,
            toy.processor.pad_id,
            share_prompts=share,
        )
        total = 0
        for row in rows:
            batch = collate(row, run_vision=True)
            with torch.no_grad():
                logprobs, _ = policy(batch)
            torch.testing.assert_close(
                logprobs, torch.from_numpy(batch.rollout_logprobs), atol=tolerance, rtol=0
            )
            total += len(batch.targets)
        assert total == sum(t.n_response_tokens for g in groups for t in g.trajectories)
