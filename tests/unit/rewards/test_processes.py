"""Functions that misbehave: nothing but their own verdict is lost, and what they leave is ended."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlinf_vl.rewards.processes import Limits
from rlinf_vl.rewards.result import Answer
from rlinf_vl.rewards.scoring import make_scorer
from rlinf_vl.types import Problem
from rlinf_vl.user_code import pickled

PROBLEM = Problem("p:0", (), "42")
CODE = """
import ctypes, os, re, subprocess, sys, time
calls = 0

def wild(response, answer):
    global calls
    calls += 1
    if response == "loops":
        while True: pass
    if response == "backtracks":  # holds the interpreter's lock
        re.match(r"(a+)+$", "a" * 64 + "b")
    if response == "sleeps":
        subprocess.Popen(["sleep", "1000"])
        time.sleep(1000)
    if response == "exits": os._exit(3)
    if response == "leaves": sys.exit("bye")
    if response == "crashes": ctypes.string_at(0)
    if response == "bomb":
        kept = []
        while True: kept.append(bytearray(64 << 20))
    if response == "raises": raise KeyError("no such thing")
    if response == "text": return "one"
    if response == "infinite": return float("inf")
    print("it says something")
    return {"score": 1.0, "calls": calls, "pid": os.getpid()}
"""
HANGS = {
    "loops": "no result within reward.timeout=2 s",
    "backtracks": "no result within",
    "sleeps": "no result within",
}
WILD = {
    "exits": "exit status 3",
    "leaves": "SystemExit: bye",
    "crashes": "signal SIGSEGV",
    "bomb": "more than 0.25 GiB beyond the imports",
    "raises": "KeyError: 'no such thing'",
    "text": "it returned str 'one'; return a number",
    "infinite": "it returned inf",
}


def scorer_of(tmp_path: Path, code: str, name: str, **limits):
    file = tmp_path / "functions.py"
    file.write_text(code)
    own = Limits(**({"timeout_s": 2.0, "memory_gb": 0.25, "processes": 2} | limits))
    return make_scorer(
        [{"function": f"{file}:{name}"}], reward_max=1.0, reward_min=0.0, files={}, limits=own
    )


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_not_graded(score, reason):
    assert reason in score.ungraded[0] and len(score.ungraded) == 1
    assert (score.reward, score.correct, score.fault) == (0.0, False, None)


@pytest.mark.slow
def test_a_function_that_hangs_is_data(tmp_path):
    scorer = scorer_of(tmp_path, CODE, "wild")
    try:
        scores = asyncio.run(scorer(PROBLEM, [Answer(text, text) for text in HANGS]))
        for text, score in zip(HANGS, scores, strict=True):
            assert_not_graded(score, HANGS[text])
        # The next call gets a new process. On a busy machine it may take longer than the timeout.
        deadline = time.monotonic() + 120
        while asyncio.run(scorer(PROBLEM, [Answer("fine", "fine")]))[0].reward != 1.0:
            assert time.monotonic() < deadline
    finally:
        scorer.close()


@pytest.mark.slow
def test_whatever_a_function_does_is_data(tmp_path):
    # No call comes near the timeout, however busy the machine is.
    scorer = scorer_of(tmp_path, CODE, "wild", timeout_s=60.0)
    said = [*WILD, *["fine"] * 6]
    try:
        scores = asyncio.run(scorer(PROBLEM, [Answer(text, text) for text in said]))
        processes = {int(score.parts["wild.pid"]) for score in scores[len(WILD) :]}
    finally:
        scorer.close()
    for text, score in zip(said, scores, strict=True):
        if text == "fine":
            assert (score.reward, score.correct, score.ungraded) == (1.0, True, ())
        else:
            assert_not_graded(score, WILD[text])
    assert 1 <= len(processes) <= 2, "a process serves many calls"
    deadline = time.monotonic() + 30
    while any(map(alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, processes)), "closing ends them"


@pytest.mark.slow
def test_what_a_function_starts_ends_with_it(tmp_path):
    mark = tmp_path / "pid"
    code = f"""
import subprocess, time
def f(response, answer):
    child = subprocess.Popen(["sleep", "1000"])
    open({str(mark)!r}, "w").write(str(child.pid))
    time.sleep(1000)
"""
    scorer = scorer_of(tmp_path, code, "f", timeout_s=0.5)
    try:
        (score,) = asyncio.run(scorer(PROBLEM, [Answer("a", "a")]))
    finally:
        scorer.close()
    assert "no result" in score.ungraded[0]
    child, deadline = int(mark.read_text()), time.monotonic() + 30
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(child)


def test_a_death_is_seen_though_a_child_holds_the_pipe(tmp_path):
    code = """
import os, time
def f(response, answer):
    if not os.fork():
        time.sleep(1000)
    os._exit(7)
