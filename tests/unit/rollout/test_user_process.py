"""Processes for users' code: crashes, calls that never return, and what is left of them."""

import asyncio
import ctypes
import io
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from functools import partial

import numpy as np
import psutil
import pytest
from PIL import Image

from rlinf_vl.envs import StepResult
from rlinf_vl.envs.call_forms import FORMS, ReplyForm
from rlinf_vl.extras.agents.contract import AgentResult, result_of
from rlinf_vl.rewards import GradingError
from rlinf_vl.rollout.episode import env_processes, user_process
from rlinf_vl.rollout.episode.env_executor import CallTimeout, ThreadExecutor
from rlinf_vl.rollout.episode.env_processes import EnvHost, ProcessEnv
from rlinf_vl.rollout.episode.faults import FaultLog, UserCodeError
from rlinf_vl.rollout.episode.observation import plain_result, portable_result
from rlinf_vl.rollout.episode.user_process import (
    ProcessDied,
    UserProcess,
    UserProcessPool,
    _PlainUnpickler,
)

TIMEOUT_S = 20.0
#: Seconds after which something will not happen any more.
LONG_S = 60.0


class Wild:
    """Users' code of every kind."""

    def __init__(self, timeout_s=TIMEOUT_S):
        self._executor = ThreadExecutor(timeout_s)

    @property
    def hung(self):
        return self._executor.hung

    async def pid(self):
        return os.getpid()

    async def wait(self, seconds):
        await asyncio.sleep(seconds)
        return seconds

    async def sleep_in_thread(self, seconds):
        await self._executor.call(partial(time.sleep, seconds), lambda call: None)

    async def abort(self):
        os.kill(os.getpid(), signal.SIGABRT)

    async def hold_interpreter(self):
        # A C call that keeps Python's lock: no timer in this process will ever fire.
        ctypes.PyDLL(None).sleep(600)

    async def fail(self):
        raise KeyError("mine")

    async def no_verdict(self):
        raise GradingError("too long")

    async def unpicklable(self):
        return lambda: None

    async def own_class(self):
        # A class that the parent can't import: there the file is no module.
        return {"reward": OwnNumber(0.5)}

    async def own_error(self):
        raise OwnError(1, 2)

    async def leave_a_child(self):
        """Return when a child has the socket, and end soon after it."""
        if not os.fork():
            time.sleep(600)
        asyncio.get_running_loop().call_later(0.2, os._exit, 7)


class OwnNumber(float):
    """A number of a user's class."""


class OwnError(GradingError):
    """An error that can't be made from its text alone."""

    def __init__(self, first, second):
        super().__init__(f"{first} of {second}")


class SlowStart(Wild):
    """Users' code with an import that takes longer than a call may."""

    def __init__(self, timeout_s):
        time.sleep(2 * timeout_s)
        super().__init__(timeout_s)


class FailsOnce(Wild):
    """Users' code that can't be imported as long as there is no such file."""

    def __init__(self, path):
        os.stat(path)
        super().__init__()


@pytest.fixture
def stuck_s(monkeypatch):
    monkeypatch.setattr(user_process, "STUCK_S", 1.0)


def run(test, timeout_s=TIMEOUT_S, size=1):
    """Run `test(pool)` in an event loop; nothing of the pool may be left."""

    before = {process.pid for process in psutil.Process().children()}

    async def main():
        pool = UserProcessPool(partial(Wild, timeout_s), timeout_s, size)
        try:
            return await test(pool)
        finally:
            pool.close()

    result = asyncio.run(main())
    left = [process for process in psutil.Process().children() if process.pid not in before]
    assert left == []
    return result


@pytest.mark.slow
def test_calls_run_at_once_in_another_process():
    async def test(pool):
        start = time.monotonic()
        await asyncio.gather(*(pool.call("wait", 1.0) for _ in range(20)))
        assert time.monotonic() - start < 15
        pids = await asyncio.gather(*(pool.call("pid") for _ in range(8)))
        assert len(set(pids)) == 2 and os.getpid() not in pids
        assert pool.hung == 0

    run(test, size=2)


@pytest.mark.slow
def test_a_crash_ends_its_process_and_the_next_call_has_a_new_one():
    async def test(pool):
        first = await pool.call("pid")
        waiting = asyncio.ensure_future(pool.call("wait", LONG_S))
        await asyncio.sleep(0.1)
        with pytest.raises(ProcessDied, match="SIGABRT in 2 calls"):
            await pool.call("abort")
        with pytest.raises(ProcessDied, match="SIGABRT"):
            await waiting
        assert await pool.call("pid") != first

    run(test)


