"""Pictures that environments give as arrays: what is shown has their pixels, whether it was encoded before or not."""

import numpy as np
import pytest

from rlinf_vl.config.schema.data import VideoConfig
from rlinf_vl.data.clips import clip_of, frame_refs
from rlinf_vl.data.images import decode
from rlinf_vl.data.unusable import ImageError
from rlinf_vl.extras.video.rows import to_clip_ref
from rlinf_vl.rollout.episode.observation import SMALL, Observation, observe
from rlinf_vl.types import Problem
from tests.video_files import pixels, video


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


def test_a_video_is_shown_in_every_form(tmp_path, monkeypatch):
    data, frames = video(20), np.stack([pixels(i, 6) for i in range(6)])
    (tmp_path / "a.mp4").write_bytes(data)
    monkeypatch.chdir(tmp_path)
    settings = VideoConfig(fps=8.0, max_frames=5)
    mp4 = to_clip_ref(data, root=None, settings=settings)
    row_video = to_clip_ref(video(9), root=None, settings=settings)
    problem = Problem("p", (), "", (row_video,))
    parts = [
        {"type": "video", "video": data},
        {"type": "video_url", "video_url": {"url": str(tmp_path / "a.mp4")}},
        {"type": "video", "video": "a.mp4"},
        {"type": "text", "text": "and"},
        {"type": "video", "video": list(frames)},
        {"type": "video", "video": frames, "fps": None},
        {"type": "video", "video": list(frames), "fps": 2},
        {"type": "video_url", "video_url": {"url": row_video.url}},
        {"type": "image", "image": frames[0]},
    ]
    seen = observe([{"role": "user", "content": parts}], problem, video=settings)
    assert seen.images[:3] == (mp4,) * 3 and seen.images[6] == row_video
    assert seen.images[3] == seen.images[4] and len(clip_of(seen.images[3]).frames) == 5
    assert clip_of(seen.images[5]).timestamps == (0, 0.5, 1.0, 2.0, 2.5)
    last = frame_refs(seen.images[5])[-1]
    assert np.array_equal(np.asarray(decode(last)), frames[5])
    content = seen.messages[0]["content"]
    kinds = ["video_url"] * 3 + ["text"] + ["video_url"] * 4 + ["image_url"]
    assert [part["type"] for part in content] == kinds
    urls = [part[part["type"]]["url"] for part in content if part["type"] != "text"]
    assert urls == [image.url for image in seen.images]


@pytest.mark.parametrize("value", [[], b"no video", "image://0", np.zeros((2, 8, 8, 3)), None])
def test_an_unusable_video_is_refused(value):
    with pytest.raises(ImageError):
        observe(
            [{"role": "user", "content": [{"type": "video", "video": value}]}], Problem("p", (), "")
        )
