"""What passes between our types and SGLang's, as far as it needs no SGLang."""

import base64
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlinf_vl.data.clips import clip_ref
from rlinf_vl.data.unusable import ImageError
from rlinf_vl.engines.sglang import messages
from rlinf_vl.engines.sglang.pixels import MappedPatches, PixelFiles
from rlinf_vl.models.image_tokens import ImageTokens
from rlinf_vl.models.shapes import Mixture
from rlinf_vl.types import ImageRef, Request, Sample, SamplingParams

PAD = 9


def request(ids, *grids):
    images = tuple(ImageRef.of(bytes([i])) for i in range(len(grids)))
    grids = np.asarray(grids, np.int32).reshape(-1, 3)
    return Request(np.asarray(ids, np.int32), images, grids, SamplingParams(), (0,))


def test_each_images_placeholders_are_found():
    ids = [1, *[PAD] * 4, 2, 3, *[PAD] * 6, 2]
    assert messages.placeholder_runs(request(ids, (1, 4, 4), (1, 4, 6)), ImageTokens(PAD, 2)) == [
        [(1, 4)],
        [(7, 12)],
    ]
    assert messages.placeholder_runs(
        request([PAD, 1, PAD], (1, 2, 2), (1, 2, 2)), ImageTokens(PAD, 2)
    ) == [
        [(0, 0)],
        [(2, 2)],
    ]
    assert messages.placeholder_runs(request([1, 2]), ImageTokens(PAD, 2)) == []


VIDEO = 8
CLIP = clip_ref([b"frame"] * 4, [0, 1, 2, 3])


@pytest.mark.parametrize(
    "timestamped, ids, runs",
    [
        (True, [1, VIDEO, VIDEO, 5, VIDEO, VIDEO, 2], [[(1, 2), (4, 5)]]),
        (False, [1, *[VIDEO] * 4, 2], [[(1, 4)]]),
    ],
)
def test_the_runs_of_a_clip_are_found_and_those_of_a_picture_are_none(timestamped, ids, runs):
    tokens = ImageTokens(PAD, 2, video_id=VIDEO, timestamped=timestamped, frames_per_patch=2)
    shown = Request(np.array(ids, np.int32), (CLIP,), np.array([[2, 2, 4]]), SamplingParams(), (0,))
    assert messages.placeholder_runs(shown, tokens) == runs
    (sent,) = messages.sent_images(shown, runs, [MappedPatches("", 0, (16, 3))], VIDEO, tower=0)
    assert sent.runs == runs[0]
    pictures = replace(shown, ids=np.where(shown.ids == VIDEO, PAD, shown.ids))
    with pytest.raises(
        ValueError, match="image 0 .* takes . placeholders, of id 8, but the run at 1"
    ):
        messages.placeholder_runs(pictures, tokens)


@pytest.mark.parametrize(
    "ids, grids, message",
    [
        ([1, PAD, 2], [], "with 0 images has 1 runs"),  # SGLang would answer blind
        ([1, 2, 3], [(1, 2, 2)], "with 1 images has 0 runs"),
        (
            [1, PAD, 2],
            [(1, 2, 2), (1, 2, 2)],
            "with 2 images has 1 runs",
        ),  # it would pass over the second
        (
            [1, PAD, PAD, 2],
            [(1, 2, 2)],
            r"image 0 \(.*\) of grid \[1, 2, 2\] takes 1 placeholders, .* at 1 to 2 has 2",
        ),
        (
            [PAD, 1, PAD, PAD],
            [(1, 2, 4), (1, 2, 2)],
            "image 0 .* takes 2 placeholders",
        ),  # swapped: the wrong image
        ([PAD, 1, PAD, PAD], [(1, 2, 2), (2, 2, 4)], "image 1 .* takes 4 placeholders"),
    ],
)
def test_what_sglang_would_answer_blind_or_for_the_wrong_image_is_refused(ids, grids, message):
    with pytest.raises(ValueError, match=message):
        messages.placeholder_runs(request(ids, *grids), ImageTokens(PAD, 2))


