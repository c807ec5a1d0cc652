"""Videos become clips: which frames are sampled, at which times, and which files are refused."""

import base64
import io
import json
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from rlinf_vl.config.schema.data import VideoConfig
from rlinf_vl.data.clips import clip_of, frame_refs, is_clip
from rlinf_vl.data.dataset import ProblemDataset
from rlinf_vl.data.formats import RowFormat
from rlinf_vl.data.images import decode, image_size
from rlinf_vl.data.rows import row_to_problem
from rlinf_vl.data.unusable import ImageError
from rlinf_vl.data.views import Noise
from rlinf_vl.data.views import blank as blank_view
from rlinf_vl.extras.video import decoding as video_decoding
from rlinf_vl.extras.video.decoding import fitted_size, frame_count
from rlinf_vl.extras.video.rows import to_clip_ref, video_values
from rlinf_vl.types import ImageRef
from tests.video_files import HEIGHT, WIDTH, index_of, pixels, sound, video


def png(index: int, count: int = 10, size: tuple[int, int] = (WIDTH, HEIGHT)) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels(index, count, size)).save(file, "PNG")
    return file.getvalue()


def clip(value: Any, root: Path | None = None, **settings: Any) -> ImageRef:
    return to_clip_ref(value, root=root, settings=VideoConfig(**settings))


def frames_of(ref: ImageRef) -> list[Image.Image]:
    return [decode(frame) for frame in frame_refs(ref)]


def decoded_in_full(data: bytes) -> list[tuple[float, np.ndarray]]:
    """Every frame and its time, by PyAV's own loop over the whole file.

    Frames leave a decoder in the order in which they are shown, also where AVI's times do not say it.
    """
    with av.open(io.BytesIO(data)) as container:
        frames = list(container.decode(video=0))
    times = sorted(float(f.pts * f.time_base) for f in frames)
    return [
        (seconds - times[0], f.to_ndarray(format="rgb24"))
        for seconds, f in zip(times, frames, strict=True)
    ]


CONTAINERS = [
    ("mp4", "libx264"),
    ("mov", "mpeg4"),
    ("matroska", "libx264"),
    ("webm", "libvpx-vp9"),
    ("webm", "libvpx"),
    ("avi", "mpeg4"),
    ("mpegts", "libx264"),
]


@pytest.mark.parametrize(("container", "codec"), CONTAINERS)
@pytest.mark.parametrize("fps", [2.0, 7.0])
def test_the_frames_are_those_of_a_decoding_in_full_at_their_times(
    container: str, codec: str, fps: float
) -> None:
    data = video(90, container=container, codec=codec)
    every = decoded_in_full(data)
    sampled = clip_of(clip(data, fps=fps, max_frames=16))
    count = min(16, int(3 * fps))
    # The rule of transformers' video processors: evenly by index, first and last included.
    indices = np.linspace(0, 89, count).round().astype(int)
    assert sampled.timestamps == pytest.approx([every[i][0] for i in indices], abs=1e-6)
    for i, frame in zip(indices, frames_of(clip(data, fps=fps, max_frames=16)), strict=True):
        np.testing.assert_array_equal(np.asarray(frame), every[i][1])
        assert index_of(frame, 90) == pytest.approx(i, abs=3)


NTSC = Fraction(30000, 1001)


