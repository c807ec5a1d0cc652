"""Whole conversations through the real engine: what is trained was sampled, once, and the trainer's model scores it alike."""

import threading

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
from hypothesis import given, settings
from hypothesis import strategies as st
from summaries import values

from rlinf_vl.types import GroupSummary


@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    turns=st.integers(1, 6),
    images=st.integers(0, 3),
    longest=st.sampled_from([2, 6, 20]),
)
def test_conversations_are_one_sequence_that_is_trained_as_it_was_sampled(
    toy, seed, turns, images, longest
):
    groups, asked = conversations(toy, seed, turns, images, longest)
    assert all(len(t.sequences) == 1 for group in groups for t in group.trajectories)
    assert_accounted(toy, groups, asked)
    assert_scored_alike(toy, groups)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    turns=st.integers(2, 6),
    images=st.integers(0, 2),
    longest=st.sampled_from([6, 20]),
)
def test_dropped_thoughts_make_sequences_that_share_what_they_can(
    toy, seed, turns, images, longest
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy.processor.tokenizer, "chat_template", DROPS)
        patch.setattr("rlinf_vl.rollout.episode.renderer.END_THINK", END)
        groups, asked = conversations(toy, seed, turns, images, longest)
    assert_accounted(toy, groups, asked)
    assert_scored_alike(toy, groups)
    for group in groups:
        summary = GroupSummary.of(group, toy.processor.image_token_id)
        assert max(values(summary, "tokens")) <= 500
        for trajectory in group.trajectories:
            for turn, following in zip(trajectory.turns, trajectory.turns[1:], strict=False):
                answer_ids = trajectory.sequences[turn.sequence].ids[turn.start : turn.end]
                thought = END in toy.processor.decode(answer_ids)
                assert (following.sequence > turn.sequence) == thought


@pytest.fixture
def updating(toy, toy_folder):
    """Have the engine take weights all the time, as one version after the other; a function that gives them by version."""
    models = []
    for k in range(3):
        model = toy.model.__class__.from_pretrained(toy_folder, dtype=torch.float32).eval()
        generator = torch.Generator().manual_seed(k)
        for p in model.parameters():
            p.data += 0.1 * k * p.data.std(correction=0) * torch.randn(p.shape, generator=generator)
        models.append(model)
    first, stop = toy.engine.version, threading.Event()
    own = {name: p.detach().clone() for name, p in toy.model.named_parameters()}

    def update():
        while not stop.wait(0.03):
            version = toy.engine.version + 1
            weights = models[(version - first) % 3].named_parameters()
            toy.engine.load_weights([{name: p.detach() for name, p in weights}], version)

    thread = threading.Thread(target=update)
    thread.start()
    yield lambda: {
        version: models[(version - first) % 3] for version in range(first, toy.engine.version + 1)
    }
    stop.set()
    thread.join()
    toy.engine.load_weights([own], toy.engine.version + 1)


@pytest.mark.slow
@pytest.mark.parametrize("template", [None, DROPS], ids=["whole history", "dropped thoughts"])
def test_conversations_go_on_while_weights_come(toy, updating, template):
    """Each token, of each turn, is of the version that it says; weights come within answers and between turns."""
    with pytest.MonkeyPatch.context() as patch:
        if template:
            patch.setattr(toy.processor.tokenizer, "chat_template", template)
            patch.setattr("rlinf_vl.rollout.episode.renderer.END_THINK", END)
        groups, asked = conversations(toy, 20, 4, 2, 20)
    assert_accounted(toy, groups, asked)
    assert assert_explained(toy, updating(), groups) > 3


@pytest.mark.slow
@pytest.mark.parametrize("template", [None, DROPS], ids=["whole history", "dropped thoughts"])
def test_rows_with_states_are_accounted_alike(recurrent_toy, template):
    """A later turn goes on from the state behind the last one's tokens where it extends exactly those, else from nothing."""
    toy, before = recurrent_toy, recurrent_toy.engine.prefilled_tokens
    with pytest.MonkeyPatch.context() as patch:
        if template:
            patch.setattr(toy.processor.tokenizer, "chat_template", template)
            patch.setattr("rlinf_vl.rollout.episode.renderer.END_THINK", END)
        groups, asked = conversations(toy, 20, 6, 2, 12)
    assert_accounted(toy, groups, asked)
    assert_scored_alike(toy, groups)
    everything = sum(len(request.ids) for request, _ in asked)
    assert toy.engine.prefilled_tokens - before < (0.9 if template else 0.6) * everything


def test_both_kinds_of_answers_and_of_histories_occur(toy):
    """Or the two above would show nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy.processor.tokenizer, "chat_template", DROPS)
        patch.setattr("rlinf_vl.rollout.episode.renderer.END_THINK", END)
        groups, _ = conversations(toy, 20, 6, 2, 12)
    trajectories = [t for group in groups for t in group.trajectories]
    assert {turn.finish_reason for t in trajectories for turn in t.turns} == {"stop", "length"}
    assert (
        len({len(t.sequences) for t in trajectories}) > 1
        and max(len(t.turns) for t in trajectories) > 2
    )
    assert any(len(s.images) > 2 for t in trajectories for s in t.sequences)
    assert any(
        a.shared_length(b, toy.processor.image_token_id) > group.prefix_length
        for group in groups
        for t in group.trajectories
        if len(t.sequences) > 2
        for a, b in zip(t.sequences, t.sequences[1:], strict=False)
    ), "a tree of more than one level"


def test_the_budget_bounds_all_sequences_of_a_trajectory_together(toy):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy.processor.tokenizer, "chat_template", DROPS)
        patch.setattr("rlinf_vl.rollout.episode.renderer.END_THINK", END)
        groups, asked = conversations(toy, 7, 6, 2, 8, seq_length=150)
    assert_accounted(toy, groups, asked)
    sizes = [
        n
        for group in groups
        for n in values(GroupSummary.of(group, toy.processor.image_token_id), "tokens")
    ]
    assert 100 < max(sizes) <= 150
    assert any(t.status == "length" for group in groups for t in group.trajectories)
