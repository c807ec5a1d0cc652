"""Pictures that environments give as arrays: what is shown has their pixels, whether it was encoded before or not."""

import numpy as np
import pytest

from rlinf_vl.data.images import decode
from rlinf_vl.rollout.observation import SMALL, Observation, observe
from rlinf_vl.types import Problem


def shown(*pictures: np.ndarray) -> Observation:
    content = [{"type": "image", "image": picture} for picture in pictures]
    return observe([{"role": "user", "content": content}], Problem("p", (), ""))


@pytest.mark.parametrize("shape", [(8, 12, 3), (8, 12), (128, SMALL // 128), (200, 300, 3)])
def test_an_array_is_shown_as_it_is(shape):
    draw = np.random.default_rng(0)
    one, other = (draw.integers(0, 256, shape, np.uint8) for _ in range(2))
    images = shown(one, other, one[::-1], one.copy()).images
    for image, picture in zip(images, (one, other, one[::-1], one), strict=True):
        grey = picture if picture.ndim == 3 else np.repeat(picture[..., None], 3, axis=-1)
        assert np.array_equal(np.asarray(decode(image)), grey)
    assert images[0] == images[3] != images[1] and images[0] != images[2]


def test_a_picture_that_changes_after_it_was_shown_is_shown_anew():
    picture = np.zeros((8, 8, 3), np.uint8)
    (before,) = shown(picture).images
    picture[0] = 255
    (after,) = shown(picture).images
    assert not np.asarray(decode(before)).any() and np.asarray(decode(after))[0].all()


def test_arrays_of_one_content_and_different_shapes_are_different_pictures():
    flat = np.arange(96, dtype=np.uint8)
    sizes = [
        decode(image).size for image in shown(flat.reshape(4, 8, 3), flat.reshape(8, 4, 3)).images
    ]
    assert sizes == [(8, 4), (4, 8)]
