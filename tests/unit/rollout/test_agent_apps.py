"""Agents that live in a task app: the example's app asks the policy itself, some replies are bad, some are lost."""

import asyncio
import json
import socket

import numpy as np
import pytest
from agent_groups import play
from scripted_engine import Scripted
from task_app import Relay, TaskApp

from rlinf_vl.extras.agents.app_driver import AppDriver, address_towards
from rlinf_vl.extras.agents.player import AgentPlayer
from rlinf_vl.extras.agents.session import AgentLimits
from rlinf_vl.extras.remote.client import AppClient
from rlinf_vl.models.families import family_of
from rlinf_vl.models.processing import Processor
from rlinf_vl.rollout.episode.generation_client import GenerationClient
from rlinf_vl.rollout.episode.group_player import EpisodeSettings
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.types import SamplingParams

TOKEN = "a-long-secret"


@pytest.fixture(scope="module")
def processor(toy_folder):
    return Processor(toy_folder, family_of("qwen3_vl"))


@pytest.fixture(scope="module")
def app():
    app = TaskApp(TOKEN)
    yield app
    app.stop()


@pytest.fixture
def relay(app):
    relay = Relay(app)
    yield relay
    relay.shutdown()
    relay.server_close()


def outcome(monkeypatch, processor, url, seeds, token=TOKEN):
    """The trajectories of these seeds, and the requests that the engine got."""
    monkeypatch.setenv("TASK_APP_TOKEN", token)
    engine = Scripted(processor, ["18"])
    client = GenerationClient(engine, Renderer(processor), 30.0)
    driver = AppDriver(url, 30.0, (-0.5, 1.0))
    settings = EpisodeSettings(max_concurrent=16)
    limits = AgentLimits(200, 10**6)
    player = AgentPlayer(client, settings, driver, limits, (-0.5, 1.0), host=address_towards(url))
    sampling = SamplingParams(max_new_tokens=20, stop_ids=processor.stop_ids)
    groups = play(player, [seeds], sampling)
    return [trajectory for group in groups for trajectory in group.trajectories], engine


@pytest.mark.slow
def test_the_app_plays_and_what_it_asked_is_the_trajectory(monkeypatch, processor, app):
    trajectories, engine = outcome(monkeypatch, processor, app.url, [1, 2, 3])
    for trajectory in trajectories:
        assert trajectory.error is None and trajectory.reward == -0.5
        assert trajectory.metrics["tries"] == 3 and trajectory.correct is False
        # One conversation of three answers, each to a picture, the later ones paler.
        (sequence,) = trajectory.sequences
        assert len(trajectory.turns) == 3 and len(sequence.images) == 3
        answer = processor.tokenizer("18", add_special_tokens=False)["input_ids"]
        sampled = sequence.ids[np.flatnonzero(sequence.loss_mask)]
        assert sampled.tolist() == [*answer, processor.stop_ids[0]] * 3
        assert len({image.hash for image, _ in sequence.images}) >= 2


BAD = {
    "no reward": (b'{"reward": "much"}', "gave the reward 'much', which is no finite number"),
    "endless": (b'{"reward": 1e999}', "1e999 is too large a number"),
    "unknown": (b'{"reward": 1, "info": {"x": 1}}', "it returned 'x'"),
    "no object": (b'{"reward": 1, "info": [1]}', "gave the info [1], which is no object"),
    "not JSON": (b"well", "failed in its app"),
    "large": (b'{"reward": 1, "info": {"answer": "' + b"x" * 2**20 + b'"}}', "max_reply_bytes"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", BAD)
def test_a_bad_reply_is_an_error_of_its_trajectory(monkeypatch, processor, relay, kind):
    reply, reason = BAD[kind]

    def does(handler, content):
        handler.ask_app(content)
        handler.reply(200, reply)

    relay.does["rollout", 2] = does
    trajectories, _ = outcome(monkeypatch, processor, relay.url, [1, 2, 3])
    assert [t.error is None for t in trajectories] == [True, False, True]
    assert reason in trajectories[1].error


def test_a_request_whose_reply_is_lost_joins_what_it_has_begun(monkeypatch, processor, relay):
    lost = []

    def lose(handler, content):
        status, data, kind = handler.ask_app(content)
        if not lost:
            lost.append(json.loads(content)["id"])
            handler.close_connection = True
            return
        handler.reply(status, data, kind)

    relay.does["rollout"] = lose
    (trajectory,), engine = outcome(monkeypatch, processor, relay.url, [1])
    ids = [body["id"] for path, body in relay.seen if path == "rollout"]
    assert ids == lost * 2 and trajectory.error is None
    assert len(engine.requests) == 3, "it is not played again"


def test_another_token_is_refused(monkeypatch, processor, app):
    (trajectory,), _ = outcome(monkeypatch, processor, app.url, [1], token="another-secret")
    assert "it wants another token; is that in TASK_APP_TOKEN right?" in trajectory.error


def test_the_way_to_an_app_is_that_of_an_address_that_can_be_reached(monkeypatch):
    find = socket.getaddrinfo

    def ipv6_first(*arguments, **options):
        # A link's address without its link, to which there is no way.
        away = (socket.AF_INET6, socket.SOCK_DGRAM, 0, "", ("fe80::1", 8000, 0, 0))
        return [away, *find(*arguments, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", ipv6_first)
    assert address_towards("http://127.0.0.1:8000") == "127.0.0.1"


def test_an_app_here_reaches_the_endpoint_here_only():
    assert address_towards("http://localhost:8000") == "127.0.0.1"
    with pytest.raises(ValueError, match="is no address of an app"):
        AppDriver("tasks.example.org", 1.0)


def test_two_hundred_rollouts_of_one_app_run_at_once():
    """None of the app's replies comes before all 200 requests have."""

    async def main():
        requests, all_here = 0, asyncio.Event()

        async def serve(reader, writer):
            nonlocal requests
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.partition("content-length: ")[2].partition("\r")[0])
            await reader.readexactly(length)
            requests += 1
            if requests == 200:
                all_here.set()
            await all_here.wait()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n")
            writer.write(b"Content-Length: 12\r\n\r\n" + b'{"reward":1}')
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0, backlog=256) as server:
            port = server.sockets[0].getsockname()[1]
            app = AppClient(f"http://127.0.0.1:{port}", None, 60.0, 2**20, 8)
            app.open()
            try:
                asked = [app.ask("POST", "rollout", 0.0, {"seed": seed}) for seed in range(200)]
                return await asyncio.gather(*asked)
            finally:
                await app.close()

    replies = asyncio.run(main())
    assert [reply for reply, _ in replies] == [{"reward": 1}] * 200
