"""The box that counts, hostile answers, time limits, threads, and the life of the grading process."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from rlinf_vl.rewards import grade_math, grader, math_grader
from rlinf_vl.rewards.grading_pool import GradingPool
from rlinf_vl.rewards.latex import last_boxed

TOWER = "9^{9^{9^9}}"


@pytest.mark.parametrize(
    ("response", "right"),
    [
        (r"\boxed{6}", True),
        (r"\boxed{5} no, wait: \boxed{6}", True),
        (r"\boxed{6} no, wait: \boxed{5}", False),
        (r"\boxed{6} or perhaps \boxed{", False),
        (r"\boxed{6} or perhaps \boxed{5", False),
        (r"\boxed{6} and then 7", True),
        (r"\boxed{{6}}", True),
        (r"\boxed{ \boxed{6} }", True),
        (r"\boxed {6}", True),
        ("\\boxed{\n6\n}", True),
        (r"\boxed{x = \text{6}}", True),
        (r"\boxed{}", False),
        (r"\boxed{ }", False),
        (r"\boxed", False),
        (r"\boxed 6", False),
        (r"\boxed{6", False),
        (r"\boxed{\{6}", False),
        (r"boxed{6}", False),
        ("6", False),
        ("The answer is 6.", False),
        ("", False),
    ],
)
def test_only_the_last_balanced_box_counts(response: str, right: bool) -> None:
    assert grade_math(response, "6") is right


def test_an_answer_in_a_broken_box_is_nobodys() -> None:
    assert not grade_math(r"\boxed{6}", r"\boxed{6")
    assert not grade_math(r"\boxed{6}", "")


def test_escaped_braces_do_not_close_the_box() -> None:
    assert last_boxed(r"\boxed{\{1, 2\}}", 100) == r"\{1, 2\}"


@pytest.mark.parametrize(
    "box",
    [
        "(" * 100_000,
        "{" * 100_000 + "}" * 100_000,
        r"\frac{" * 150 + "1" + "}" * 150,
        "{" * 490 + "6" + "}" * 490 + "7",
        "(" * 490 + "5" + ")" * 490,
        r"\sqrt{" * 150 + "1" + "}" * 150,
        "6" * 1_000_000,
        "1" * 999,
        "9!!!!!!!!",
        "((((((((((6))))))))))+1",
        "__import__('os').system('true')",
        r"\text{__import__}(os)",
        r"\input{/etc/passwd}",
        "\x00\ud800😀",
        "^" * 999,
        "+" * 999,
        " " * 999,
        "=" * 999,
        "," * 999,
        "1," * 400,
        r"\pm" * 300,
        "$" * 999,
        "\\" * 999,
    ],
)
def test_hostile_answers_are_wrong_and_soon_over(box: str) -> None:
    grade_math(r"\boxed{\sqrt{4}}", "2")  # the worker is up
    begin = time.monotonic()
    assert grade_math(rf"\boxed{{{box}}}", "6") is False
    assert time.monotonic() - begin < 10  # the limit is 1.5 s; a loaded machine may need more


def test_megabytes_around_the_box_cost_nothing() -> None:
    begin = time.monotonic()
    assert grade_math("{" * 5_000_000 + r"\boxed{6}" + "}" * 5_000_000, "6")
    assert not grade_math("6" * 5_000_000, "6")
    assert not grade_math(r"\boxed{" + "6" * 5_000_000, "6")
    assert time.monotonic() - begin < 2


def test_a_number_tower_is_cut_off_and_the_next_question_answered() -> None:
    pool = GradingPool(limit_s=0.5)
    try:
        assert pool.same(r"\sqrt{4}", "2")
        first = pool._process.pid
        begin = time.monotonic()
        assert not pool.same(TOWER, "6")
        assert time.monotonic() - begin < 5
        assert not psutil.pid_exists(first)
        assert pool.same(r"\sqrt{4}", "2")
    finally:
        pool.close()


def test_a_worker_that_was_killed_is_replaced_without_a_wrong_verdict() -> None:
    pool = GradingPool(limit_s=30)
    try:
        assert pool.same(r"\sqrt{4}", "2")
        os.kill(pool._process.pid, signal.SIGKILL)
        pool._process.wait()
        assert pool.same(r"\sqrt{4}", "2")
    finally:
        pool.close()


def test_many_threads_get_their_own_verdicts() -> None:
    factors = list(range(2, 10))
    pairs = [(a, b) for a in factors for b in factors]
    with ThreadPoolExecutor(8) as threads:
        responses = [rf"\boxed{{\sqrt{{{3 * a * a}}}}}" for a, _ in pairs]
        verdicts = list(threads.map(grade_math, responses, [rf"{b}\sqrt{{3}}" for _, b in pairs]))
    assert verdicts == [a == b for a, b in pairs]


def _grade_in_child(results: multiprocessing.SimpleQueue) -> None:
    results.put(grade_math(r"\boxed{\sqrt{12}}", r"2\sqrt{3}"))
    math_grader.stop_grading()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # newer Pythons warn of forking with threads
def test_a_forked_child_has_a_worker_of_its_own() -> None:
    assert grade_math(r"\boxed{\sqrt{12}}", r"2\sqrt{3}")
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=_grade_in_child, args=(results,))
    child.start()
    child.join(60)
    assert child.exitcode == 0 and results.get() is True
    assert grade_math(r"\boxed{\sqrt{27}}", r"3\sqrt{3}")


def test_plain_numbers_start_no_process() -> None:
    script = (
        "from rlinf_vl.rewards import grade_math, math_grader\n"
        "assert grade_math(r'\\boxed{8.660}', '8.66') and not grade_math(r'\\boxed{7}', '8')\n"
        "assert math_grader._POOL._process is None\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "computing"])
def test_the_worker_dies_with_a_parent_that_was_killed(busy: bool) -> None:
    script = (
        "import os, threading, time\n"
        "from rlinf_vl.rewards.grading_pool import GradingPool\n"
        "pool = GradingPool(limit_s=1)\n"
        "pool.same(r'\\sqrt{4}', '2')\n"
        f"question = {TOWER if busy else '6'!r}\n"
        "threading.Thread(target=pool.same, args=(question, '6')).start()\n"
        "print(pool._process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    with parent:
        worker = psutil.Process(int(parent.stdout.readline()))
        time.sleep(0.2)
        parent.kill()
    gone, _ = psutil.wait_procs([worker], timeout=30)
    assert gone


def test_a_script_without_a_main_guard_is_not_run_twice(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "print('begin')\nfrom rlinf_vl.rewards import grade_math\nprint(grade_math(r'\\boxed{\\sqrt{4}}', '2'))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(math_grader.__file__).parents[2])}
    run = subprocess.run([sys.executable, script], cwd=tmp_path, env=environment, text=True, stdout=-1, timeout=60)
    assert run.stdout.split() == ["begin", "True"]


def test_every_real_answer_is_itself_and_not_seven_times_itself(geo3k_dir: Path) -> None:
    tables = [pq.read_table(geo3k_dir / f"{split}.parquet", columns=["answer"]) for split in ("train", "test")]
    answers = [answer for table in tables for answer in table["answer"].to_pylist()]
    assert len(answers) == 401
    for answer in answers:
        number = answer.removeprefix(r"\boxed{").removesuffix("}")
        assert grade_math(answer, answer), answer
        assert grade_math(rf"so $x = \boxed{{{number}}}$.", answer), answer
        if float(number) == 0:
            continue
        for factor in (7, 100, 0.01, -1):
            assert not grade_math(rf"\boxed{{{float(number) * factor:.10g}}}", answer), (answer, factor)
        assert not grade_math(rf"\boxed{{{number}7}}", answer) or "." in number, answer


def test_graders_are_found_by_name() -> None:
    assert grader("math") is grade_math
    with pytest.raises(ValueError, match=r"reward\.reward_type: no grader 'maths'; .*did you mean 'math'\?"):
        grader("maths")
