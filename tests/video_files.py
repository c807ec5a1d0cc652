"""Small videos, encoded by PyAV, whose frames say which they are."""

import io
from fractions import Fraction
from typing import Any

import av
import numpy as np

WIDTH, HEIGHT = 64, 48


def pixels(index: int, count: int, size: tuple[int, int] = (WIDTH, HEIGHT)) -> np.ndarray:
    """A frame, uint8 [H, W, 3]: its brightness says its index, its top left corner is white."""
    width, height = size
    frame = np.full((height, width, 3), 40 + 160 * index // max(1, count - 1), np.uint8)
    frame[: height // 4, : width // 4] = 255
    return frame


def index_of(frame: Any, count: int) -> float:
    """The index that the brightness of the lower right quarter says; codecs blur it a little."""
    array = np.asarray(frame)
    height, width = array.shape[:2]
    return (float(array[height // 2 :, width // 2 :].mean()) - 40) * max(1, count - 1) / 160


def video(
    count: int = 60,
    *,
    fps: Any = 30,
    codec: str = "libx264",
    container: str = "mp4",
    size: tuple[int, int] = (WIDTH, HEIGHT),
    gop: int = 12,
    rotation: int = 0,
    b_frames: int | None = None,
    start: int = 0,
    options: dict[str, str] | None = None,
) -> bytes:
    """A video of `count` frames, the first at the time of frame `start`."""
    file = io.BytesIO()
    with av.open(file, "w", format=container, options=options or {}) as output:
        stream: Any = output.add_stream(codec, rate=fps)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        stream.codec_context.gop_size = gop
        if b_frames is not None:
            stream.codec_context.max_b_frames = b_frames
        for index in range(count):
            frame = av.VideoFrame.from_ndarray(pixels(index, count, size), format="rgb24")
            frame.pts, frame.time_base = start + index, 1 / Fraction(fps)
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    data = file.getvalue()
    return turned(data, rotation) if rotation else data


def turned(mp4: bytes, degrees: int) -> bytes:
    """The file with the display matrix that a phone writes which is held at an angle."""
    matrices = {
        90: (0, 1, -1, 0),  # to be shown turned clockwise
        180: (-1, 0, 0, -1),
        270: (0, -1, 1, 0),
    }
    a, b, c, d = matrices[degrees]
    entries = (a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)
    # The matrix stands 40 bytes after the version of the track's header (ISO 14496-12, 8.3.2).
    start = mp4.index(b"tkhd") + 4 + 40
    matrix = b"".join(entry.to_bytes(4, "big", signed=True) for entry in entries)
    return mp4[:start] + matrix + mp4[start + 36 :]


def sound(seconds: float = 1.0) -> bytes:
    """An mp4 file with silence and no pictures."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream: Any = output.add_stream("aac", rate=48000, layout="mono")
        for start in range(0, int(seconds * 48000), 1024):
            frame = av.AudioFrame.from_ndarray(
                np.zeros((1, 1024), np.float32), format="fltp", layout="mono"
            )
            frame.sample_rate, frame.pts = 48000, start
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return file.getvalue()
