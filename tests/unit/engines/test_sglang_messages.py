"""What passes between our types and SGLang's, as far as it needs no SGLang."""

import gc
import os
import pickle

import numpy as np
import pytest

from rlinf_vl.engines.sglang import messages
from rlinf_vl.engines.sglang.pixels import PixelFile
from rlinf_vl.types import ImageRef, Request, SamplingParams

PAD = 9


def request(ids, *grids):
    images = tuple(ImageRef.of(bytes([i])) for i in range(len(grids)))
    grids = np.asarray(grids, np.int32).reshape(-1, 3)
    return Request(np.asarray(ids, np.int32), images, grids, SamplingParams(), (0,))


def test_each_images_placeholders_are_found():
    ids = [1, *[PAD] * 4, 2, 3, *[PAD] * 6, 2]
    assert messages.placeholder_runs(request(ids, (1, 4, 4), (1, 4, 6)), PAD, 2) == [(1, 4), (7, 12)]
    assert messages.placeholder_runs(request([PAD, 1, PAD], (1, 2, 2), (1, 2, 2)), PAD, 2) == [(0, 0), (2, 2)]
    assert messages.placeholder_runs(request([1, 2]), PAD, 2) == []


@pytest.mark.parametrize(
    "ids, grids, message",
    [
        ([1, PAD, 2], [], "with 0 images has 1 runs"),  # SGLang would answer blind
        ([1, 2, 3], [(1, 2, 2)], "with 1 images has 0 runs"),
        ([1, PAD, 2], [(1, 2, 2), (1, 2, 2)], "with 2 images has 1 runs"),  # it would pass over the second
        ([1, PAD, PAD, 2], [(1, 2, 2)], r"image 0 \(.*\) of grid \[1, 2, 2\] takes 1 placeholders, .* at 1 to 2 has 2"),
        ([PAD, 1, PAD, PAD], [(1, 2, 4), (1, 2, 2)], "image 0 .* takes 2 placeholders"),  # swapped: the wrong image
        ([PAD, 1, PAD, PAD], [(1, 2, 2), (2, 2, 4)], "image 1 .* takes 4 placeholders"),
    ],
)
def test_what_sglang_would_answer_blind_or_for_the_wrong_image_is_refused(ids, grids, message):
    with pytest.raises(ValueError, match=message):
        messages.placeholder_runs(request(ids, *grids), PAD, 2)


def test_one_image_has_one_identity_wherever_it_stands_and_another_has_another():
    images = request([PAD, 1, PAD, 1, PAD], *[(1, 2, 2)] * 3)
    images = Request(images.ids, (*images.images[:2], images.images[0]), images.image_grids, images.sampling, (0,))
    file = PixelFile([np.zeros((4, 3), np.float32)] * 3)
    runs = messages.placeholder_runs(images, PAD, 2)
    first, second, again = messages.sent_images(images, runs, file.images)
    assert first.identity == again.identity != second.identity and len(first.identity) == 32
    assert [i.run for i in (first, second, again)] == [(0, 0), (2, 2), (4, 4)] and first.grid == (1, 2, 2)
    file.close()


def test_patches_travel_as_a_name_and_arrive_as_they_were():
    rng = np.random.default_rng(0)
    patches = [rng.standard_normal((n, 1536)).astype(np.float32) for n in (196, 1, 784)]
    file = PixelFile(patches)
    message = pickle.dumps(file.images, protocol=pickle.HIGHEST_PROTOCOL)
    assert len(message) < 500
    arrived = pickle.loads(message)
    file.close()  # what was mapped stays
    for there, here in zip(arrived, patches, strict=True):
        np.testing.assert_array_equal(there.numpy(), here)
        assert there.untyped_storage().nbytes() == here.nbytes  # its own: pickled again, it does not carry the others
    there.add_(1)  # and nobody else's
    with pytest.raises(FileNotFoundError):
        pickle.loads(message)


def test_a_file_that_is_dropped_is_closed():
    with pytest.warns(ResourceWarning):
        file = PixelFile([np.zeros((4, 3), np.float32)])
        path = file.images[0].path
        assert "rlinf_vl pixels" in os.readlink(path)
        del file
        gc.collect()
    assert not os.path.exists(path) or "rlinf_vl pixels" not in os.readlink(path)
