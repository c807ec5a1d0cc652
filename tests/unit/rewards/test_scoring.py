"""Functions side by side: weights, parts, who says what is correct, verdicts that are missing."""

import asyncio
from concurrent.futures import Future

import pytest

from rlinf_vl.rewards import GradingError
from rlinf_vl.rewards.scoring import Answer, Part, Result, Scorer
from rlinf_vl.types import Problem

PROBLEM = Problem("p:0", (), "42")


def part(name, weight, judges, *results):
    """A function that comes to these results, one for each answer."""

    def begin(problem, answers):
        futures = [Future() for _ in answers]
        for future, result in zip(futures, results, strict=True):
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)
        return futures

    return Part(name, weight, judges, begin)


def scores(*parts, n=1, reward_max=1.0, reward_min=0.0):
    return asyncio.run(Scorer(parts, reward_max, reward_min)(PROBLEM, [Answer("a", "a")] * n))


def test_a_reward_is_the_weighted_sum_on_the_scale_and_parts_are_not_weighted():
    form = part("form", 0.25, False, Result(1.0), Result(0.0))
    right = part("right", 1.0, True, Result(0.0, {"iou": 0.3}), Result(1.0))
    first, second = scores(form, right, n=2, reward_max=3.0, reward_min=-1.0)
    assert (first.reward, first.parts, first.correct) == (
        0.0,
        {"form": 1.0, "right": 0.0, "right.iou": 0.3},
        False,
    )
    assert (second.reward, second.parts, second.correct) == (3.0, {"form": 0.0, "right": 1.0}, True)
    assert (first.values, second.values) == ((1.0, 0.0), (0.0, 1.0))


def test_what_judges_first_says_what_is_correct():
    for results, correct in (
        ((Result(1.0), Result(0.0)), False),
        ((Result(0.0), Result(0.5)), True),
        ((Result(0.0, correct=True), Result(0.0)), True),
    ):
        (score,) = scores(
            part("form", 1.0, False, results[0]), part("right", 1.0, True, results[1])
        )
        assert score.correct is correct
    (score,) = scores(
        part("skipped", 1.0, True, Result(None)), part("right", 2.0, True, Result(1.0))
    )
    assert (score.reward, score.parts, score.correct) == (2.0, {"right": 1.0}, True)
    assert score.values == (None, 1.0)
    assert not scores(part("form", 1.0, False, Result(1.0)))[0].correct


def test_no_verdict_scores_0_and_another_error_is_no_score():
    slow, right = (
        part("slow", 1.0, True, GradingError("too long")),
        part("right", 1.0, True, Result(1.0)),
    )
    (score,) = scores(slow, right)
    assert (score.reward, score.correct, score.ungraded) == (1.0, False, ("slow: too long",))
    assert score.values == (0.0, 1.0)
    (score,) = scores(right, part("judge", 1.0, True, OSError("gone")))
    assert score.fault == "judge: OSError: gone"


def test_an_environment_gets_a_verdict_at_once():
    right = part("right", 1.0, True, Result(1.0))
    assert Scorer([right], 1.0, 0.0).grade(PROBLEM, "42") is True
    with pytest.raises(GradingError, match="slow: too long"):
        Scorer([right, part("slow", 1.0, True, GradingError("too long"))], 1.0, 0.0).grade(
            PROBLEM, "42"
        )
    with pytest.raises(RuntimeError, match="gone"):
        Scorer([part("judge", 1.0, True, OSError("gone"))], 1.0, 0.0).grade(PROBLEM, "42")
