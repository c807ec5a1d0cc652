"""Hostile answers: over within a second, 200 MB and without a trace."""

import os
import threading
import time
from pathlib import Path

import psutil
import pytest

from rlinf_vl.rewards import GradingTimeout, grade_math, math_grader, math_verdict
from rlinf_vl.rewards.comparison import _same_formula
from rlinf_vl.rewards.grading_pool import GradingPool

TOWER = "9^{9^{9^9}}"
TOO_MUCH = [
    TOWER,
    "9^{9^9}",
    "2^{10000000}",
    "9!!!!!!!!",
    "+" * 990 + "7",
    r"\binom{1000000}{500000}",
]
WRONG = [
    "(" * 100_000,
    "{" * 100_000 + "}" * 100_000,
    "{" * 490 + "6" + "}" * 490 + "7",
    "(" * 490 + "5" + ")" * 490,
    r"\frac{" * 150 + "1" + "}" * 150,
    r"\sqrt{" * 150 + "1" + "}" * 150,
    r"\sqrt{" * 11 + "2" + "}" * 11,
    "((((((((((6))))))))))+1",
    "6" * 1_000_000,
    "1" * 999,
    "1" * 900 + "x",
    "0." + "1" * 990,
    "10^{400000}",
    "100000!",
    "1e999999999",
    "x^{x^{x^x}}+1",
    "(x+y+z)^{300}",
    "+".join(["x"] * 400),
    r"\int_0^1 e^{x^{x}} dx",
    r"\sum_{i=1}^{1000000} i^i",
    r"\begin{pmatrix}" + "1&" * 300 + r"1\end{pmatrix}",
    r"\input{/etc/passwd}",
    "\x00",
    "6\x00",
    "\ud800",
    "6\udfff😀",
    "\u202e6\u202c",
    "\u0666",
    "ﷺ" * 900,
    *(
        unit * (999 // len(unit))
        for unit in (
            "^",
            "+",
            " ",
            "=",
            ",",
            "1,",
            r"\pm",
            "$",
            "\\",
            "=1",
            "1 ",
            "√(",
            "a=",
            "\u2003",
        )
        + (
            "**",
            r"\begin{matrix}",
            r"\matrix{",
            "A. ",
            "1:",
            "x<",
            r"\cup",
            "m ",
            "m/",
            "€",
            "x_1=",
            "P(",
            "½",
            "⁻",
            "（",
        )
    ),
]
CODE = [
    "__import__('os').system('touch {}')",
    "open('{}', 'w')",
    r"\text{{__import__}}('pathlib').Path('{}').touch()",
    "exec(\"open('{}','w')\")",
    "().__class__.__base__.__subclasses__()[0]; open('{}','w')",
    "x.subs(open('{}','w'))",
    r"\operatorname{{open}}('{}','w')",
    "1, open('{}','w')",
]


class Peak(threading.Thread):
    """The most memory, in bytes, that a process of the pool has resident, or that this one takes beyond what it had."""

    def __init__(self, pool: GradingPool) -> None:
        super().__init__()
        self.server, self.bytes, self.over, self.before = (
            pool._process.pid,
            0,
            threading.Event(),
            resident("self"),
        )

    def run(self) -> None:
        while not self.over.wait(0.005):
            workers = Path(f"/proc/{self.server}/task/{self.server}/children").read_text().split()
            self.bytes = max(
                self.bytes,
                resident("self") - self.before,
                *map(resident, workers + [str(self.server)]),
            )

    def __enter__(self) -> "Peak":
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self.over.set()
        self.join()


def resident(pid: str) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    except (OSError, IndexError):
        return 0  # it has ended


@pytest.mark.slow
@pytest.mark.parametrize("box", TOO_MUCH + WRONG, ids=lambda box: ascii(box[:24]))
def test_hostile_answers_end_within_a_second_and_200_mb(box: str, pool: GradingPool) -> None:
    math_grader._same.cache_clear()
    psutil.cpu_percent()
    begin = time.monotonic()
    with Peak(pool) as peak:
        try:
            assert math_verdict(rf"\boxed{{{box}}}", "6") is False
        except GradingTimeout:
            assert box in TOO_MUCH
        else:
            assert box != TOWER
    seconds = time.monotonic() - begin
    no_core_to_spare = psutil.cpu_percent() > 85
    assert seconds < (pool.wall_limit_s + 1 if no_core_to_spare else 1)
    assert peak.bytes < 200e6


def test_a_timeout_is_a_wrong_answer_for_those_who_want_a_bool(monkeypatch) -> None:
    def too_late(*_) -> bool:
        raise GradingTimeout("no verdict in 0.5 s")

    monkeypatch.setattr(math_grader._POOL, "same", too_late)
    assert grade_math(rf"\boxed{{7+{TOWER}}}", "6") is False


def test_megabytes_around_the_box_cost_nothing() -> None:
    begin = time.monotonic()
    assert math_verdict("{" * 5_000_000 + r"\boxed{6}" + "}" * 5_000_000, "6")
    assert not math_verdict("6" * 5_000_000, "6")
    assert not math_verdict(r"\boxed{" + "6" * 5_000_000, "6")
    assert math_verdict(r"\boxed{5}" * 500_000 + r"\boxed{6}", "6")
    assert time.monotonic() - begin < 1


def test_no_answer_runs_as_code(pool: GradingPool, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    for code in CODE:
        text = code.format(touched)
        assert not grade_math(rf"\boxed{{{text}}}", "0"), code
        assert not pool.same(text, "0"), code  # straight to the worker
        assert not _same_formula(text, "0", algebra=True), code  # straight to the parser
    assert not touched.exists()
