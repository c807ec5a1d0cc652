"""Users' code on the thread that waits for groups: results as in processes and threads, and the end that a debugger asks for."""

import asyncio
import threading
from bdb import BdbQuit
from functools import partial

import pytest

from rlinf_vl.driver.local.event_loop import CallersLoop
from rlinf_vl.driver.local.user_code import DirectExecutor, DirectFunctions
from rlinf_vl.rewards.grading_pool import GradingError
from rlinf_vl.rewards.processes import Limits
from rlinf_vl.rewards.result import Answer
from rlinf_vl.types import Problem

FUNCTIONS = """
import asyncio
import threading
from bdb import BdbQuit

threads = []


def direct(response, answer):
    threads.append(threading.current_thread())
    return float(response == answer)


async def late(response, answer):
    await asyncio.sleep(0.01)
    return float(response == answer)


def fails(response, answer):
    raise KeyError("nothing here")


def quits(response, answer):
    raise BdbQuit
"""
PROBLEM = Problem("p", (), "a")
ANSWERS = [Answer("a", "a"), Answer("b", "b")]


def submit(tmp_path, name: str) -> list:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    functions = DirectFunctions([(f"{path}:{name}", {})], {}, Limits(1.0, 1.0, 1))
    return functions.submit(0, PROBLEM, ANSWERS, images=False, together=False)


@pytest.mark.parametrize("name", ["direct", "late"])
@pytest.mark.parametrize("in_loop", [False, True], ids=["script", "notebook"])
def test_values_are_there_at_once(tmp_path, name, in_loop):
    async def cell():
        return submit(tmp_path, name)

    futures = asyncio.run(cell()) if in_loop else submit(tmp_path, name)
    assert [future.result(0).value for future in futures] == [1.0, 0.0]


def test_an_error_is_no_verdict_and_printed_once(tmp_path, capsys):
    for future in submit(tmp_path, "fails"):
        assert isinstance(future.exception(0), GradingError)
    assert capsys.readouterr().err.count("KeyError: 'nothing here'") == 1


def test_leaving_the_debugger_ends_the_run(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        submit(tmp_path, "quits")


class Env:
    async def start(self, problem):
        await asyncio.sleep(0.01)
        return threading.current_thread()

    def step(self, response):
        return threading.current_thread()

    def stops(self):
        raise StopIteration

    def quits(self):
        raise BdbQuit

    async def close(self):
        raise ValueError("closed badly")


def test_calls_of_environments_are_on_the_callers_thread():
    executor, env, loop = DirectExecutor(), Env(), CallersLoop()

    def call(function, *arguments):
        return loop.run(executor.call(partial(function, *arguments), on_begin=lambda _: None))

    assert call(env.start, PROBLEM) is call(env.step, "") is threading.main_thread()
    with pytest.raises(RuntimeError, match="StopIteration"):
        call(env.stops)

    async def close():
        return await asyncio.wrap_future(executor.begin_close(env.close))

    with pytest.raises(ValueError, match="closed badly"):
        loop.run(close())
    with pytest.raises(KeyboardInterrupt):
        call(env.quits)
    loop.close()
