"""Agents against the embedded engine: exact tokens in every order of calls, and faults that stay with their trajectory."""

import random
import sys
from dataclasses import replace

import numpy as np
import pytest
from agent_groups import (
    MEMBERS,
    Recorder,
    agent_player,
    assert_trained_as_sampled,
    assert_varied,
    play,
    play_drawn,
    play_wild,
    sampling_of,
)
from episodes import Maker, Talk, make_player
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from summaries import values

from rlinf_vl.data.images import to_image_ref
from rlinf_vl.extras.agents import player as agent_module
from rlinf_vl.extras.agents.session import _pixel_digest
from rlinf_vl.types import GroupSummary


def test_an_agent_that_plays_an_environment_samples_what_the_player_samples(toy):
    groups = [[1, 2, 3, 4], [5, 6]]
    native = make_player(
        toy.engine,
        toy.processor,
        Maker(lambda seed: Talk(seed)),
        seq_length=2048,
        max_prompt_length=1024,
    )
    expected = play(native, groups, sampling_of(toy))
    found = play(agent_player(toy, "talk"), groups, sampling_of(toy))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.prefix_length == theirs.prefix_length
        for one, other in zip(ours.trajectories, theirs.trajectories, strict=True):
            assert one.error is None and other.error is None
            assert one.turn_rewards == other.turn_rewards and one.status == other.status
            assert len(one.sequences) == len(other.sequences)
            for a, b in zip(one.sequences, other.sequences, strict=True):
                np.testing.assert_array_equal(a.ids, b.ids)
                np.testing.assert_array_equal(a.versions, b.versions)
                np.testing.assert_array_equal(a.loss_mask, b.loss_mask)
                # the engine's batches depend on who is fast
                np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)
                assert [i.hash for i, _ in a.images] == [i.hash for i, _ in b.images]
    assert all(t.metrics["agent/branches"] == 0 for g in found for t in g.trajectories)
    assert sum(len(t.turns) for g in found for t in g.trajectories) > 8


def test_the_clients_library_is_imported_before_an_agents_time_begins(toy, monkeypatch):
    monkeypatch.delitem(sys.modules, "openai.resources.chat", raising=False)
    agent_player(toy, "talk").close()
    assert "openai.resources.chat" in sys.modules


def test_a_digest_of_pixels_keeps_no_image():
    image = to_image_ref(Image.new("RGB", (40, 30), (1, 2, 3)), root=None)
    holders = sys.getrefcount(image)
    assert _pixel_digest(image) == _pixel_digest(replace(image)) != image.hash
    assert sys.getrefcount(image) == holders


@pytest.mark.quick("0")
@pytest.mark.parametrize("first_seed", range(6))
def test_every_order_of_calls_keeps_tokens_and_logprobs(toy, first_seed):
    seeds = random.Random(first_seed).sample(range(10**6), 40)
    groups, engine = play_wild(toy, [seeds[i : i + 4] for i in range(0, 40, 4)])
    assert_trained_as_sampled(toy, groups, engine)
    assert_varied(groups)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(MEMBERS, st.integers(0, 10_000), st.sampled_from([120, 250, 2048]))
def test_a_group_of_any_agents_keeps_tokens_and_logprobs(toy, members, first_seed, seq_length):
    """As above, with steps that shrink to the fewest that fail, and with limits that are reached."""
    groups, engine = play_drawn(toy, members, first_seed, seq_length=seq_length)
    assert_trained_as_sampled(toy, groups, engine)
    summary = GroupSummary.of(groups[0], toy.processor.image_token_id)
    assert max(values(summary, "tokens")) <= seq_length


