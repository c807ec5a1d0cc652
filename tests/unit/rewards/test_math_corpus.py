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


def verdict(response: str, answer: str) -> bool:
    """Grade as a reward does, where no verdict is no reward; a slow machine's missing verdict gets a second try."""
    try:
        return math_verdict(response, answer)
    except GradingTimeout:
        return grade_math(response, answer)


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