def test_one_image_has_one_identity_wherever_it_stands_and_another_has_another():
    images = request([PAD, 1, PAD, 1, PAD], *[(1, 2, 2)] * 3)
    images = Request(
        images.ids,
        (*images.images[:2], images.images[0]),
        images.image_grids,
        images.sampling,
        (0,),
    )
    places = [MappedPatches("", 0, (4, 3))] * 3
    runs = messages.placeholder_runs(images, ImageTokens(PAD, 2))
    first, second, again = messages.sent_images(images, runs, places, VIDEO, tower=0)
    assert first.identity == again.identity != second.identity and len(first.identity) == 32
    assert [i.runs for i in (first, second, again)] == [
        [(0, 0)],
        [(2, 2)],
        [(4, 4)],
    ] and first.grid == (
        1,
        2,
        2,
    )
    assert (
        messages.sent_images(images, runs, places, VIDEO, tower=1)[0].identity != first.identity
    ), "or it is found encoded"


def test_an_image_with_marks_between_its_tiles_is_sent_with_its_runs():
    """Idefics 3 names row and column of each tile."""
    tokens = ImageTokens(PAD, tokens_per_tile=2, marks=(7, 8))
    ids = [7, *[PAD] * 2, 8, *[PAD] * 4, 7, 1, *[PAD] * 2]
    tiles = request(ids, (3, 1, 1), (1, 1, 1))
    runs = messages.placeholder_runs(tiles, tokens)
    assert runs == [[(1, 2), (4, 7)], [(10, 11)]]
    places = [MappedPatches("", 0, (3, 12)), MappedPatches("", 4096, (1, 12))]
    sent = messages.sent_images(tiles, runs, places, VIDEO, tower=0)
    assert [image.runs for image in sent] == runs
    assert [image.grid for image in sent] == [(3, 1, 1), (1, 1, 1)]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (
            [PAD, 7, *[PAD] * 5],
            "takes 6 placeholders, of id 9, but the run at 0 to 0, 2 to 6 has 6",
        ),
        ([*[PAD] * 6, 7, *[PAD] * 2], "with 1 images has 2 runs"),
        ([*[PAD] * 4], "takes 6 placeholders, of id 9, but the run at 0 to 3 has 4"),
        ([1], "takes 6 placeholders, of id 9, but the run at none has 0"),
    ],
)
def test_runs_that_are_not_those_of_tiles_are_refused(ids, message):
    tokens = ImageTokens(PAD, tokens_per_tile=2, marks=(7, 8))
    with pytest.raises(ValueError, match=message):
        messages.placeholder_runs(request(ids, (3, 1, 1)), tokens)


@pytest.fixture
def files():
    """`PixelFiles` of images whose data says how many patches they have; `made` lists those that were computed."""
    made = []

    def pixels(image):
        made.append(image)
        if not image.data:
            raise ImageError("image_unusable", "it is empty")
        return (
            np.random.default_rng(len(made))
            .standard_normal((int(image.data), 1536))
            .astype(np.float32)
        )

    files = PixelFiles(pixels, max_bytes=4 * 100 * 1536 * 4, files=4)
    yield files, made
    files.close()


def image(patches, number=0):
    return ImageRef(f"{patches}-{number}", str(patches).encode())


def test_patches_travel_as_a_name_and_arrive_as_they_were(files):
    files, _ = files
    images = [image(n) for n in (196, 1, 784)]
    held = files.hold(images)
    message = pickle.dumps(held, protocol=pickle.HIGHEST_PROTOCOL)
    assert len(message) < 500
    arrived = pickle.loads(message)
    files.close()  # what was mapped stays
    for number, there in enumerate(arrived):
        here = np.random.default_rng(number + 1).standard_normal(there.shape).astype(np.float32)
        np.testing.assert_array_equal(there.numpy(), here)
        # Its own: pickled again, it does not carry the others.
        assert there.untyped_storage().nbytes() == here.nbytes
    there.add_(1)  # and nobody else's
    with pytest.raises(FileNotFoundError):
        pickle.loads(message)


def test_an_image_is_written_once_for_all_requests_and_turns(files):
    files, made = files
    one, other = image(40), image(50)
    first = files.hold([one, one])
    assert files.hold([one, other])[0] == first[0] == first[1]
    files.release([one, one])
    files.release([one, other])
    assert files.hold([other, one])[1] == first[0] and made == [one, other]


