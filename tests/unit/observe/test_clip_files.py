"""Clips in a run's folder: files that play, with the very pixels and times that the model saw."""

import io

import numpy as np
import pytest
from PIL import Image

from rlinf_vl.data.clips import clip_ref, frame_refs
from rlinf_vl.data.images import decode
from rlinf_vl.observe.clip_files import animated, frames_of


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data), formats=("PNG",))


@pytest.mark.parametrize(
    ("order", "times"),
    [
        ([0], [0.0]),
        ([0, 1, 2, 3], [0.0, 0.5, 1.0, 1.5]),
        ([0, 0, 1, 1, 1, 0], [0.0, 0.04, 0.08, 0.1, 7.25, 3600.5]),  # it stands still for a while
    ],
)
def test_a_file_has_every_frame_and_its_time(order, times):
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (4, 20, 30, 3), np.uint8)
    pictures[1] = pictures[0]
    pictures[1, 5:9, 5:9] = 7  # encoders store only what differs
    clip = clip_ref([png(pictures[i]) for i in order], times)
    image = opened(animated(clip))
    frames = frames_of(image)
    assert [seconds for _, seconds in frames] == times
    for (frame, _), ref in zip(frames, frame_refs(clip), strict=True):
        assert np.array_equal(np.asarray(frame), np.asarray(decode(ref)))
    distinct = 1 + sum(a != b for a, b in zip(order, order[1:], strict=False))
    assert getattr(image, "n_frames", 1) == distinct
    if distinct > 1:
        image.seek(0)
        assert 1 <= image.info["duration"] <= 2000


def test_another_picture_is_no_clip():
    plain = png(np.zeros((4, 4, 3), np.uint8))
    assert frames_of(opened(plain)) == []
    for text in ("x", "[1]", "[[5, 0]]", "{}"):
        file, info = io.BytesIO(), __import__("PIL.PngImagePlugin", fromlist=["x"]).PngInfo()
        info.add_text("clip", text)
        Image.new("RGB", (2, 2)).save(file, "PNG", pnginfo=info)
        assert frames_of(opened(file.getvalue())) == []
