"""Environments that crash, hang, block and lie: each is one trajectory's error, in time, and nobody else's."""

import asyncio
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
from episodes import AsyncFaulty, Faulty, Maker, Talk, make_player, message_of, picture, play

from rlinf_vl.engines.base import EngineDied
from rlinf_vl.envs import StepResult
from rlinf_vl.rollout.episode.group_sampler import MAX_HUNG
from rlinf_vl.rollout.pool.worker import RolloutRank
from rlinf_vl.types import SamplingParams

LIMIT_S = 4.0
MOST_S = 30.0  # more than enough on a busy machine, and less than anything that hangs takes


@pytest.fixture
def released():
    """Ends what hangs when the test is over."""
    event = threading.Event()
    yield event
    event.set()


def player_of(toy, make, **changed):
    fields = {
        "seq_length": 400,
        "max_prompt_length": 200,
        "alive_timeout_s": 5.0,
        "turn_timeout_s": LIMIT_S,
    }
    return make_player(toy.engine, toy.processor, Maker(make), **(fields | changed))


def sampling(toy, n=6):
    return SamplingParams(max_new_tokens=n, stop_ids=toy.processor.stop_ids)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Faulty, AsyncFaulty])
def test_a_step_with_crashing_hanging_and_lying_environments_ends_in_time(toy, kind):
    """256 environments at once, in groups of 8: 5 % of each kind of fault, at the start and in later turns."""
    made = []

    def make(seed):
        made.append(kind(seed, hang_s=2 * MOST_S))
        return made[-1]

    player = player_of(toy, make)
    begun = time.monotonic()
    groups = play(player, [range(8 * g, 8 * g + 8) for g in range(32)], sampling(toy))
    assert time.monotonic() - begun < MOST_S
    assert len(made) == 256
    trajectories = [t for group in groups for t in group.trajectories]
    reported = Counter(
        (t.error or "none").partition("scripted' ")[2].partition(" within")[0] for t in trajectories
    )
    faults = [env.fault for env in (kind(seed, 0) for seed in range(256))]
    for seed, (trajectory, fault) in enumerate(zip(trajectories, faults, strict=True)):
        assert (trajectory.error is None) == (fault is None), (seed, fault, trajectory.error)
        assert fault is not None or (len(trajectory.turns), trajectory.reward) == (3, 3.0)
        assert len(trajectory.turns) <= 3
    assert sum(reported[t] for t in ("did not start", "did not answer")) >= faults.count("hang"), (
        reported
    )
    assert player.executor.hung == (faults.count("hang") if kind is Faulty else 0)
    assert 0 < player.client.busy.seconds() < MOST_S
    closed = [not env.open for env in made if env.fault != "hang"]
    assert all(closed) and (kind is Faulty or all(not env.open for env in made))


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, True])
def test_a_close_that_never_returns_is_counted_and_holds_nobody(toy, released, is_async):
    """3 of 24 environments. A coroutine is cancelled at its limit; a thread stays, and is counted while it does."""
    never = asyncio.Event

    class Closes(Talk):
        def __init__(self, seed):
            super().__init__(seed, turns=2, images=0)
            self.seed = seed

        def close(self):
            if self.seed % 8 == 0:
                released.wait(2 * MOST_S)
            super().close()

    class ClosesAsync(Closes):
        async def close(self):
            if self.seed % 8 == 0:
                await never().wait()

    player = player_of(toy, ClosesAsync if is_async else Closes, turn_timeout_s=1.5)
    begun = time.monotonic()
    groups = play(player, [range(8 * g, 8 * g + 8) for g in range(3)], sampling(toy))
    assert time.monotonic() - begun < MOST_S
    assert all(t.error is None for group in groups for t in group.trajectories), (
        "closing late is no error of theirs"
    )
    deadline = time.monotonic() + MOST_S
    while player.executor.hung != (0 if is_async else 3) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert player.executor.hung == (0 if is_async else 3)
    released.set()
    while player.executor.hung and time.monotonic() < deadline:
        time.sleep(0.05)
    assert player.executor.hung == 0, "what returns is no longer counted"


def test_a_worker_with_too_many_hung_calls_asks_to_be_replaced():
    rank = SimpleNamespace(
        clock=SimpleNamespace(begin=lambda: None, end=lambda: None),
        player=SimpleNamespace(hung=MAX_HUNG + 1, close_group=None),
    )

    async def generate():
        async for _ in RolloutRank.generate(rank, []):
            raise AssertionError("it must not begin")

    with pytest.raises(EngineDied, match=f"{MAX_HUNG + 1} calls of its environments hang"):
        asyncio.run(generate())


def test_a_member_that_starts_late_holds_nobody_and_asks_by_itself(toy, released):
    order = []

    class Slow(Talk):
        def __init__(self, seed):
            super().__init__(0, turns=1, images=0)
            self.seed = seed

        def start(self, problem):
            if self.seed == 2:
                released.wait(MOST_S)
            return [message_of("What")]

        def step(self, response):
            order.append(self.seed)
            if len(order) == 7:
                released.set()
            return super().step(response)

    asked = []
    submit = toy.engine.submit
    player = player_of(toy, Slow, turn_timeout_s=MOST_S)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            toy.engine, "submit", lambda requests: asked.extend(requests) or submit(requests)
        )
        groups = play(player, [range(4), range(4, 8)], sampling(toy))
    assert order[-1] == 2 and [t.error for g in groups for t in g.trajectories] == [None] * 8
    assert sorted(r.seeds for r in asked) == [(0, 1, 3), (2,), (4, 5, 6, 7)], (
        "alike starts share a request"
    )
    assert all(group.prefix_length == len(asked[0].ids) for group in groups)