def test_equal_answers_to_equal_questions_are_each_trained(toy):
    """Greedily: the second answer begins with the whole first one, and the third one is the second."""
    player, engine = agent_player(toy, "asks_again"), Recorder(toy.engine)
    player.client.engine = engine
    groups = play(player, [[1]], replace(sampling_of(toy), temperature=1.5, top_k=1))
    first, second, third = (ids for ids, _ in engine.answers)
    assert first == second[:1] and second == third and len(second) > 1
    assert_trained_as_sampled(toy, groups, engine)
    assert len(groups[0].trajectories[0].sequences) == 3


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("crash", "the agent failed: RuntimeError: no luck"),
        ("never_calls", "the agent ended without an answer of the policy"),
        ("returns_a_list", "the agent failed: TypeError: it returned list"),
        ("hangs", "the agent did not end within rollout.agent.timeout=1 s"),
        ("blocks", "the agent did not end within rollout.agent.timeout=1 s"),
    ],
)
def test_a_fault_is_its_own_trajectorys(toy, name, reason):
    (group,) = play(agent_player(toy, name, timeout_s=1.0), [[1, 2]], sampling_of(toy))
    assert all(t.error.startswith(f"environment: {reason}") for t in group.trajectories)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seeds", "max_concurrent", "n_faults"),
    [
        pytest.param([2, 3, 4, 5], 2, 0, id="members-without-a-permit"),
        pytest.param([0, 1, 2, 3], 4, 2, id="members-whose-first-call-is-refused"),
    ],
)
def test_first_calls_wait_for_nobody_who_can_not_call(
    toy, monkeypatch, seeds, max_concurrent, n_faults
):
    monkeypatch.setattr(agent_module, "PATIENCE_S", 600.0)
    player = agent_player(toy, "refused", timeout_s=3.0, max_concurrent=max_concurrent)
    (group,) = play(player, [seeds], sampling_of(toy))
    errors = [trajectory.error for trajectory in group.trajectories]
    assert [error is not None for error in errors] == [seed < 2 for seed in seeds], errors
    assert sum(error is not None for error in errors) == n_faults


def test_the_toy_shows_an_agents_tools_in_a_few_tokens(toy):
    (group,) = play(agent_player(toy, "shows_a_tool"), [[1]], sampling_of(toy))
    (trajectory,) = group.trajectories
    assert trajectory.error is None
    (sequence,) = trajectory.sequences
    text = toy.processor.tokenizer.decode(sequence.ids)
    assert text.startswith("<|im_start|>system\nadd(a,b)\n<|im_end|>\n<|im_start|>user\n")
    assert trajectory.turns[0].start < 80


@pytest.mark.parametrize("name", ["asks_and_fails", "asks_and_goes_on"])
def test_a_refused_first_call_is_the_reason_whatever_the_agent_does(toy, name):
    (group,) = play(agent_player(toy, name), [[1, 2]], sampling_of(toy))
    (error,) = {t.error for t in group.trajectories}
    assert error.startswith(
        "environment: the agent got no answer: the endpoint refused its first call: n: 3 is not supported"
    )


@pytest.mark.slow
def test_an_agent_that_loops_ends_at_its_limit_of_calls(toy):
    (group,) = play(agent_player(toy, "loops", max_calls=5), [[1]], sampling_of(toy))
    (trajectory,) = group.trajectories
    assert "max_calls" in trajectory.error and len(trajectory.turns) == 5


@pytest.mark.slow
def test_the_trajectory_never_exceeds_its_length(toy):
    (group,) = play(agent_player(toy, "loops", seq_length=100), [[1]], sampling_of(toy))
    (trajectory,) = group.trajectories
    assert "context_length_exceeded" in trajectory.error or "runner.seq_length" in trajectory.error
    lengths = [len(sequence.ids) for sequence in trajectory.sequences]
    assert max(lengths) <= 100


def test_a_plain_function_runs_in_a_thread_and_leaves_its_reward_to_reward_functions(toy):
    player = agent_player(toy, "in_a_thread")
    scored = []

    async def score(problem, answers):
        from rlinf_vl.rewards.scoring import Score

        scored.extend(answer.final_response for answer in answers)
        return [Score(0.5, correct=True) for _ in answers]

    player._score_answers = score
    (group,) = play(player, [[1, 2]], sampling_of(toy))
    assert [t.reward for t in group.trajectories] == [0.5, 0.5] and len(scored) == 2
