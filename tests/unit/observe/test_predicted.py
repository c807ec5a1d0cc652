"""The report's table of seconds as predicted and as measured."""

from rlinf_vl.report.predicted import compare_prediction

PHASES = {"generate": 2.0, "images": 0.5, "logprobs": 0.5, "train": 1.0, "sync": 0.1, "wake": 0.0}
PREDICTION = {"schedule": "sync", "seconds": 4.3, "phases": PHASES | {"checkpoint": 0.2}}


def step(generate: float, train: float, validate: float = 0.0) -> dict[str, float]:
    times = {"generate": generate, "train": train, "sync": 0.1, "validate": validate}
    whole = sum(times.values())
    return {f"time/{name}": value for name, value in times.items()} | {"time/step": whole}


def test_medians_of_the_steps_after_the_second():
    steps = [step(99, 99), step(99, 99), step(3, 2), step(4, 2, validate=7), step(5, 2)]
    generate, train, sync, whole = compare_prediction(PREDICTION, steps)
    assert (generate.predicted, generate.measured, generate.ratio) == (2.0, 4, 2.0)
    assert (train.predicted, train.measured) == (2.0, 2)
    assert sync.measured == 0.1
    # A validation is no part of what was predicted, nor is a checkpoint's share.
    assert abs(whole.measured - 6.1) < 1e-9 and abs(whole.predicted - 4.1) < 1e-9


def test_ahead_of_training_generation_is_not_compared():
    rows = compare_prediction(PREDICTION | {"schedule": "async"}, [step(1, 1)] * 3)
    assert [row.phase for row in rows] == ["train", "whole step"]


def test_no_table_without_a_prediction_or_steps():
    assert compare_prediction({}, [step(1, 1)] * 3) == []
    assert compare_prediction(PREDICTION, [step(1, 1)] * 2) == []
    assert compare_prediction({"phases": "torn"}, [step(1, 1)] * 3) == []
