"""Groups of agents for tests on any engine: their player, agents that are drawn, and what must hold of what they are trained on.

`toy` has processor, model, banned, pixels and engine, as in `accounting`.
"""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import scripted_agents
from accounting import assert_scored_alike
from episodes import encoded, picture
from hypothesis import strategies as st

from rlinf_vl.extras.agents.drivers import FunctionDriver
from rlinf_vl.extras.agents.player import AgentPlayer
from rlinf_vl.extras.agents.session import AgentLimits
from rlinf_vl.rollout.episode.env_executor import ThreadExecutor
from rlinf_vl.rollout.episode.generation_client import GenerationClient
from rlinf_vl.rollout.episode.group_player import EpisodeSettings
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.types import Problem, SamplingParams

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
#: The toy's chat template shows tools without their schemas; with this before it, these, too.
SHOWS_TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"

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
#: The steps of each agent of a group.
MEMBERS = st.lists(st.lists(STEPS, min_size=1, max_size=5), min_size=1, max_size=4)


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


def play_wild(toy, seeds_by_group, problem=PROBLEM, engine=None, **limits):
    """Play groups of wild agents with these seeds, whose calls show tools; the groups, and the engine that recorded them."""
    engine = engine or Recorder(toy.engine)
    player = agent_player(toy, "wild", **limits)
    player.client.engine = engine
    sampling = replace(sampling_of(toy), temperature=1.5)
    with pytest.MonkeyPatch.context() as patch:
        tokenizer = toy.processor.tokenizer
        patch.setattr(tokenizer, "chat_template", SHOWS_TOOLS + tokenizer.chat_template)
        return play(player, seeds_by_group, sampling, problem), engine


def play_drawn(toy, members, first_seed, **limits):
    """Play a group of wild agents that take these steps."""
    steps = {first_seed + number: member for number, member in enumerate(members)}
    problem = replace(PROBLEM, columns={"steps": steps})
    return play_wild(toy, [list(steps)], problem, **limits)


def assert_trained_as_sampled(toy, groups, engine, tolerance=2e-5):
    """All that was sampled is trained once, and the trainer's model scores it as the engine did."""
    assert_trained_once(groups, engine)
    assert_scored_alike(toy, groups, tolerance)


def assert_trained_once(groups, engine):
    """Nothing that was sampled and returned is lost, trained twice, or trained with another logprob."""
    trajectories = [t for g in groups for t in g.trajectories]
    assert [t.error for t in trajectories if t.error] == []
    assert sum(t.n_response_tokens for t in trajectories) == engine.sampled
    trained = []
    for trajectory in trajectories:
        for turn in trajectory.turns:
            sequence, answer = trajectory.sequences[turn.sequence], slice(turn.start, turn.end)
            assert sequence.loss_mask[answer].all()
            trained.append((sequence.ids[answer].tolist(), sequence.logprobs[answer].tolist()))
    assert sorted(trained) == sorted(engine.answers)


def assert_varied(groups):
    """Or what holds of these agents would show little."""
    trajectories = [t for g in groups for t in g.trajectories]
    images = [len(s.images) for t in trajectories for s in t.sequences]
    assert min(images) == 0 and max(images) > 3
    branches = [t.metrics["agent/branches"] for t in trajectories]
    assert max(branches) > 1 and min(branches) == 0
    assert any(t.metrics["agent/foreign_assistant_tokens"] for t in trajectories)
    assert any(t.metrics["agent/resumed_share"] > 0 for t in trajectories)
