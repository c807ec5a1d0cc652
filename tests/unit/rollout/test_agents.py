"""Agents against the embedded engine: exact tokens in every order of calls, and faults that stay with their trajectory."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scripted_agents
from accounting import assert_scored_alike
from episodes import Maker, Talk, encoded, make_player, picture
from hypothesis import given, settings
from hypothesis import strategies as st
from summaries import values

from rlinf_vl.agents.drivers import FunctionDriver
from rlinf_vl.rollout.agent_player import AgentPlayer
from rlinf_vl.rollout.agent_session import AgentLimits
from rlinf_vl.rollout.env_executor import ThreadExecutor
from rlinf_vl.rollout.generation_client import GenerationClient
from rlinf_vl.rollout.group_player import EpisodeSettings
from rlinf_vl.rollout.renderer import Renderer
from rlinf_vl.types import GroupSummary, Problem, SamplingParams

FILE = Path(scripted_agents.__file__)
SHOWN = encoded(picture(48, 32, 9))
PROBLEM = Problem(
    "p:0",
    (
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": SHOWN.url}},
                {"type": "text", "text": "What"},
            ],
        },
    ),
    "18",
    (SHOWN,),
)
#: The toy's chat template shows no tools; with this before it, it does.
SHOWS_TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"


def agent_player(toy, name, *, timeout_s=30.0, max_calls=100, seq_length=2048, **settings):
    driver = FunctionDriver(f"{FILE}:{name}", {}, ThreadExecutor(timeout_s))
    client = GenerationClient(toy.engine, Renderer(toy.processor), 30.0)
    limits = AgentLimits(max_calls, seq_length)
    return AgentPlayer(client, EpisodeSettings(**settings), driver, limits, (0.0, 1.0))


def sampling_of(toy, max_new_tokens=8):
    return SamplingParams(max_new_tokens=max_new_tokens, stop_ids=toy.processor.stop_ids)


def play(player, groups, sampling, problem=PROBLEM):
    """The groups of these seeds, all at once, and the end of the endpoint."""

    async def one(number, seeds):
        group = await player.start_group(problem, seeds, sampling)
        player.submit_first_requests([group])
        try:
            return await player.play_group(f"g{number}", group)
        finally:
            await player.close_group(group)

    async def together():
        try:
            return await asyncio.gather(*(one(n, seeds) for n, seeds in enumerate(groups)))
        finally:
            if isinstance(player, AgentPlayer):
                player.close()
                await player.endpoint.wait_closed()

    return asyncio.run(together())


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


@pytest.mark.quick("0")
@pytest.mark.parametrize("first_seed", range(6))
def test_every_order_of_calls_keeps_tokens_and_logprobs(toy, monkeypatch, first_seed):
    tokenizer = toy.processor.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", SHOWS_TOOLS + tokenizer.chat_template)
    engine = Recorder(toy.engine)
    player = agent_player(toy, "wild")
    player.client.engine = engine
    seeds = random.Random(first_seed).sample(range(10**6), 40)
    sampling = replace(sampling_of(toy), temperature=1.5)
    groups = play(player, [seeds[i : i + 4] for i in range(0, 40, 4)], sampling)
    assert_sampled_tokens_are_trained(toy, groups, engine)
    trajectories = [t for g in groups for t in g.trajectories]
    images = [len(s.images) for t in trajectories for s in t.sequences]
    assert min(images) == 0 and max(images) > 3
    branches = [t.metrics["agent/branches"] for t in trajectories]
    assert max(branches) > 1 and min(branches) == 0
    assert any(t.metrics["agent/foreign_assistant_tokens"] for t in trajectories)
    assert any(t.metrics["agent/resumed_share"] > 0 for t in trajectories)


CALLS = st.builds(
    scripted_agents.CallOptions,
    max_tokens=st.sampled_from([None, 1, 5]),
    pieces=st.sampled_from([None, 1, 9]),
    tools=st.booleans(),
)
STEPS = st.builds(
    scripted_agents.Step,
    action=st.sampled_from(scripted_agents.ACTIONS),
    conversation=st.integers(0, 5),
    calls=st.lists(CALLS, min_size=1, max_size=3),
    question=st.tuples(
        st.sampled_from(["What", "", "x = 3"]) | st.text(max_size=8),
        st.lists(st.integers(0, 2), max_size=3),
    ),
)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.lists(STEPS, min_size=1, max_size=5), min_size=1, max_size=4),
    st.integers(0, 10_000),
    st.sampled_from([120, 250, 2048]),
)
def test_a_group_of_any_agents_keeps_tokens_and_logprobs(toy, members, first_seed, seq_length):
    """As above, with steps that shrink to the fewest that fail, and with limits that are reached."""
    steps = {first_seed + number: member for number, member in enumerate(members)}
    problem = replace(PROBLEM, columns={"steps": steps})
    engine = Recorder(toy.engine)
    player = agent_player(toy, "wild", seq_length=seq_length)
    player.client.engine = engine
    with pytest.MonkeyPatch.context() as patch:
        tokenizer = toy.processor.tokenizer
        patch.setattr(tokenizer, "chat_template", SHOWS_TOOLS + tokenizer.chat_template)
        groups = play(player, [list(steps)], replace(sampling_of(toy), temperature=1.5), problem)
    assert_sampled_tokens_are_trained(toy, groups, engine)
    summary = GroupSummary.of(groups[0], toy.processor.image_token_id)
    assert max(values(summary, "tokens")) <= seq_length


def assert_sampled_tokens_are_trained(toy, groups, engine):
    """Nothing that was sampled and returned is lost, trained twice, or trained with another logprob."""
    trajectories = [t for g in groups for t in g.trajectories]
    assert [t.error for t in trajectories if t.error] == []
    assert_scored_alike(toy, groups)
    assert sum(t.n_response_tokens for t in trajectories) == engine.sampled
    trained = []
    for trajectory in trajectories:
        for turn in trajectory.turns:
            sequence, answer = trajectory.sequences[turn.sequence], slice(turn.start, turn.end)
            assert sequence.loss_mask[answer].all()
            trained.append((sequence.ids[answer].tolist(), sequence.logprobs[answer].tolist()))
    assert sorted(trained) == sorted(engine.answers)


class Recorder:
    """An engine that keeps the tokens that it has sampled, with their logprobs."""

    def __init__(self, engine):
        self.engine, self.sampled, self.answers = engine, 0, []

    def submit(self, requests):
        futures = self.engine.submit(requests)
        for future in futures:
            future.add_done_callback(self.count)
        return futures

    def count(self, future):
        if not future.cancelled() and future.exception() is None:
            for sample in future.result().samples:
                self.sampled += len(sample.ids)
                self.answers.append((sample.ids.tolist(), sample.logprobs.tolist()))

    def __getattr__(self, name):
        return getattr(self.engine, name)


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


def test_an_agent_that_loops_ends_at_its_limit_of_calls(toy):
    (group,) = play(agent_player(toy, "loops", max_calls=5), [[1]], sampling_of(toy))
    (trajectory,) = group.trajectories
    assert "max_calls" in trajectory.error and len(trajectory.turns) == 5


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