@pytest.mark.slow
def test_a_call_that_holds_the_interpreter_costs_its_process(stuck_s):
    async def test(pool):
        # While it is being found out, a further call may still go to the lost process.
        with pytest.raises(CallTimeout):
            await pool.call("hold_interpreter")
        for _ in range(100):
            try:
                return await pool.call("pid")
            except (ProcessDied, CallTimeout):
                await asyncio.sleep(0.1)
        raise AssertionError("no new process")

    assert run(test, timeout_s=1.0) > 0


@pytest.mark.slow
def test_a_call_that_is_given_up_finds_a_stuck_process_too(stuck_s):
    async def test(pool):
        await pool.call("pid")  # a call that is given up before the start is never sent
        call = asyncio.ensure_future(pool.call("hold_interpreter"))
        await asyncio.sleep(1.0)
        waiting = asyncio.ensure_future(pool.call("wait", 0.0))
        call.cancel()
        with pytest.raises(ProcessDied, match="SIGKILL"):
            await waiting

    run(test, timeout_s=LONG_S)


@pytest.mark.slow
def test_where_calls_hang_new_ones_go_to_another_process(monkeypatch):
    monkeypatch.setattr(user_process, "MOST_HUNG", 2)

    async def test(pool):
        first = await pool.call("pid")
        busy = asyncio.ensure_future(pool.call("wait", 3.0))
        hanging = [pool.call("sleep_in_thread", 600.0) for _ in range(2)]
        errors = await asyncio.gather(*hanging, return_exceptions=True)
        assert all(isinstance(error, CallTimeout) for error in errors), errors
        assert pool.hung == 2
        assert await pool.call("pid") != first
        assert await busy == 3.0, "calls of the old process come to their end"
        assert pool.hung == 0, "then it is ended, and its threads with it"

    async def main():
        # The process limits its calls itself, earlier than the pool.
        pool = UserProcessPool(partial(Wild, 1.0), 10.0, 1)
        try:
            await test(pool)
        finally:
            pool.close()

    asyncio.run(main())


def test_errors_come_with_the_lines_of_the_users_code(caplog):
    async def test(pool):
        with pytest.raises(UserCodeError) as raised:
            await pool.call("fail")
        with pytest.raises(GradingError, match="too long"):
            await pool.call("no_verdict")
        with pytest.raises(UserCodeError, match="pickle"):
            await pool.call("unpicklable")
        return raised.value

    error = run(test)
    assert str(error) == "KeyError: 'mine'"
    with caplog.at_level(logging.WARNING):
        FaultLog(lambda text: True).add("row", error)
    assert (
        'raise KeyError("mine")' in caplog.text and "KeyError: 'mine' (logged once)" in caplog.text
    )


@pytest.mark.slow
def test_a_result_of_a_users_class_is_an_error_of_its_call_alone():
    async def test(pool):
        first = await pool.call("pid")
        waiting = asyncio.ensure_future(pool.call("wait", 1.0))
        with pytest.raises(UserCodeError, match="OwnNumber; return plain types"):
            await pool.call("own_class")
        with pytest.raises(GradingError, match="1 of 2"):
            await pool.call("own_error")
        assert await waiting == 1.0 and await pool.call("pid") == first

    run(test)


def test_results_leave_their_process_with_plain_types():
    """Of agents and of environments, whose `info` may hold anything."""

    class Text(str):
        pass

    agent = AgentResult(OwnNumber(0.5), Text("x"), {Text("a"): OwnNumber(1)}, metrics={"n": 2})
    info = {
        "metrics": {"n": OwnNumber(2)},
        "answer": Text("x"),
        "state": Text("s"),
        "tool_calls": [{"name": Text("f")}],
        "unread": OwnNumber(1),
    }
    step = StepResult((), OwnNumber(0.5), True, info)
    for result in (result_of(agent), portable_result(step)):
        loaded = _PlainUnpickler(io.BytesIO(pickle.dumps(result))).load()
        assert loaded == result
    assert plain_result(portable_result(step)) == plain_result(step)


@pytest.mark.slow
def test_a_death_is_seen_though_a_child_holds_the_socket():
    async def test(pool):
        await pool.call("leave_a_child")
        start = time.monotonic()
        with pytest.raises(ProcessDied, match="exit code 7"):
            await pool.call("wait", 600.0)
        assert time.monotonic() - start < TIMEOUT_S

    run(test)


@pytest.mark.slow
def test_a_slow_start_takes_nothing_from_a_calls_limit(monkeypatch):
    monkeypatch.setattr(user_process, "STUCK_S", 0.2)

    async def main():
        pool = UserProcessPool(partial(SlowStart, 1.0), 1.0, 1)
        try:
            return await pool.call("wait", 0.0)
        finally:
            pool.close()

    assert asyncio.run(main()) == 0.0


