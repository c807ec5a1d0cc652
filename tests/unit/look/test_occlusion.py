"""Heat maps by occlusion: against answers whose dependence on each patch is known."""

import numpy as np
import pytest

from rlinf_vl.look.occlusion import Cell, heat_map


class Planted:
    """An answer that loses `weights` of the patches that are hidden; counts its forwards."""

    def __init__(self, weights):
        self.weights = np.asarray(weights, float)
        self.hidden: list[Cell] = []

    def __call__(self, cells):
        self.hidden += cells
        return [self.weights[c.top : c.bottom, c.left : c.right].sum() for c in cells]


def planted(shape, box):
    weights = np.zeros(shape)
    weights[box] = np.arange(1, weights[box].size + 1).reshape(weights[box].shape)
    return Planted(weights)


@pytest.mark.parametrize("shape", [(6, 6), (9, 14), (1, 30), (24, 32)])
def test_with_enough_forwards_the_map_is_the_weights(shape):
    answer = planted(shape, np.s_[: max(1, shape[0] // 3), 2:5])
    found = heat_map(shape, answer, budget=10_000)
    np.testing.assert_allclose(found.values, answer.weights, rtol=1e-5)
    assert found.forwards == len(answer.hidden) == len(set(answer.hidden)), "none twice"


@pytest.mark.parametrize("budget", [16, 20, 40, 80])
def test_a_budget_is_kept_and_the_sum_with_it(budget):
    answer = planted((24, 32), np.s_[3:9, 20:23])
    found = heat_map((24, 32), answer, budget)
    assert found.forwards == len(answer.hidden) <= budget
    assert found.values.sum() == pytest.approx(answer.weights.sum(), rel=1e-5)
    row, column = found.peak
    assert 0 <= row < 12 and 16 <= column < 24, "in the coarse cells of the box at the latest"
    if budget == 80:
        assert answer.weights[row, column] > 0


def test_refinement_goes_where_the_drop_is():
    answer = planted((32, 32), np.s_[30:32, 30:32])
    heat_map((32, 32), answer, 64)
    refined = [cell for cell in answer.hidden if cell.area < 64]
    assert refined and all(cell.top >= 24 and cell.left >= 24 for cell in refined)


def test_a_blind_policy_has_an_empty_map_of_the_coarse_grid_alone():
    answer = Planted(np.zeros((12, 12)))
    found = heat_map((12, 12), answer, 1000)
    assert found.forwards == 16 and not found.values.any()


def test_what_only_matters_together_stays_spread():
    """Each quarter alone loses nothing, as where one of two equal objects is enough."""

    def drops(cells):
        return [1.0 if cell.area == 4 and cell.top == cell.left == 0 else 0.0 for cell in cells]

    found = heat_map((4, 4), drops, 100, coarse=2)
    np.testing.assert_array_equal(found.values[:2, :2], np.full((2, 2), 0.25))


def test_an_answer_that_hiding_makes_likelier_has_negative_patches():
    found = heat_map((4, 4), Planted(-np.ones((4, 4))), 100, coarse=2)
    np.testing.assert_array_equal(found.values, -np.ones((4, 4)))
    assert found.forwards == 4, "nothing to refine"
