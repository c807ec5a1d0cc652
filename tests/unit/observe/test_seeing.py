"""The split of a gain into seen and guessed: by hand, and against many simulated validations."""

import numpy as np
import pytest

from rlinf_vl.extras.eval.figures import control_figures, evaluation, render
from rlinf_vl.observe.seeing import first_shares, gains, seeing_metrics


def test_the_split_by_hand():
    """Four questions: two learned by looking, one by guessing, one unchanged."""
    first = first_shares({0: 0.0, 1: 0.0, 2: 0.0, 3: 1.0}, {0: 0.0, 1: 0.0, 2: 0.0, 3: 0.0})
    true = {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}
    blank = {0: 0.0, 1: 0.0, 2: 1.0, 3: 0.0}
    swapped = {0: 0.0, 1: 1.0}
    before = {"blank": first, "swapped": {0: [0.0, 0.0], 1: [0.0, 0.0]}}
    metrics = seeing_metrics(true, {"blank": blank, "swapped": swapped}, before)
    assert metrics["val/gain_seen_swapped"] == metrics["val/gain_guessed_swapped"] == 0.5
    assert metrics["val/accuracy_blank"] == 0.25 and metrics["val/accuracy_swapped"] == 0.5
    assert metrics["val/seen"] == 0.75
    assert metrics["val/gain"] == 0.75
    assert metrics["val/gain_seen"] == 0.5 and metrics["val/gain_guessed"] == 0.25
    # Of 1, 1, 0, 0: variance 1/3 with n - 1, over four questions.
    assert metrics["val/gain_seen_stderr"] == pytest.approx((1 / 3 / 4) ** 0.5)
    assert metrics["val/gain_guessed_stderr"] == pytest.approx(0.25)


def test_a_first_validation_has_gained_nothing():
    true, blank = {0: 1.0, 1: 0.0}, {0: 0.0, 1: 0.0}
    metrics = seeing_metrics(true, {"blank": blank}, {"blank": first_shares(true, blank)})
    gained = {name: value for name, value in metrics.items() if name.startswith("val/gain")}
    assert len(gained) == 6 and set(gained.values()) == {0.0}


def test_without_blank_images_there_is_no_split():
    metrics = seeing_metrics({0: 1.0}, {"cropped": {0: 0.0}}, {})
    assert metrics == {"val/accuracy_cropped": 0.0}


def test_rows_that_the_first_validation_lacks_are_left_out():
    split = gains({0: (0.0, 0.0)}, {0: 1.0, 1: 1.0}, {0: 0.0, 1: 1.0})
    assert split["seen"] == {"mean": 1.0, "standard_error": None, "problems": 1}


def simulate(rng, questions, samples):
    """A validation before and one after: (first, true, blank), each question with difficulties of
    its own, and `samples` answers."""
    guess = rng.beta(0.5, 2, questions)  # at first, with and without the image
    seen = rng.beta(2, 2, questions) * 0.5  # what looking adds later
    learned = rng.beta(1, 3, questions) * 0.4  # what guessing adds later
    after = np.clip(guess + learned, 0, 1)
    chances = [guess, guess, np.clip(after + seen, 0, 1), after]
    shares = [rng.binomial(samples, chance) / samples for chance in chances]
    a0, b0, a1, b1 = ({q: float(x) for q, x in enumerate(s)} for s in shares)
    return first_shares(a0, b0), a1, b1


@pytest.mark.slow
@pytest.mark.parametrize("samples", [1, 8])
def test_the_interval_covers_the_truth_as_often_as_it_says(samples):
    rng = np.random.default_rng(5)
    # The truth: the mean of a very large validation.
    truth = gains(*simulate(np.random.default_rng(9), 200_000, samples))
    covered, repetitions = dict.fromkeys(truth, 0), 400
    for _ in range(repetitions):
        split = gains(*simulate(rng, 100, samples))
        for name, figure in split.items():
            distance = abs(figure["mean"] - truth[name]["mean"])
            covered[name] += distance < 1.96 * figure["standard_error"]
    for name, hits in covered.items():
        # 95 % of them, within four of its standard deviations.
        assert hits / repetitions == pytest.approx(0.95, abs=4 * (0.95 * 0.05 / 400) ** 0.5), name


def test_the_table_of_an_evaluation():
    """Rows without an image have no control, and no part in the accuracy beside it."""
    true = {0: 1.0, 1: 0.5, 2: 0.0}
    figures = control_figures(true, {"blank": {0: 0.5, 1: 0.5}, "swapped": {0: 0.0, 1: 0.0}})
    assert {kind: figure["mean"] for kind, figure in figures.items()} == {
        "as it is": 0.75,
        "blank": 0.5,
        "swapped": 0.0,
        "seen": 0.25,
    }
    # Of 0.5 and 0: s = 0.3536, over two questions.
    assert figures["seen"]["standard_error"] == pytest.approx(0.25)
    evaluated = evaluation([], 1, {}) | {"vision_controls": figures}
    lines = render(evaluated).splitlines()
    assert "| seen           |        2 | 0.250 ± 0.250 |" in lines
