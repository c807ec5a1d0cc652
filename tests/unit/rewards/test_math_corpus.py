"""The corpus, `corpus/math.jsonl`: pairs of a response and a reference, whether each is paid, and why.

A line is a JSON object: response, answer, paid, why, and, where the row has other columns that count, row.
"""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rlinf_vl.rewards import GradingTimeout, grade_math, math_verdict

CORPUS = Path(__file__).parent / "corpus" / "math.jsonl"
PAIRS = [json.loads(line) for line in CORPUS.read_text(encoding="utf-8").splitlines()]

#: Right answers that are refused, since no rule that pays them is known not to pay wrong ones: (box, reference, why).
EXCEPTIONS = [
    ("1 < x < 2", "(1,2)", "the reference may be a point"),
    ("0.75", "3:4", "the reference may be a time of day, and a decimal shows no terms"),
    ("5000 m", "5 km", "units are compared and never converted"),
    ("2, 3", "(2,3)", "a list has no order, a point does"),
    ("0,5", "0.5", "a comma may part a list"),
    ("0.5", r"50\%", "a number a hundredth of the percentage may be a slip"),
    (r"\frac{\pi}{3}", r"60^\circ", "an angle in the other measure answers another question"),
    ("The answer is 5", "5", "a sentence may say anything"),
    ("1/3", "0.3", "a reference of a single digit stands for itself"),
    ("28.3", "28.27", "fewer places than the reference"),
]

