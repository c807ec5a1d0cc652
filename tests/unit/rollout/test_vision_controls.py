"""Vision controls: a request under a control differs from the true one in nothing but pixels."""

import numpy as np
import pytest
from clips import clip, picture, user

from rlinf_vl.data.clips import clip_of, is_clip, timestamps_of
from rlinf_vl.data.images import decode, image_size
from rlinf_vl.data.views import GREY, HiddenRectangle
from rlinf_vl.data.vision_controls import (
    Donor,
    ImageFacts,
    VisionControl,
    choose_donors,
)
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.rollout.episode.request_builder import RequestBuilder
from rlinf_vl.types import Problem

RNG = np.random.default_rng(3)
#: Two pictures of one size, one that no other has, the first one again, and clips of two lengths.
A, B, ODD = picture(RNG), picture(RNG), picture(RNG, 64, 96)
LONG, SHORT = clip(RNG, 6), clip(RNG, 4)


def problem(*parts):
    images = tuple(part for part in parts if not isinstance(part, str))
    return Problem("row", (user(*parts),), "7", images)


ROWS = {
    0: problem("What is ", A, "?"),
    1: problem(B, "or", ODD),
    2: problem("The same: ", A),
    3: problem(LONG, "then", A),
    4: problem(SHORT, "?"),
    5: problem("No image at all"),
}
FACTS = {row: tuple(map(ImageFacts.of, p.images)) for row, p in ROWS.items()}


def controlled(kind, row, seed=0):
    donors = choose_donors(FACTS, seed).by_row.get(row, ())
    return VisionControl(kind, seed, donors)(ROWS[row], ROWS.__getitem__)


@pytest.mark.parametrize("row", [0, 1, 3, 4])
@pytest.mark.parametrize("kind", ["blank", "swapped", "cropped"])
def test_a_request_differs_in_nothing_but_pixels(toy, kind, row):
    builder = RequestBuilder(Renderer(toy.processor), 512, 512, "error")
    changed = controlled(kind, row)
    true, control = builder.from_row(ROWS[row]), builder.from_row(changed)
    np.testing.assert_array_equal(true.ids, control.ids)
    np.testing.assert_array_equal(true.image_grids, control.image_grids)
    assert (changed.id, changed.answer, changed.columns) == ("row", "7", {})
    for before, after in zip(true.images, control.images, strict=True):
        assert is_clip(before) == is_clip(after)
        if is_clip(before):
            assert timestamps_of(before) == timestamps_of(after)
        pixels = [toy.processor.pixels(image) for image in (before, after)]
        assert pixels[0].shape == pixels[1].shape and (pixels[0] != pixels[1]).any()


def test_swapped_images_are_another_rows_and_of_the_size_where_there_is_one():
    donors = choose_donors(FACTS, 0)
    assert 5 not in donors.by_row and donors.resized == 3, "the odd picture, and both clips"
    # Rows 0 and 2 show the same picture, which neither may lend to the other.
    assert donors.by_row[0] == donors.by_row[2] == (Donor(1, 0),)
    assert donors.by_row[1][0] in {Donor(0, 0), Donor(2, 0), Donor(3, 1)}
    assert controlled("swapped", 0).images == (B,)
    resized = controlled("swapped", 1).images[1]
    assert image_size(resized) == image_size(ODD) and resized != ODD
    assert len(clip_of(controlled("swapped", 3).images[0]).frames) == 6


def test_the_choice_depends_on_the_seed_and_nothing_else():
    many = {row: (ImageFacts(row, 48, 48, 0),) for row in range(50)}
    one, again = choose_donors(many, 1), choose_donors(dict(reversed(many.items())), 1)
    assert one == again or one.by_row == again.by_row
    assert one.by_row != choose_donors(many, 2).by_row
    assert all(donor.row != row for row, (donor,) in one.by_row.items())
    assert len({donor.row for (donor,) in one.by_row.values()}) > 20, "not one donor for all"


def test_a_row_alone_in_its_form_has_no_donor():
    facts = {0: FACTS[0], 1: FACTS[2], 2: FACTS[4]}
    assert choose_donors(facts, 0).by_row == {}


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_rectangle_hides_its_share_and_leaves_the_rest(share):
    shown = np.asarray(decode(ODD))
    hidden = np.asarray(decode(HiddenRectangle(share)(ODD, 4)))
    differs = (shown != hidden).any(-1)
    rows, columns = np.flatnonzero(differs.any(1)), np.flatnonzero(differs.any(0))
    box = hidden[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    assert (box == GREY).all(), "one rectangle, all grey"
    assert box[..., 0].size / shown[..., 0].size == pytest.approx(share, abs=0.02)
    assert HiddenRectangle(share)(ODD, 4) == HiddenRectangle(share)(ODD, 4)
    assert HiddenRectangle(share)(ODD, 4) != HiddenRectangle(share)(ODD, 5)