"""
    scorer = scorer_of(tmp_path, code, "f", timeout_s=20.0)
    try:
        (score,) = asyncio.run(scorer(PROBLEM, [Answer("a", "a")]))
    finally:
        scorer.close()
    assert_not_graded(score, "its process ended with exit status 7")


def test_a_function_that_waits_ends_with_its_killed_parent(tmp_path):
    mark, file = tmp_path / "pid", tmp_path / "functions.py"
    file.write_text(f"""
import os, time
def f(response, answer):
    open({str(mark)!r}, "w").write(str(os.getpid()) + ".")
    time.sleep(1000)
""")
    code = f"""
import asyncio
from rlinf_vl.rewards.processes import Limits, ProcessPool
from rlinf_vl.rewards.result import Answer
from rlinf_vl.types import Problem
pool = ProcessPool([({str(file) + ":f"!r}, {{}})], {{}}, Limits(1000.0, 0.25, 1))
pool.submit(0, Problem("p", (), ""), [Answer("a", "a")], images=False, together=False)[0].result()
"""
    parent = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 60
    while not (mark.exists() and mark.read_text().endswith(".")):
        assert time.monotonic() < deadline and parent.poll() is None
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    child = int(mark.read_text().rstrip("."))
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(child)


@pytest.mark.slow
def test_coroutines_of_a_group_wait_together_and_end_alone(tmp_path):
    code = """
import asyncio
waiting = 0
async def f(response, answer):
    global waiting
    waiting += 1
    if response == "late":
        await asyncio.sleep(1000)
    while waiting < 9:  # until all others are there
        await asyncio.sleep(0.01)
    return 1.0
"""
    scorer = scorer_of(tmp_path, code, "f", timeout_s=5.0, processes=1)
    try:
        scores = asyncio.run(
            scorer(PROBLEM, [Answer(text, text) for text in [*["fine"] * 8, "late"]])
        )
    finally:
        scorer.close()
    assert [score.reward for score in scores] == [1.0] * 8 + [0.0]
    assert "no result within reward.timeout=5 s" in scores[-1].ungraded[0]


def test_a_file_that_cannot_be_imported_in_the_process_is_no_fault_of_the_answers(
    tmp_path, monkeypatch
):
    code = "import os\nassert os.environ.get('HERE') == '1', 'not here'\ndef f(response, answer): return 1.0\n"
    monkeypatch.setenv("HERE", "1")
    scorer = scorer_of(tmp_path, code, "f")
    monkeypatch.delenv("HERE")
    try:
        (score,) = asyncio.run(scorer(PROBLEM, [Answer("a", "a")]))
    finally:
        scorer.close()
    assert score.fault is not None and "doesn't start" in score.fault and "not here" in score.fault


def test_functions_of_the_same_name_are_told_apart_and_a_group_may_be_cancelled(tmp_path):
    (tmp_path / "a.py").write_text("def f(response, answer): return 0.25\n")
    (tmp_path / "b.py").write_text(
        "import time\ndef f(response, answer):\n    time.sleep(0.2)\n    return 0.5\n"
    )
    entries = [{"function": f"{tmp_path}/{name}.py:f"} for name in "ab"]
    scorer = make_scorer(
        entries, reward_max=1.0, reward_min=0.0, files={}, limits=Limits(60.0, 1.0, 1)
    )

    async def cancelled():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await scorer(PROBLEM, [Answer("a", "a")] * 100)
        return await scorer(PROBLEM, [Answer("a", "a")])

    try:
        (score,) = asyncio.run(cancelled())
    finally:
        scorer.close()
    assert score.parts == {"f": 0.25, "f_2": 0.5}


@pytest.mark.slow
def test_a_function_of_a_notebook_goes_to_the_processes_with_what_it_holds():
    bonus = {"42": 0.5}
    name, path, text = pickled(
        lambda response, answer: bonus.get(answer, 0.0) + (answer in response)
    )
    files = {path: text}
    scorer = make_scorer(
        [{"function": name}],
        reward_max=1.0,
        reward_min=0.0,
        files=files,
        limits=Limits(60.0, 1.0, 1),
    )
    try:
        scores = asyncio.run(scorer(PROBLEM, [Answer("42", "42"), Answer("41", "41")]))
    finally:
        scorer.close()
    assert [score.reward for score in scores] == [1.5, 0.5]


def test_nothing_is_started_for_functions_that_have_names():
    before = set(os.listdir("/proc/self/task"))
    scorer = make_scorer(
        [{"function": "math"}], reward_max=1.0, reward_min=0.0, files={}, limits=Limits(1.0, 1.0, 4)
    )
    assert set(os.listdir("/proc/self/task")) == before
    (score,) = asyncio.run(scorer(PROBLEM, [Answer("\\boxed{42}", "\\boxed{42}")]))
    assert (score.reward, score.parts, score.correct) == (1.0, {"math": 1.0}, True)
    scorer.close()
