"""Accuracy and reward by set."""

import math

import pytest

from rlinf_vl.errors import RunError
from rlinf_vl.observe.sets import train_set_metrics, val_set_metrics
from rlinf_vl.types import GroupSummary, TrajectorySummary


def group(labels, *correct, error=None):
    trajectories = [
        TrajectorySummary(20, 3, float(right), right, error=error if n == 0 else None)
        for n, right in enumerate(correct)
    ]
    return GroupSummary("g", "p", 10, tuple(trajectories), 0, 0, 0, 0, {}, labels=labels)


MIXED = [
    group({"data_source": "openai/gsm8k", "level": 1}, True),
    group({"data_source": "openai/gsm8k", "level": 2}, False),
    group({"data_source": "openai/gsm8k", "level": 2}, True),
    group({"data_source": "openai/gsm8k", "level": 2}, True),
    group({"data_source": "reward"}, False, error="lost"),
]


def test_each_set_has_its_accuracy_and_the_mean_weighs_sets_alike():
    metrics = val_set_metrics(MIXED, None)
    variance = 0.75 * 0.25 / 4
    assert metrics == pytest.approx({
        "val/openai_gsm8k/accuracy": 0.75,
        "val/openai_gsm8k/accuracy_stderr": math.sqrt(variance),
        "val/openai_gsm8k/problems": 4,
        # Not val/reward/…, which parts of the reward have; and its failed answer is wrong.
        "val/reward_set/accuracy": 0.0,
        "val/reward_set/accuracy_stderr": 0.0,
        "val/reward_set/problems": 1,
        "val/accuracy_by_set": 0.375,
        "val/accuracy_by_set_stderr": math.sqrt(variance) / 2,
    })  # fmt: skip


def test_any_column_may_name_the_sets():
    metrics = val_set_metrics(MIXED, "level")
    assert metrics["val/1/accuracy"] == 1.0 and metrics["val/2/problems"] == 3
    assert metrics["val/no_set/problems"] == 1
    assert metrics["val/accuracy_by_set"] == pytest.approx((1 + 2 / 3 + 0) / 3)


def test_one_source_is_no_mixture_unless_it_is_asked_for():
    assert val_set_metrics(MIXED[:4], None) == {} and val_set_metrics([], "level") == {}
    assert val_set_metrics(MIXED[:4], "data_source")["val/accuracy_by_set"] == 0.75


def test_training_counts_what_has_no_error():
    groups = [*MIXED[:2], group({"data_source": "b"}, True, False, error="lost")]
    assert train_set_metrics(groups, None) == {
        "train/openai_gsm8k/reward": 0.5,
        "train/openai_gsm8k/accuracy": 0.5,
        "train/b/reward": 0.0,
        "train/b/accuracy": 0.0,
    }
    assert "train/reward_set/reward" not in train_set_metrics(MIXED, None)


def test_a_column_that_is_missing_or_an_id_is_refused(caplog):
    with pytest.raises(RunError, match="'lvel' with a short.* data_source, level; .*'level'"):
        val_set_metrics(MIXED, "lvel")
    ids = [group({"id": n, "data_source": f"s{n}"}, True) for n in range(65)]
    with pytest.raises(RunError, match="'id' has 65 values, more than 64 sets"):
        val_set_metrics(ids, "id")
    assert val_set_metrics(ids, None) == {} and "65 values" in caplog.text
