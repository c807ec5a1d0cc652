"""The mismatch guard's verdicts on figures."""

import pytest

from rlinf_vl.controller.mismatch import PER_CLASS, EngineMismatch, Score, judge, pick
from rlinf_vl.packing.planner import Item
from rlinf_vl.types import GroupSummary, TrajectorySummary


def test_agreement_is_reported_per_image_count():
    scores = [
        Score(0, 10, 1e-5, 1e-5),
        Score(1, 10, 2e-5, 8.0),
        Score(3, 5, 2e-5, 4.0),
        Score(1, 30, 2e-5, 2.0),
    ]
    metrics = judge(scores, "fp32")
    assert metrics["mismatch/no_image"] == pytest.approx(1e-6)
    assert metrics["mismatch/one_image"] == pytest.approx(1e-6)
    assert metrics["mismatch/more_images"] == pytest.approx(4e-6)
    assert metrics["mismatch/blank_images"] == pytest.approx(14 / 45)


def test_an_engine_that_fits_the_blank_images_is_blind():
    with pytest.raises(EngineMismatch, match="blind.*one image"):
        judge([Score(0, 10, 0.0, 0.0), Score(1, 10, 5.0, 1e-4)], "fp32")


def test_an_engine_that_sees_only_the_first_image_is_found():
    with pytest.raises(EngineMismatch, match="more images"):
        judge([Score(1, 10, 1e-5, 5.0), Score(2, 10, 5.0, 5.5)], "fp32")


@pytest.mark.parametrize("images", [0, 1])
def test_an_engine_that_fits_neither_has_other_weights(images):
    with pytest.raises(EngineMismatch, match="stale"):
        judge([Score(images, 10, 5.0, 6.0)], "fp32")


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("images", [0, 1])
def test_logprobs_that_are_no_numbers_stop_the_run(wrong, images):
    with pytest.raises(EngineMismatch, match="not finite"):
        judge([Score(images, 10, 0.0, 5.0), Score(images, 10, wrong, 6.0)], "bf16")


def test_bfloat16_noise_is_not_a_mismatch():
    judge([Score(1, 100, 3.0, 40.0)], "bf16")
    with pytest.raises(EngineMismatch):
        judge([Score(1, 100, 3.0, 40.0)], "fp32")


def test_picks_cover_every_class_and_skip_what_has_no_tokens():
    def summary(images, tokens, errors=None):
        trajectories = [
            TrajectorySummary(5 + n, n, 0.0, error=error)
            for n, error in zip(tokens, errors or (None,) * len(tokens), strict=True)
        ]
        return GroupSummary("g", "p", 5, tuple(trajectories), 0, 0, images, 4 * images, {})

    summaries = [summary(1, [3, 3])] * 10 + [
        summary(0, [0, 4]),
        summary(2, [2], ["bad"]),
        summary(2, [6]),
    ]
    items = pick(summaries)
    assert items[-2:] == [Item(10, 1, 5, 4, 4, 0), Item(12, 0, 5, 6, 6, 8)]
    assert [(i.group, i.index) for i in items] == [(g, 0) for g in range(PER_CLASS)] + [
        (10, 1),
        (12, 0),
    ]