#: Values within values, and formulas: (box, reference, whether it is paid).
NESTED = [
    ("C. 8.6603", "C. 8.66", True),
    ("8.6603", "C. 8.66", True),
    ("C. 8.7", "C. 8.66", False),
    ("C", "C. 8.66", True),
    ("B. 8.66", "C. 8.66", False),
    ("(C)", "C", True),
    ("(D)", "C", False),
    ("C. 8.66", "C", True),
    ("8.6603, 1", "1, 8.66", True),
    ("8.66, 1", "1, 8.6603", False),
    ("P(8.6603, 1)", "P(8.66, 1)", True),
    ("(8.6603, 1)", "P(8.66, 1)", True),
    ("P(8.6603, 1)", "(8.66, 1)", True),
    ("P(1, 2)", "Q(1, 2)", False),
    ("P(1,2)", "Q(1, 2.0)", False),
    ("(1,2)", "1,2.0", False),
    ("8, 7, 6, 5, 4, 3, 2, 1", "1, 2, 3, 4, 5, 6, 7, 8", True),
    ("9, 8, 7, 6, 5, 4, 3, 2, 1", "1, 2, 3, 4, 5, 6, 7, 8, 9", False),
    ("(2.0, 1)", "(2, 1)", True),
    ("(1, 2.0)", "(2, 1)", False),
    ("1, 1, 2.0", "1, 2, 2", False),
    (r"\begin{pmatrix}8.6603 & 1\end{pmatrix}", r"\begin{pmatrix}8.66 & 1\end{pmatrix}", True),
    (r"\begin{pmatrix}1 & 2.0\end{pmatrix}", r"\begin{pmatrix}1 \\ 2\end{pmatrix}", False),
    (r"\begin{pmatrix}1 & 3.0\end{pmatrix}", r"\begin{pmatrix}1 & 2\end{pmatrix}", False),
    (r"\begin{pmatrix}1 & 2.0\\3&4\end{pmatrix}", r"\begin{pmatrix}1 & 2\end{pmatrix}", False),
    (r"A = \begin{pmatrix}1 & 2.0\end{pmatrix}", r"\begin{pmatrix}1 & 2\end{pmatrix}", True),
    ("7", r"\begin{pmatrix}1 & 2\end{pmatrix}", False),
    (r"\begin{pmatrix}1 & 2\end{pmatrix}", "7", False),
    ("6:8", "3:4", True),
    ("6:8:10", "3:4:5", True),
    ("6:8:10", "3:4:6", False),
    ("3:4", "3:4:5", False),
    ("3/4", "3:4", True),
    ("4/3", "3:4", False),
    (r"\frac{3}{4}", "3:40", False),
    ("0.75", "3:8", False),
    ("3:4", "7", False),
    ("7", "3:4", False),
    ("3:a", "3:4", False),
    ("3:4", "3:a", False),
    ("6:90", "3:45", False),
    ("3:45", "3:45.0", True),
    ("0:1", "0:2", False),
    ("1:0", "2:0", False),
    ("2/0", "2:0", False),
    ("0.75/1", "3:4", False),
    ("3:4", "4:3", False),
    ("1:2:3", "1:2", False),
    ("12:16", "3:4", True),
    ("6:8", "3: 4", True),
    ("1:75", "2:150", True),
    ("x > 8.6603", "x > 8.66", True),
    ("x > 8.66", "x > 8.6603", False),
    (r"x \ge 3.0", "x > 3", False),
    ("x > 3", r"(3, \infty)", True),
    (r"(3.0, \infty)", "x > 3", True),
    ("1.0 < x < 2", "1 < x < 2", True),
    ("(1, 2)", "1 < x < 2", True),
    ("1 < x < 2", "[1, 2)", False),
    (r"1 \le x < 2", "[1, 2)", True),
    (r"x < 1.0 \text{ or } x > 2", r"x > 2 \text{ or } x < 1", True),
    (r"x < 1 \text{ or } x > 3.0", r"x > 2 \text{ or } x < 1", False),
    (r"x < 1 \text{ or } y > 2.0", r"x < 1 \text{ or } x > 2", False),
    (r"(1,2.0) \cup (3,4)", r"(3,4) \cup (1,2)", True),
    (r"(1,2) \cup (3,5.0)", r"(3,4) \cup (1,2)", False),
    ("(1,2)", r"(3,4) \cup (1,2)", False),
    (r"(3,4) \cup (1,2)", "(1,2)", False),
    (r"(1,2) \cup (1,2.0)", r"(1,2) \cup (3,4)", False),
    ("7", r"(3,4) \cup (1,2)", False),
    ("1 < x < 2", "{1, 2}", False),
    ("AB = 12.0", "BA = 12", True),
    ("AB = 12.0", "AC = 12", False),
    ("x_1 = 3.0", "x = 3", True),
    ("x_1 = 3.0", "x_2 = 3", False),
    ("x = 3.0", "x_1 = 3", True),
    ("ab = 3.0", "ba = 3", False),
    ("AB = BC", "CB = BA", True),
    ("AB = BC", "CB = BD", False),
    ("A = B", "B", False),
    ("AB = CD", "CD", True),
    ("x = 7 = 7.0", "7", True),
    ("x = 7 = 8", "7", False),
    ("7.0", "x = 7", True),
    ("x = 7.0", "y = 7", False),
    ("x = y = 3.0", "x = 3", True),
    ("x = 8.6603", "8.66", True),
    ("x = 8.66", "8.6603", False),
    ("8.6603", "x = 8.66", True),
    ("(1, 2.0)", "(1, 2)", True),
    ("25 %", "25.0", False),
    ("25.0", r"25 \%", True),
    ("12.0 cm", "12 m", False),
    ("12.0 cm", "12", True),
    ("12.0", "12 cm", True),
    ("12.0 m", "12 m", True),
    ("cm", "12 cm", False),
    ("C", "(C):", True),
    ("3/1", "3:1", True),
    ("1/2", "0:0", False),
    ("3:4", "word", False),
    ("word", "3:4", False),
    (r"(1,2) \cup (3,4.0)", r"(1,2) \cup (3,4) \cup (5,6)", False),
    (r"(1,2) \cup (3,4) \cup (5,6.0)", r"(1,2) \cup (3,4)", False),
    (r"(1,2) \cup (3,4) \cup (5,6.0)", r"(1,2) \cup (3,4) \cup (5,6)", True),
    ("x < 1, y > 2.0", "x < 1, x > 2", False),
    ("x = (8.6603, 2)", "(8.66, 2)", True),
    ("AB = T", "T", True),
    ("A = XY", "XY", False),
    ("-10^3", "-1000", True),
    ("10^3", "-1000", False),
    ("1210", r"1.2 \times 10^3", False),
    ("1.204e3", r"1.20 \times 10^3", True),
    ("3 0/5", "3", True),
    (r"2.00 \times 10^3", "1999", False),
    (r"2.00 \times 10^3", "3999/2", True),
    ("1.13", "9/8", True),
    ("1.12", "9/8", True),
    ("1.14", "9/8", False),
    ("1.1", "9/8", False),
    (r"\begin{pmatrix}1 & 2.0 \\ \end{pmatrix}", r"\begin{pmatrix}1 & 2\end{pmatrix}", True),
]  # fmt: skip
FORMULAS = [
    (r"-\sqrt{2}", r"\sqrt{2}", False),
    ("y = x", "x - y = 0", True),
    ("2x+1", "1+2x", True),
    ("2x+1", "2x+2", False),
    ("y = x", "x = y", True),
    ("2x = 2y", "y = x", True),
    ("y = -x", "y = x", False),
    ("x+y=1", "2x+2y=2", True),
    (r"\sqrt{12}", r"2\sqrt{3}", True),
    (r"\sqrt{12}", "3.46", True),
    (r"\sqrt{12}", "3.6", False),
    ("3.46", r"\sqrt{12}", True),
    ("3.5", r"\sqrt{12}", False),
    ("2X", "2x", False),
    ("6t", "6", False),
    ("6", "6t", False),
    (r"\sqrt{-1}", "1", False),
    ("4.437", "2e-1", True),
    ("P(x, 1)", "P(x, 1.0)", True),
    ("y = 2x+1", "2x+1", True),
    ("x = 2y", "y = 2x", False),
    ("2x = 6", "x = 3", True),
    ("a < 2x", "2x > a", True),
    ("a < 2x", r"2x \ge a", False),
    ("-x < 1", "x > -1", True),
    ("x < 1a", "x > 1a", False),
    (r"\frac{1}{10^{9}}\sqrt{2}", r"\frac{2}{10^{9}}\sqrt{2}", False),
    (r"\sqrt{2}", r"\frac{2}{\sqrt{2}}", True),
    ("x", "7a", False),
    ("7+0a", "x", False),
    (r"x > \sqrt{4}", "x > 2", True),
    ("x = 2a+1", "1+2a", True),
    ("y = 2x + 1 = 3", "y = 2x+1", False),
]  # fmt: skip