@pytest.mark.slow
def test_a_place_whose_process_does_not_start_attracts_no_calls(tmp_path, monkeypatch):
    path = tmp_path / "needed"

    async def main():
        pool = UserProcessPool(partial(FailsOnce, str(path)), TIMEOUT_S, 2)
        try:
            with pytest.raises(ProcessDied, match="exit code 1"):
                await pool.call("pid")
            path.touch()
            pid = await pool.call("pid")
            path.unlink()
            # A user holds it, so the empty place would be the least used one.
            busy = await pool.acquire()
            assert [await pool.call("pid") for _ in range(3)] == [pid] * 3
            path.touch()
            pool.release(busy)
            monkeypatch.setattr(user_process, "RETRY_S", 0.0)
            pids = await asyncio.gather(*(pool.call("pid") for _ in range(4)))
            assert len(set(pids)) == 2, "the place is tried again"
        finally:
            pool.close()

    asyncio.run(main())


@pytest.mark.slow
def test_it_ends_with_the_process_that_started_it():
    code = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from test_user_process import Wild
from rlinf_vl.rollout.episode.user_process import UserProcess
async def main():
    process = UserProcess(Wild, 60.0)
    print(await process.call("pid"), flush=True)
    await process.call("wait", 600.0)
asyncio.run(main())
"""
    folder = os.path.dirname(__file__)
    parent = subprocess.Popen(
        [sys.executable, "-c", code, folder],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([folder, *sys.path])},
    )
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    child.wait(LONG_S)


def test_a_process_that_does_not_start_is_an_error_of_its_calls():
    async def main():
        process = UserProcess(partial(Wild, no_such_keyword=1), TIMEOUT_S)
        with pytest.raises(ProcessDied, match="exit code 1"):
            await process.call("pid")
        assert not process.is_usable

    asyncio.run(main())


class Word(str):
    """A class that the worker does not know."""


class Pictures:
    """An environment that shows all kinds of pictures."""

    closed = 0

    def __init__(self, problem, seed, group_seed):
        self.seeds = seed, group_seed

    def start(self, problem):
        frame = np.full((4, 6, 3), 9, np.uint8)
        shown = [Image.fromarray(frame), frame, np.stack([frame, frame])]
        parts = ({"type": "image", "image": picture} for picture in shown)
        return ({"role": Word("user"), "content": (Word(f"{self.seeds}"), *parts, 3)},)

    def step(self, response):
        frame = np.zeros((4, 6, 3), np.uint8)
        return StepResult([{"content": [frame]}], 0.5, True, {"state": Word(response)})

    def close(self):
        Pictures.closed += 1


def test_what_an_environment_shows_leaves_its_process_encoded(monkeypatch):
    forms = []

    def env_maker_of(config, reply_form):
        forms.append(reply_form)
        return Pictures

    monkeypatch.setattr(env_processes, "env_maker_of", env_maker_of)

    async def main():
        host = EnvHost(None, TIMEOUT_S, ReplyForm(FORMS[1]))
        (message,) = await host.start(3, None, 1, 2)
        result = await host.step(3, "left")
        await host.close(3)
        await host.close(3)
        return message, result, host.hung

    message, result, hung = asyncio.run(main())
    assert [form.calls for form in forms] == [FORMS[1]]
    assert type(message["role"]) is str and message["role"] == "user" and hung == 0
    text, *parts, number = message["content"]
    assert (type(text), text, number) == (str, "(1, 2)", 3) and type(message["content"]) is list
    image, array, video = (part["image"] for part in parts)
    assert image == array == video[0] == video[1] and type(video) is list and len(video) == 2
    assert np.array(Image.open(io.BytesIO(image))).tolist() == np.full((4, 6, 3), 9).tolist()
    (black,) = result.messages[0]["content"]
    assert not np.array(Image.open(io.BytesIO(black))).any()
    assert (result.reward, result.done, result.info["state"]) == (0.5, True, "left")
    assert Pictures.closed == 1


@pytest.mark.parametrize("dies", [False, True])
def test_an_environment_gives_its_process_back_once(dies):
    calls = []

    class Pool:
        start_limit_s = 7.0

        async def acquire(self):
            calls.append("acquire")
            return self

        async def call(self, *arguments):
            calls.append(arguments)
            if dies and arguments[0] == "close":
                raise ProcessDied("it is gone")
            return arguments[0]

        def release(self, process):
            calls.append("release")

    async def main():
        env = ProcessEnv(Pool(), 1, 2)
        await env.close()  # never started
        assert await env.start("problem") == "start" and await env.step("left") == "step"
        await env.close()
        await env.close()
        other = ProcessEnv(Pool(), 1, 2)
        await other.wait_for_process()
        await other.start("problem")
        assert env.start_limit_s == 7.0

    asyncio.run(main())
    number = calls[1][1]
    assert calls == [
        "acquire",
        ("start", number, "problem", 1, 2),
        ("step", number, "left"),
        ("close", number),
        "release",
        "acquire",
        ("start", number + 1, "problem", 1, 2),
    ]
