"""Heat maps by occlusion: against answers whose dependence on each patch is known."""

import numpy as np
import pytest

from rlinf_vl.tools.report.look.occlusion import Cell, edge_share, heat_map
from rlinf_vl.tools.report.look.scorer import divergence, ground_colours


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


def test_an_answer_in_the_border_has_its_map_at_the_edge():
    border, inside = np.zeros((6, 6)), np.zeros((6, 6))
    border[0] = 1.0  # a bar along the top
    inside[2:4, 1:5] = 1.0
    shares = [edge_share(heat_map((6, 6), Planted(w), 100).values) for w in (border, inside)]
    assert shares == [1, 0] and edge_share(np.ones((6, 6))) == pytest.approx(20 / 36)
    assert np.isnan(edge_share(-border)), "nothing depends on the picture"


def test_a_cell_gets_the_ground_of_a_large_object_and_the_inside_of_a_frame():
    """Hiding by one colour alone would leave the object, or the frame, as it is."""
    pixels = np.full((48, 48, 3), 240, np.uint8)
    assert [list(colour) for colour in ground_colours(pixels)] == [[240] * 3]
    pixels[6:42, 6:42] = (200, 30, 30)
    assert [list(colour) for colour in ground_colours(pixels)] == [[200, 30, 30], [240] * 3]


def test_the_divergence_of_the_likeliest_tokens_is_at_most_the_whole_one():
    rng = np.random.default_rng(3)
    p, q = (np.log(rng.dirichlet(np.ones(50), 4)) for _ in range(2))
    whole = (np.exp(p) * (p - q)).sum()
    order = np.argsort(-p, axis=1)
    of_k = [
        divergence(np.take_along_axis(p, order[:, :k], 1), np.take_along_axis(q, order[:, :k], 1))
        for k in (4, 16, 50)
    ]
    assert 0 < of_k[0] < of_k[1] < of_k[2] and of_k[2] == pytest.approx(whole, rel=1e-3)
    assert divergence(p, p) == pytest.approx(0, abs=1e-9)