@pytest.mark.parametrize("most", [1, 3, 8])
def test_no_more_episodes_are_under_way_than_places(toy, most):
    lock, now, peak = threading.Lock(), 0, 0

    class Counted(Talk):
        def __init__(self, seed):
            nonlocal now, peak
            super().__init__(seed, turns=2, images=0)
            with lock:
                now += 1
                peak = max(peak, now)

        def close(self):
            nonlocal now
            with lock:
                now -= 1

    groups = play(
        player_of(toy, Counted, max_concurrent=most),
        [range(4), range(4, 8), range(8, 12)],
        sampling(toy),
    )
    assert all(t.error is None for g in groups for t in g.trajectories)
    assert now == 0 and peak <= most


def test_turns_and_time_bound_an_episode(toy, released):
    class Endless(Talk):
        def step(self, response):
            return StepResult([message_of("on")], 0.5, False)

    (group,) = play(player_of(toy, Endless, max_turns=3), [range(2)], sampling(toy))
    assert [(len(t.turns), t.reward, t.status, t.error) for t in group.trajectories] == [
        (3, 1.5, "length", None)
    ] * 2

    class Dawdling(Endless):
        def step(self, response):
            released.wait(0.1)
            return super().step(response)

    player = player_of(toy, Dawdling, episode_timeout_s=1.0, seq_length=100_000)
    begun = time.monotonic()
    (group,) = play(player, [range(2)], sampling(toy))
    assert time.monotonic() - begun < MOST_S
    assert all(
        "was not done within rollout.episode_timeout=1 s" in (t.error or "")
        for t in group.trajectories
    )
    toy.engine.release_memory()  # nothing runs any more, or this is refused
    toy.engine.restore_memory()


@pytest.mark.slow
def test_an_episodes_time_begins_when_its_process_takes_calls(toy):
    class InProcess(Talk):
        start_limit_s = MOST_S

        async def wait_for_process(self):
            await asyncio.sleep(1.5)

    player = player_of(toy, lambda seed: InProcess(seed, turns=1, images=0), episode_timeout_s=1.0)
    (group,) = play(player, [range(2)], sampling(toy))
    assert [t.error for t in group.trajectories] == [None] * 2


def test_an_episode_that_is_given_up_gives_its_request_up(toy):
    """One that takes 100,000 tokens."""
    player = player_of(toy, Talk, episode_timeout_s=0.5, seq_length=200_000)
    (group,) = play(player, [range(2)], SamplingParams(max_new_tokens=100_000))
    assert all("episode_timeout" in (t.error or "") and t.turns == () for t in group.trajectories)
    toy.engine.release_memory()
    toy.engine.restore_memory()


@pytest.mark.slow
def test_a_coroutine_function_that_blocks_its_loop_harms_no_later_episode(toy, released):
    class Blocking(Talk):
        async def start(self, problem):
            released.wait(MOST_S)
            return [message_of("never")]

    class Waiting(Talk):
        async def start(self, problem):
            await asyncio.sleep(0.01)
            return [message_of("What", picture())]

    envs = {0: Blocking, 1: Waiting}
    player = player_of(toy, lambda seed: envs[seed](seed), turn_timeout_s=1.0)
    (blocked,) = play(player, [[0]], sampling(toy))
    old_loops = [thread for thread in threading.enumerate() if thread.name == "environments"]
    assert "did not start within 1 s" in (blocked.trajectories[0].error or "")
    (fine,) = play(player, [[1]], sampling(toy))
    assert fine.trajectories[0].error is None
    # The loop that was replaced ends with its sockets once it can.
    released.set()
    old_loops[-1].join(MOST_S)
    assert not old_loops[-1].is_alive()


class Silent(Exception):
    def __str__(self):
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), StopIteration(), GeneratorExit(), Silent()]
)
@pytest.mark.parametrize("coroutine", [False, True])
def test_whatever_is_raised_is_one_trajectorys_error(toy, error, coroutine):
    class Raising(Talk):
        def step(self, response):
            raise error

    class RaisingLater(Talk):
        async def step(self, response):
            raise error

    bad = RaisingLater if coroutine else Raising
    player = player_of(toy, lambda seed: bad(seed) if seed == 1 else Talk(seed, turns=1))
    (group,) = play(player, [range(3)], sampling(toy))
    assert [t.error is None for t in group.trajectories] == [True, False, True]
    assert (group.trajectories[1].error or "").startswith("environment: 'scripted' failed: ")


@pytest.mark.parametrize(
    "shown",
    [
        picture(30, 30).resize((8000, 8000)),  # too many pixels
        b"\x89PNG" + bytes(65 * 2**20),
        "data:image/png;base64,AAAA",
        "https://localhost/a.png",
        "/etc/passwd",
        {"url": 7},
        None,
        [1, 2],
    ],
)
def test_a_picture_that_can_not_be_used_is_one_trajectorys_error(toy, shown):
    class Showing(Talk):
        def step(self, response):
            return StepResult(
                [{"role": "user", "content": [{"type": "image", "image": shown}]}], 0.0, False
            )

    player = player_of(toy, lambda seed: Showing(seed) if seed == 1 else Talk(seed, turns=1))
    (group,) = play(player, [range(3)], sampling(toy))
    assert [t.error is None for t in group.trajectories] == [True, False, True]
    assert (group.trajectories[1].error or "").startswith(
        "environment: 'scripted' answered what can't follow: "
    )
