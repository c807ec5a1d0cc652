"""The corpora of `choice`, `exact`, `exact_alnum` and judges' replies: right answers are paid and wrong ones refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlinf_vl.rewards import grade
from rlinf_vl.rewards.judge import score_of

CORPUS = Path(__file__).with_name("corpus")
FUNCTIONS = ("choice", "exact", "exact_alnum")


def pairs(name: str) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (CORPUS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def mistakes(name: str, paid: bool) -> list[str]:
    """Return the pairs of a corpus that are graded otherwise than it says, of those that are to be paid or of the others."""
    return [
        f"{pair['response'][:80]!r} for {pair['answer']!r} {pair.get('row', '')}: {pair['why']}"
        for pair in pairs(name)
        if pair["paid"] is paid
        and bool(grade(name, pair["response"], pair["answer"], **pair.get("row", {}))) is not paid
    ]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_wrong_answer_is_paid(name: str) -> None:
    wrong = mistakes(name, paid=False)
    assert not wrong, f"{len(wrong)} wrong answers paid:\n" + "\n".join(wrong)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_right_answers_are_paid(name: str) -> None:
    refused = mistakes(name, paid=True)
    assert not refused, f"{len(refused)} right answers refused:\n" + "\n".join(refused)


def test_a_judges_reply_is_a_clear_score_or_no_verdict() -> None:
    for pair in pairs("judge"):
        score, paid = score_of(pair["response"], pair["row"]["scale"]), pair["paid"]
        assert score == (None if paid is None else pytest.approx(paid)), pair


def test_the_corpora_are_large_and_go_both_ways() -> None:
    of_all = [pair for name in (*FUNCTIONS, "judge") for pair in pairs(name)]
    assert len(of_all) >= 450 and all(pair["why"] for pair in of_all)
    for name in FUNCTIONS:
        shares = [pair["paid"] for pair in pairs(name)]
        assert min(shares.count(True), shares.count(False)) >= 10, name
