"""Episodes of the example's task app through the real player and engine, some of them spoiled on their way."""

import asyncio
import time

import numpy as np
import pytest
from episodes import make_player
from summaries import values
from task_app import Relay, TaskApp

from rlinf_vl.envs import EnvMaker
from rlinf_vl.types import ENVIRONMENT_FAULT, GroupSummary, Problem, SamplingParams


@pytest.fixture(scope="module")
def relay():
    app = TaskApp()
    relay = Relay(app)
    yield relay
    relay.shutdown()
    relay.server_close()
    app.stop()


def endless(handler, _):
    handler.send_response(200)
    handler.end_headers()
    for _ in range(100):
        handler.wfile.write(b" " * 2**20)


def hang_up(handler, _):
    handler.close_connection = True


SPOILED = {
    1: (lambda handler, _: handler.reply(200, b'{"messages": ['), "JSONDecodeError"),
    2: (endless, "more than max_reply_bytes"),
    3: (
        lambda handler, _: handler.reply(302, b"", location="http://10.0.0.1/"),
        "no redirect is followed",
    ),
    4: (
        lambda handler, _: handler.reply(404, b"{}"),
        "it was started again, or gave the episode up",
    ),
    5: (hang_up, "doesn't answer"),
}


@pytest.mark.slow
def test_what_is_wrong_with_one_reply_is_one_trajectorys_error(toy, relay):
    relay.does = {("step", seed): does for seed, (does, _) in SPOILED.items()}
    make = EnvMaker("remote", {"url": relay.url, "retry_s": 1.0}, {}, lambda *_: False, 1.0, 0.0)
    player = make_player(
        toy.engine,
        toy.processor,
        make,
        seq_length=1000,
        max_prompt_length=500,
        alive_timeout_s=10.0,
    )
    sampling = SamplingParams(max_new_tokens=12, stop_ids=toy.processor.stop_ids)

    async def played():
        groups = [
            await player.start_group(Problem(f"p:{g}", (), ""), [g, 6 + g], sampling, g)
            for g in range(6)
        ]
        player.submit_first_requests(groups)
        return await asyncio.gather(
            *(player.play_group(f"g{g}", group) for g, group in enumerate(groups))
        )

    begun = time.monotonic()
    groups = asyncio.run(played())
    assert time.monotonic() - begun < 60
    for g, group in enumerate(groups):
        spoiled, good = group.trajectories if g in SPOILED else (None, group.trajectories[0])
        if spoiled is not None:
            kind, _, reason = spoiled.error.partition(": ")
            assert kind == ENVIRONMENT_FAULT and SPOILED[g][1] in reason, spoiled.error
        for trajectory in (good, group.trajectories[1]):
            (sequence,) = trajectory.sequences
            assert trajectory.error is None and 1 <= len(trajectory.turns) <= 3
            assert len(sequence.images) == len(trajectory.turns) and trajectory.metrics[
                "tries"
            ] == len(trajectory.turns)
            assert [turn.state for turn in trajectory.turns] == [
                f"try {k}" for k in range(len(trajectory.turns))
            ]
    summaries = [GroupSummary.of(group, toy.processor.image_token_id) for group in groups]
    assert sum(error is not None for s in summaries for error in values(s, "error")) == len(SPOILED)
    closed = {body["id"] for path, body in relay.seen if path == "close"}
    assert (
        closed == {body["id"] for path, body in relay.seen if path == "start"} and len(closed) == 12
    )
    pictures = {
        image.hash for group in groups for s in group.sequences for image, _ in s.images[:1]
    }
    assert len(pictures) == 6, "a group has one picture to begin with"
    assert all(np.isfinite(s.logprobs).all() for group in groups for s in group.sequences)