def verdict(response: str, answer: str) -> bool:
    """Grade as a reward does, where no verdict is no reward; a slow machine's missing verdict gets a second try."""
    try:
        return math_verdict(response, answer)
    except GradingTimeout:
        return grade_math(response, answer)


def test_each_pair_without_algebra_and_some_formulas_are_judged_in_this_process(misjudged) -> None:
    """Without a process that grades, all of them take a moment."""
    pairs = [(pair["response"], pair["answer"], pair["paid"]) for pair in PAIRS]
    pairs += [(rf"\boxed{{{box}}}", answer, False) for box, answer, _ in EXCEPTIONS]
    assert not misjudged(pairs)
    wide = r"\\".join(["1&2&3&4"] * 4)  # as many cells as are compared, and more
    matrix = r"\begin{{pmatrix}}{}\end{{pmatrix}}".format
    nested = NESTED + [
        (matrix(f"{cells}.0"), matrix(cells), cells is wide)
        for cells in (wide, rf"{wide}\\5&6&7&8")
    ]
    assert not misjudged((rf"\boxed{{{box}}}", answer, paid) for box, answer, paid in nested)
    assert not misjudged(
        ((rf"\boxed{{{box}}}", answer, paid) for box, answer, paid in FORMULAS), algebra=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("paid", [False, True], ids=["wrong", "right"])
def test_no_wrong_answer_of_the_corpus_is_paid_and_every_right_one_is(paid: bool) -> None:
    pairs = [pair for pair in PAIRS if pair["paid"] is paid]
    misjudged = [
        f"{pair['response']!r} for {pair['answer']!r}: {pair['why']}"
        for pair in pairs
        if verdict(pair["response"], pair["answer"]) is not paid
    ]
    assert not misjudged, f"{len(misjudged)} of {len(pairs)}"


@pytest.mark.parametrize(
    ("box", "answer", "why"),
    EXCEPTIONS,
    ids=[f"{box} for {answer}" for box, answer, _ in EXCEPTIONS],
)
def test_a_right_answer_that_cannot_be_told_from_a_wrong_one_is_refused(
    box: str, answer: str, why: str
) -> None:
    assert not verdict(rf"\boxed{{{box}}}", answer), why


def test_the_corpus_has_each_pair_once_with_its_reason_both_ways() -> None:
    keys = [(pair["response"], pair["answer"]) for pair in PAIRS]
    assert len(set(keys)) == len(keys) >= 600
    assert all(
        pair["why"] and set(pair) <= {"response", "answer", "row", "paid", "why"} for pair in PAIRS
    )
    right = sum(pair["paid"] for pair in PAIRS)
    assert 0.4 * len(PAIRS) < right < 0.6 * len(PAIRS)


def test_each_answer_of_geometry3k_pays_for_itself_and_not_for_the_next_other_one(
    geo3k_dir: Path,
) -> None:
    tables = [
        pq.read_table(geo3k_dir / f"{split}.parquet", columns=["answer"])
        for split in ("train", "test")
    ]
    answers = [answer for table in tables for answer in table["answer"].to_pylist()]
    assert len(answers) >= 401
    for index, answer in enumerate(answers):
        following = answers[index + 1 :] + answers[:index]
        other = next(candidate for candidate in following if candidate != answer)
        assert math_verdict(f"Thus {answer}.", answer), answer
        assert not math_verdict(f"Thus {other}.", answer), (other, answer)