def test_threads_make_patches_at_the_same_time_and_each_image_once():
    """Four threads meet while they make four images; all of them hold a fifth, which one makes."""
    together, made = threading.Barrier(4), []

    def pixels(image):
        made.append(image)
        if image.data != b"7":
            together.wait(timeout=60)
        return np.ones((int(image.data), 8), np.float32)

    files = PixelFiles(pixels)
    common = image(7)
    with ThreadPoolExecutor(4) as threads:
        held = list(threads.map(lambda n: files.hold([image(9, n), common]), range(4)))
    assert sorted(i.hash for i in made) == [common.hash, *(image(9, n).hash for n in range(4))]
    assert len({common_place for _, common_place in held}) == 1
    (file,) = files._files
    assert file.holds == 8
    for n in range(4):
        files.release([image(9, n), common])
    assert file.holds == 0
    files.close()


def test_held_images_stay_and_of_the_others_the_newest_within_the_bound(files):
    files, made = files
    held = files.hold([image(60, number=-1)])
    arrived = [pickle.loads(pickle.dumps(place)) for place in held]
    for number in range(20):  # 60 MiB in files of 100 patches: one image a file
        files.hold([image(60, number)])
        files.release([image(60, number)])
    fds = Path("/proc/self/fd")
    kept = sum("rlinf_vl pixels" in os.readlink(fd) for fd in fds.iterdir() if fd.is_symlink())
    assert 4 <= kept <= 7
    again = [pickle.loads(pickle.dumps(place)) for place in held]
    np.testing.assert_array_equal(arrived[0].numpy(), again[0].numpy())
    files.hold([image(60, 19), image(60, -1)])
    assert len(made) == 21
    files.hold([image(60, 0)])
    assert len(made) == 22, "it had gone, and was made again"


def test_a_request_with_an_image_that_can_not_be_used_holds_nothing(files):
    files, _ = files
    with pytest.raises(ImageError, match="empty"):
        files.hold([image(60), ImageRef("broken", b"")])
    assert not any(file.holds for file in files._files)


def test_routes_are_those_of_the_layers_that_have_a_mixture():
    # Tokens but the last, layers, experts of a token.
    told = np.arange(4 * 3 * 2, dtype=np.int32).reshape(4, 3, 2)
    for experts, dtype in ((256, np.uint8), (300, np.int16)):
        routes = messages.routes_of(
            base64.b64encode(told.tobytes()).decode(), 5, Mixture((0, 2), experts, 2)
        )
        assert routes.dtype == dtype and routes.tolist() == [
            [*told[t, 0], *told[t, 2]] for t in range(4)
        ] + [[0] * 4]
    assert not messages.routes_of(None, 5, Mixture((0, 2), 8, 2)).any()


@pytest.mark.parametrize(
    ("drawn", "reason", "interrupted", "expected"),
    [
        ([4, 5], "abort", True, "abort"),
        ([4, 5], "abort", False, "error"),  # SGLang gave up by itself
        ([], "abort", True, "abort"),  # it had not begun
        (
            [4, 9],
            "abort",
            True,
            "stop",
        ),  # the very last token was an end id: nothing is left to draw
        ([4, 5, 6], "abort", True, "length"),
        ([4, 5, 6], "length", True, "length"),
        ([4], "timeout", True, "error"),
    ],
)
def test_an_interrupted_sample_is_joined_with_what_follows(drawn, reason, interrupted, expected):
    """Two tokens of version 3, then `drawn` by version 4; at most five, or up to id 9."""
    begun = Sample(
        np.array([1, 2], np.int32), np.float32([-1, -2]), np.array([3, 3], np.int32), "abort"
    )
    meta = {
        "output_token_logprobs": [(-float(token), token, None) for token in drawn],
        "weight_versions": [{"version": "4", "start": 0, "end": len(drawn)}],
        "finish_reason": {"type": reason},
    }
    more = messages.as_sample({"output_ids": drawn, "meta_info": meta}, (9,), 7, None, interrupted)
    whole = messages.joined(begun, more, SamplingParams(max_new_tokens=5, stop_ids=(9,)))
    assert whole.finish_reason == expected
    assert whole.ids.tolist() == [1, 2, *drawn] and whole.versions.tolist() == [3, 3] + [4] * len(
        drawn
    )
    assert whole.logprobs.tolist() == [-1, -2, *(-token for token in drawn)]
