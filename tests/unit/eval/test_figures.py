"""Figures of an evaluation against what can be counted by hand."""

import json
import math
from itertools import combinations, product

import pytest
from unit.controller.fakes import summary

from rlinf_vl.extras.eval.figures import evaluation, pass_at_k, render
from rlinf_vl.observe.seeing import mean_and_error


@pytest.mark.parametrize("n, correct", [(n, c) for n in range(1, 7) for c in range(n + 1)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n, correct):
    right = [i < correct for i in range(n)]
    for k in range(1, n + 1):
        subsets = [any(right[i] for i in chosen) for chosen in combinations(range(n), k)]
        assert pass_at_k(n, correct, k) == pytest.approx(sum(subsets) / len(subsets))


def test_pass_at_k_is_unbiased():
    """Its mean over all outcomes of n draws is 1 − (1 − p)^k."""
    p, n, k = 0.3, 5, 3
    outcomes = product([True, False], repeat=n)
    expected = sum(
        pass_at_k(n, sum(o), k) * math.prod(p if right else 1 - p for right in o) for o in outcomes
    )  # fmt: skip
    assert expected == pytest.approx(1 - (1 - p) ** k)


def test_the_standard_error_is_that_of_problems():
    assert mean_and_error([0.0, 0.5, 1.0]) == {
        "mean": 0.5,
        "standard_error": pytest.approx(0.5 / math.sqrt(3)),
        "problems": 3,
    }
    assert mean_and_error([0.25]) == {"mean": 0.25, "standard_error": None, "problems": 1}
    assert mean_and_error([]) == {"mean": None, "standard_error": None, "problems": 0}


def groups():
    """Four problems, four samples each: 4, 2 and 0 right; of the last one all failed, of the third one sample."""
    no, fault = [None] * 4, "environment: it hangs"
    return [
        summary(
            "a", "p", [1.0] * 4, turns=(1, 2, 2, 3), metrics=({"steps": 2.0},) * 4, error=tuple(no)
        ),
        summary(
            "b",
            "q",
            [1.0, 0.0, 1.0, 0.0],
            turns=(1,) * 4,
            status=("length",) + ("stop",) * 3,
            metrics=({},) * 4,
        ),
        summary(
            "c", "r", [0.0] * 4, turns=(3,) * 4, metrics=({},) * 4, error=(None, None, None, fault)
        ),
        summary(
            "d",
            "s",
            [0.0] * 4,
            turns=(0,) * 4,
            metrics=({},) * 4,
            error=(fault, fault, fault, "engine: died"),
        ),
    ]


def test_figures_of_a_small_evaluation():
    columns = {"category": ["area", None, "area", "angle"], "level": [10, 9, 10, 9]}
    made = evaluation(groups(), 4, columns)
    # The values of the four problems are 1, 1/2, 0 and 0: what failed is wrong.
    assert made["pass@1"] == {
        "mean": pytest.approx(0.375),
        "standard_error": pytest.approx(math.sqrt(0.6875 / 3) / 2),
        "problems": 4,
    }
    assert (
        made["pass@2"]["mean"] == pytest.approx((1 + 5 / 6 + 0 + 0) / 4)
        and made["pass@2"]["problems"] == 4
    )
    assert made["pass@4"]["mean"] == pytest.approx(0.5) and made["pass@4"]["problems"] == 4
    assert made["errors"] == {"environment": 4, "engine": 1} and made["trajectories"] == 11
    assert made["turns"] == {"mean": pytest.approx((1 + 2 + 2 + 3 + 4 + 9) / 11), "max": 3}
    assert made["truncated"] == pytest.approx(1 / 11)
    assert made["by_turns"]["1"] == {"trajectories": 5, "accuracy": pytest.approx(3 / 5)}
    assert made["by_turns"]["3"] == {"trajectories": 4, "accuracy": pytest.approx(1 / 4)}
    assert made["env"] == {"steps": 2.0}
    tables = made["tables"]
    assert list(tables["category"]) == ["angle", "area", "–"] and list(tables["level"]) == [
        "9",
        "10",
    ]
    assert tables["category"]["area"]["pass@1"]["mean"] == pytest.approx(0.5)
    assert tables["category"]["angle"]["pass@1"] == {
        "mean": 0.0,
        "standard_error": None,
        "problems": 1,
    }
    assert tables["category"]["angle"]["reward"] == {
        "mean": None,
        "standard_error": None,
        "problems": 0,
    }
    assert json.loads(json.dumps(made, allow_nan=False)) == made
    lines = render(made).splitlines()
    assert lines[2].split("|")[1:4] == [" all ", "        4 ", " 0.375 ± 0.239 "]
    assert any(line.startswith("| angle") and "–" in line for line in lines)


def test_tables_fit_a_terminal():
    columns = {"category": ["area", None, "area", "angle"]}
    text = render(evaluation(groups(), 4, columns))
    assert max(map(len, text.splitlines())) <= 80
    named = ("problems", "pass@1", "pass@2", "pass@4", "reward", "turns", "tokens", "errors")
    for name in named:
        heads = [line for line in text.splitlines() if f" {name} |" in line]
        assert len(heads) == 2 + (name == "turns"), "once in all, once by category"
    assert text.count("| angle ") == 2, "the first column is repeated"


def test_of_any_number_of_samples_pass_at_that_number_is_among_the_figures():
    assert [k for k in evaluation(groups(), 3, {}) if k.startswith("pass")] == [
        "pass@1",
        "pass@2",
        "pass@3",
    ]
    assert [k for k in evaluation(groups(), 1, {}) if k.startswith("pass")] == ["pass@1"]