@pytest.mark.parametrize(("rate", "start"), [(24, 0), (60, 0), (48, 200), (NTSC, 100)])
@pytest.mark.parametrize(
    ("container", "codec", "b_frames"),
    [
        ("mp4", "libx264", 3),
        ("mov", "mpeg4", 2),
        ("matroska", "libx264", 3),
        ("matroska", "mpeg4", None),
        ("webm", "libvpx", None),
        ("avi", "libx264", 3),
        ("avi", "mpeg4", 2),
        ("mpegts", "libx264", 3),
        ("mpegts", "mpeg2video", 2),
        ("flv", "libx264", 3),
    ],
)
def test_forty_kinds_of_files_have_the_frames_of_a_decoding_in_full(
    container: str, codec: str, b_frames: int | None, rate: Any, start: int
) -> None:
    """Frames stored in another order, files that start late, times rounded to milliseconds."""
    count = int(2 * float(rate) + 1)
    data = video(count, container=container, codec=codec, b_frames=b_frames, fps=rate, start=start)
    every = decoded_in_full(data)
    assert len(every) == count
    sampled = clip(data, fps=float(rate) / 4)
    # As transformers' rule has it: a quarter of the frames.
    assert len(clip_of(sampled).frames) == min(32, count // 4)
    indices = np.linspace(0, count - 1, min(32, count // 4)).round().astype(int)
    assert clip_of(sampled).timestamps == pytest.approx([every[i][0] for i in indices], abs=1e-6)
    for i, frame in zip(indices, frames_of(sampled), strict=True):
        np.testing.assert_array_equal(np.asarray(frame), every[i][1])


@pytest.mark.parametrize("container", ["mp4", "matroska", "flv"])
@pytest.mark.parametrize("rate", [24, 48, 60])
def test_rounded_times_lose_no_frame(container: str, rate: int) -> None:
    data = video(
        3 * rate, container=container, codec="flv1" if container == "flv" else "mpeg4", fps=rate
    )
    assert len(clip_of(clip(data, fps=2)).frames) == 6
    assert len(clip_of(clip(data, fps=rate / 3)).frames) == min(32, rate)


@pytest.mark.parametrize(
    ("container", "codec", "pix_fmt"),
    [
        ("webm", "libvpx-vp9", "yuva420p"),
        ("mov", "qtrle", "argb"),
        ("mov", "png", "rgba"),
    ],
)
def test_transparency_is_on_white(container: str, codec: str, pix_fmt: str) -> None:
    file = io.BytesIO()
    rgba = np.zeros((HEIGHT, WIDTH, 4), np.uint8)
    rgba[:, : WIDTH // 2] = (200, 30, 30, 255)  # the right half is transparent black
    with av.open(file, "w", format=container) as output:
        stream: Any = output.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, pix_fmt
        if container == "webm":
            stream.metadata["alpha_mode"] = "1"
        for i in range(20):
            frame = av.VideoFrame.from_ndarray(rgba, format="rgba").reformat(format=pix_fmt)
            frame.pts = i
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    for frame in frames_of(clip(file.getvalue())):
        assert np.abs(np.asarray(frame)[:, 40:].astype(int) - 255).max() < 12
        assert np.abs(np.asarray(frame)[:, :24].astype(int) - (200, 30, 30)).max() < 25


def test_the_count_is_that_of_transformers() -> None:
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
    from transformers.video_utils import VideoMetadata

    processor = Qwen3VLVideoProcessor()
    for frames, rate, fps in [(90, 30, 2), (600, 25, 2), (30, 30, 2), (1000, 10, 1.5), (40, 8, 8)]:
        metadata = VideoMetadata(total_num_frames=frames, fps=rate)
        indices = processor.sample_frames(metadata, fps=fps)
        count = frame_count(frames, frames / rate, fps, max_frames=768)
        assert video_decoding.sampled_indices(frames, count) == list(indices)


def test_variable_rates_keep_the_times_of_presentation() -> None:
    file = io.BytesIO()
    ticks = [0, 1, 2, 40, 41, 42, 90]
    with av.open(file, "w", format="matroska") as output:
        stream: Any = output.add_stream("libx264", rate=10)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for i, tick in enumerate(ticks):
            frame = av.VideoFrame.from_ndarray(pixels(i, len(ticks)), format="rgb24")
            frame.pts = tick
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    sampled = clip(file.getvalue(), fps=50.0)
    assert clip_of(sampled).timestamps == pytest.approx([tick / 10 for tick in ticks], abs=1e-6)
    for i, frame in enumerate(frames_of(sampled)):
        assert index_of(frame, len(ticks)) == pytest.approx(i, abs=0.3)


@pytest.mark.parametrize(
    ("count", "settings", "sampled"),
    [
        (1, {}, 1),
        (3, {}, 3),
        (60, {}, 4),
        (60, {"max_frames": 1}, 1),
        (60, {"max_frames": 2}, 2),
        (600, {}, 32),
        (600, {"fps": 0.5}, 10),
    ],
)
def test_how_many_frames(count: int, settings: dict[str, Any], sampled: int) -> None:
    data = video(count)
    assert len(clip_of(clip(data, **settings)).frames) == sampled


@pytest.mark.parametrize(("degrees", "corner"), [(90, (1, 0)), (180, (1, 1)), (270, (0, 1))])
def test_phones_videos_stand_upright(degrees: int, corner: tuple[int, int]) -> None:
    ref = clip(video(5, rotation=degrees))
    size = (WIDTH, HEIGHT) if degrees == 180 else (HEIGHT, WIDTH)
    for frame in frames_of(ref):
        assert frame.size == size
        # The white corner, top left in the file, is where a player shows it.
        x, y = (1 + (s - 3) * c for s, c in zip(size, corner, strict=True))
        assert min(frame.getpixel((x, y))) > 240


def test_frames_are_scaled_once_into_the_bounds() -> None:
    data = video(4, size=(640, 360))
    assert {f.size for f in frames_of(clip(data, max_pixels=90 * 160))} == {(160, 90)}
    assert {f.size for f in frames_of(clip(data, max_pixels=10_000))} == {(133, 75)}
    assert {f.size for f in frames_of(clip(data))} == {(597, 336)}
    assert {f.size for f in frames_of(clip(data, max_pixels=None))} == {(640, 360)}
    assert {f.size for f in frames_of(clip(video(4), min_pixels=96 * 128))} == {(128, 96)}
    for width, height in ((1, 1), (5000, 40), (3, 4000), (1920, 1080)):
        for low, high in ((None, 50), (100, 200), (4096, None)):
            w, h = fitted_size(width, height, low, high)
            assert w * h <= max(high or 1_000_000, w, h) and (low is None or w * h >= min(low, 90))


def test_a_video_is_read_in_every_form_and_decoded_once(tmp_path: Path, monkeypatch: Any) -> None:
    calls = []
    real = video_decoding.sample_video
    monkeypatch.setattr(
        "rlinf_vl.extras.video.rows.sample_video", lambda *a, **k: calls.append(1) or real(*a, **k)
    )
    data = video(31)
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips" / "a.mp4").write_bytes(data)
    encoded = base64.b64encode(data).decode()
    forms = [
        data,
        bytearray(data),
        {"bytes": data, "path": None},
        {"video": data},
        encoded,
        f"data:video/mp4;base64,{encoded}",
    ]
    paths = [
        "clips/a.mp4",
        {"path": "clips/a.mp4", "bytes": None},
        Path("clips/a.mp4"),
        f"file://{tmp_path}/clips/a.mp4",
    ]
    refs = {clip(form, tmp_path) for form in [*forms, *paths]}
    assert len(refs) == 1 and is_clip(refs.pop())
    assert len(calls) == 2  # once for the bytes, once for the file
    assert clip(data, fps=5.0) != clip(data, fps=9.0)


def test_a_list_of_frames_is_a_video() -> None:
    frames = [png(i) for i in range(10)]
    ref = clip(frames, fps=4.0)
    assert clip_of(ref).timestamps == tuple(i / 4 for i in range(10))
    assert [round(index_of(frame, 10)) for frame in frames_of(ref)] == list(range(10))
    arrays = np.stack([pixels(i, 10) for i in range(10)])
    pictures = [Image.fromarray(array) for array in arrays]
    uris = ["data:image/png;base64," + base64.b64encode(frame).decode() for frame in frames]
    for same in (arrays, list(arrays), pictures, uris, {"frames": frames, "fps": 4}):
        assert clip(same, fps=4.0) == ref
    for fps in (np.int64(2), np.float32(2), np.float64(2)):
        assert clip({"frames": frames, "fps": fps}) == clip({"frames": frames, "fps": 2})
    few = clip_of(clip({"frames": frames, "fps": 2}, max_frames=4))
    assert few.timestamps == (0, 1.5, 3.0, 4.5)


def test_which_lists_are_frames_and_which_are_videos() -> None:
    a, b, mp4 = png(0), png(1), video(2)
    assert video_values(None) == video_values([]) == video_values("") == []
    assert video_values("a.mp4") == ["a.mp4"]
    assert video_values(["a.mp4", mp4]) == ["a.mp4", mp4]
    assert video_values([a, b]) == [[a, b]] == video_values([[a, b]])
    assert video_values([["a.png", "b.PNG"], "c.webm"]) == [["a.png", "b.PNG"], "c.webm"]
    assert video_values('[["a.png"], ["b.png"]]') == [["a.png"], ["b.png"]]
    assert video_values([[{"bytes": mp4, "path": None}]]) == [{"bytes": mp4, "path": None}]
    assert video_values([{"frames": [a], "fps": 1}]) == [{"frames": [a], "fps": 1}]


@pytest.mark.slow
def test_of_a_long_video_few_frames_are_decoded(monkeypatch: Any) -> None:
    """Two hours: by seeking, at most a group of pictures is decoded for each sampled frame."""
    data = video(7200, fps=1, gop=60)
    decoded = []
    real = video_decoding._Frames._next

    def counted(self: Any, pts: int) -> Any:
        frames = self._decoded
        self._decoded = (decoded.append(1) or frame for frame in frames)
        return real(self, pts)

    monkeypatch.setattr(video_decoding._Frames, "_next", counted)
    sampled = clip_of(clip(data, max_frames=8))
    assert sampled.timestamps == pytest.approx(np.linspace(0, 7199, 8).round(), abs=1e-6)
    assert len(decoded) <= 8 * 64


@pytest.mark.parametrize(
    ("container", "codec"), [("mp4", "libx264"), ("webm", "libvpx"), ("avi", "mpeg4")]
)
def test_damaged_bytes_are_a_clip_or_an_error(container: str, codec: str) -> None:
    data = video(40, container=container, codec=codec)
    randomly = random.Random(1)
    refused = 0
    for _ in range(40):
        damaged = bytearray(data)
        for _ in range(randomly.choice((1, 8, 60))):
            damaged[randomly.randrange(len(data))] = randomly.randrange(256)
        try:
            assert clip_of(
                clip(bytes(damaged[: randomly.choice((None, len(data) * 2 // 3))]))
            ).frames
        except ImageError:
            refused += 1
    assert refused > 5


def row(problem: Any, videos: Any = None, images: Any = None) -> Any:
    columns = {"problem": problem, "answer": "6", "videos": videos, "images": images}
    return row_to_problem(columns, "d:0", RowFormat().for_columns(columns))


def parts(problem: Any) -> list[str]:
    """The text of each part of the first message, and of the others the type and the URL."""
    return [
        part.get("text") or f"{part['type']} {part[part['type']]['url']}"
        for message in problem.messages
        for part in message["content"]
    ]


def test_videos_and_images_stand_where_their_marks_do() -> None:
    mp4, picture = video(9), png(1)
    a, b, image = clip(mp4), clip([png(0), png(1)]), ImageRef.of(picture)
    p = row("<video>Then <image>, then\n<video>", [mp4, [png(0), png(1)]], [picture])
    assert p.images == (a, image, b)
    assert parts(p) == [
        f"video_url {a.url}",
        "Then ",
        f"image_url {image.url}",
        ", then\n",
        f"video_url {b.url}",
    ]
    assert all(set(part) <= {"type", "text", part["type"]} for part in p.messages[0]["content"])
    assert "videos" not in p.columns
    p = row("What?", [mp4], [picture])
    assert p.images == (image, a) and parts(p)[2] == "What?"
    content = [
        {"type": "video", "video": [picture, png(2)], "fps": 4.0},
        {"type": "text", "text": "and "},
        {
            "type": "video_url",
            "video_url": {"url": "data:video/mp4;base64," + base64.b64encode(mp4).decode()},
        },
        {"type": "video"},
        {"type": "image"},
    ]
    p = row([{"role": "user", "content": content}], mp4, picture)
    assert p.images == (clip([picture, png(2)], fps=4.0), a, a, image)


def test_a_data_set_names_its_bad_videos(tmp_path: Path) -> None:
    good = video(6)
    table = pa.table(
        {
            "problem": ["<video>?"] * 4,
            "answer": ["1"] * 4,
            "videos": [[good], [good[:900]], [sound()], [b"x"]],
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    dataset = ProblemDataset([str(tmp_path / "rows.parquet")], "train")
    result = dataset.filter_by_length(range(4), lambda i, p: 1, 10)
    assert list(result.kept) == [0] and list(result.bad) == [1, 2, 3]
    assert {b.kind for b in result.bad.values()} == {"video can't be decoded", "not a video"}
    (tmp_path / "a.mp4").write_bytes(good)
    lines = [
        {"problem": "?", "answer": "1", "video": "a.mp4"},
        {"problem": "?", "answer": "1", "video": None},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    dataset = ProblemDataset([str(tmp_path / "rows.jsonl")], "train")
    result = dataset.filter_by_length(range(2), lambda i, p: 1, 10, image_only=True)
    assert list(result.kept) == [0] and list(result.text_only) == [1]
    assert dataset[0].images == (clip(good),)


def test_conversations_to_imitate_have_videos() -> None:
    messages = [
        {"role": "user", "content": "<video>Which way?"},
        {"role": "assistant", "content": "left"},
    ]
    columns = {"messages": messages, "videos": [video(5)]}
    form = RowFormat(messages_key="messages").for_columns(columns)
    p = row_to_problem(columns, "d:0", form)
    assert p.images == (clip(video(5)),) and p.messages[1]["weight"] == 1


def test_a_clip_is_blanked_and_corrupted_frame_by_frame() -> None:
    ref = clip(np.stack([pixels(3, 10)] * 5))  # it stands still
    assert image_size(ref) == (HEIGHT, WIDTH)
    blank = blank_view(ref)
    assert clip_of(blank).timestamps == clip_of(ref).timestamps
    assert {f.getextrema() for f in frames_of(blank)} == {((128, 128),) * 3}
    assert image_size(blank) == (HEIGHT, WIDTH)
    noisy = Noise(0.5)(ref, 7)
    assert noisy == Noise(0.5)(ref, 7) != Noise(0.5)(ref, 8)
    assert clip_of(noisy).timestamps == clip_of(ref).timestamps
    assert len(set(clip_of(noisy).frames)) == 5
    assert {f.size for f in frames_of(noisy)} == {(WIDTH, HEIGHT)}


def test_limits_of_images_leave_videos_alone() -> None:
    columns = {
        "problem": "<image><video><image>?",
        "answer": "6",
        "videos": [video(5)],
        "images": [png(0), png(1)],
    }
    form = RowFormat(max_images_per_message=1).for_columns(columns)
    p = row_to_problem(columns, "d:0", form)
    assert p.images == (ImageRef.of(png(0)), clip(video(5))) and p.dropped_images == 1


def test_rounded_times_of_a_video_are_those_of_its_rate() -> None:
    """To two ticks of the clock; no muxer writes such times at will, hence the private name."""
    base, rate = Fraction(1, 1000), Fraction(30)
    for last, seconds in ((165, Fraction(1, 5)), (168, Fraction(1, 5)), (160, Fraction(24, 125))):
        times = [0, 33, 67, 100, 133, last]
        assert video_decoding._duration(times, base, rate) == seconds
        assert video_decoding._duration(times, base, None) == last * base * Fraction(6, 5)
    assert video_decoding._duration([7], base, rate) == 0
