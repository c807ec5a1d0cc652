"""Limits of time and memory, threads, and the life of the grading processes."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from rlinf_vl.rewards import (
    GradingError,
    GradingTimeout,
    grade_math,
    grading_pool,
    math_grader,
    math_verdict,
    stop_grading,
)
from rlinf_vl.rewards.grading_pool import GradingPool

TOWER = "9^{9^{9^9}}"


def test_the_worker_cannot_take_more_memory() -> None:
    script = (
        "from rlinf_vl.rewards import grading_pool\n"
        "grading_pool.limit(10, 10)\n"
        "some = bytearray(50 << 20)\n"
        "try:\n    bytearray(60 << 20)\nexcept MemoryError:\n    print('no more')\n"
    )
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60).stdout
        == b"no more\n"
    )


def test_a_worker_without_memory_has_no_verdict(monkeypatch) -> None:
    def same(*_, algebra: bool) -> bool:
        raise MemoryError

    monkeypatch.setattr(grading_pool, "same", same)
    assert grading_pool.reply_to(b'["x", "6"]') == b"m"
    pool = GradingPool()
    monkeypatch.setattr(pool, "_server", lambda: None)
    monkeypatch.setattr(pool, "_ask", lambda *_: b"m")
    with pytest.raises(GradingTimeout, match="memory"):
        pool.same("x", "6")


@pytest.mark.slow
def test_the_next_question_has_the_same_server(pool: GradingPool) -> None:
    pid = pool._process.pid
    with pytest.raises(GradingTimeout):
        pool.same(TOWER, "6")
    assert pool.same(r"\sqrt{4}", "2") and pool._process.pid == pid
    time.sleep(0.1)
    assert not psutil.Process(pid).children()


@pytest.mark.slow
def test_a_server_that_stands_still_is_replaced(pool: GradingPool, monkeypatch) -> None:
    monkeypatch.setattr(pool, "wall_limit_s", 0.5)
    pid = pool._process.pid
    os.kill(pid, signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(GradingTimeout, match="no verdict in"):
        pool.same(r"\sqrt{9}", "3")
    assert time.monotonic() - begin < 5
    assert not psutil.pid_exists(pid)
    assert pool.same(r"\sqrt{9}", "3")


@pytest.mark.slow
def test_a_server_that_was_killed_is_replaced_without_a_wrong_verdict(
    pool: GradingPool, monkeypatch
) -> None:
    monkeypatch.setattr(pool, "limit_s", 30)  # nothing is late
    os.kill(pool._process.pid, signal.SIGKILL)
    assert pool.same(r"\sqrt{4}", "2")


@pytest.mark.slow
@pytest.mark.parametrize("is_sent", [False, True], ids=["queued", "sent"])
def test_a_question_that_no_worker_got_is_asked_again(
    pool: GradingPool, monkeypatch, is_sent: bool
) -> None:
    """Whether it queues while the server dies, or lies unread in the server's socket."""
    slots = threading.Semaphore(1)
    monkeypatch.setattr(pool, "_slots", slots)
    pid = pool._process.pid
    if is_sent:
        os.kill(pid, signal.SIGSTOP)
    else:
        slots.acquire()
    with ThreadPoolExecutor(1) as threads:
        verdict = threads.submit(pool.same, r"\sqrt{25}", "5")
        time.sleep(pool.limit_s)
        os.kill(pid, signal.SIGKILL)
        if not is_sent:
            slots.release()
        assert verdict.result(60)


def test_two_dead_workers_are_no_verdict(monkeypatch) -> None:
    pool = GradingPool()
    monkeypatch.setattr(pool, "_server", lambda: None)
    monkeypatch.setattr(pool, "_ask", lambda *_: b"")
    with pytest.raises(GradingError, match="died twice") as error:
        pool.same("x", "6")
    assert not isinstance(error.value, GradingTimeout)


@pytest.mark.slow
def test_many_threads_get_their_own_verdicts() -> None:
    stop_grading()  # they all want to start the server
    pairs = [(a, b) for a in range(2, 8) for b in range(2, 8)] + [(TOWER, 2)]
    with ThreadPoolExecutor(8) as threads:
        responses = [rf"\boxed{{\sqrt{{3}}\cdot {a}}}" for a, _ in pairs]
        verdicts = list(threads.map(grade_math, responses, [rf"{b}\sqrt{{3}}" for _, b in pairs]))
    assert verdicts == [a == b for a, b in pairs]


def _grade_in_child(results: multiprocessing.SimpleQueue) -> None:
    results.put(grade_math(r"\boxed{\sqrt{28}}", r"2\sqrt{7}"))
    stop_grading()


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # newer Pythons warn of forking with threads
def test_a_forked_child_has_a_server_of_its_own() -> None:
    assert math_verdict(r"\boxed{\sqrt{12}}", r"2\sqrt{3}")
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=_grade_in_child, args=(results,))
    child.start()
    child.join(60)
    assert child.exitcode == 0 and results.get() is True
    assert math_verdict(r"\boxed{\sqrt{27}}", r"3\sqrt{3}")


def test_simple_arithmetic_starts_no_process() -> None:
    script = (
        "from rlinf_vl.rewards import grade_math, math_grader\n"
        "for box in ('8.660', 'x = 8.66', r'8.66^\\circ', r'm\\angle A = 8.66', r'8.66\\text{ cm}', r'\\frac{866}{100}'):\n"
        "    assert grade_math(r'\\boxed{%s}' % box, r'\\boxed{8.66}'), box\n"
        "for box in ('7', 'x = 7', 'no idea', '7, 8', '1 2 3', '(8.66, 1)'):\n"
        "    assert not grade_math(r'\\boxed{%s}' % box, r'\\boxed{8.66}'), box\n"
        "assert math_grader._POOL._process is None\n"
        "import sys\n"
        "assert 'sympy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["starting", "idle", "computing"])
def test_nothing_is_left_of_a_parent_that_was_killed(state: str) -> None:
    script = (
        "import threading, time\n"
        "from rlinf_vl.rewards.grading_pool import GradingPool\n"
        "pool = GradingPool()\n"
        f"if {state != 'starting'}: pool.same('x', '6')\n"
        f"question = {'6' if state == 'idle' else TOWER!r}\n"
        "threading.Thread(target=pool.same, args=(question, '6')).start()\n"
        "while pool._process is None: time.sleep(0.001)\n"
        "print(pool._process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as parent:
        server = psutil.Process(int(parent.stdout.readline()))
        time.sleep(0 if state == "starting" else 0.3)
        processes = [server, *server.children()]
        assert len(processes) == (2 if state == "computing" else 1)
        parent.kill()
    deadline = time.monotonic() + 30
    while any(_runs(process) for process in processes):
        assert time.monotonic() < deadline, processes
        time.sleep(0.01)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE  # not every container reaps orphans at once
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_a_script_without_a_main_guard_is_not_run_twice(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "print('begin')\nfrom rlinf_vl.rewards import grade_math\nprint(grade_math(r'\\boxed{\\sqrt{4}}', '2'))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(math_grader.__file__).parents[2])}
    run = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environment, text=True, stdout=-1, timeout=60
    )
    assert run.stdout.split() == ["begin", "True"]
