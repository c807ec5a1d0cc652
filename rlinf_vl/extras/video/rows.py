"""Conversion of videos from every representation in data sets to clips (`rlinf_vl.data.clips`).

A video is decoded once in a process: its clip is cached by the video's content and the settings.
"""

import hashlib
import io
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

from rlinf_vl.config.schema.data import VideoConfig
from rlinf_vl.data.clips import MAGIC, clip_of, clip_ref
from rlinf_vl.data.fetch import fetch
from rlinf_vl.data.images import decode, encode_png, image_size, to_image_ref
from rlinf_vl.data.local_files import decode_base64, decode_data_uri, file_inside
from rlinf_vl.data.tables import IMAGE_SUFFIXES
from rlinf_vl.data.unusable import ImageError
from rlinf_vl.data.video_files import is_video_name
from rlinf_vl.extras.video.decoding import (
    NOT_A_VIDEO,
    TOO_LARGE,
    SampledFrame,
    fitted_size,
    resized,
    sample_video,
    sampled_indices,
)
from rlinf_vl.types import ImageRef

#: Largest video in a row or from a host, and largest file, which is never in memory as a whole.
MAX_BYTES = 512 * 2**20
MAX_FILE_BYTES = 16 * 2**30
#: Largest number of frames in a list, and bytes of clips that a process caches.
MAX_LISTED_FRAMES = 10_000
CACHE_BYTES = 256 * 2**20
#: Keys under which a mapping has its video, as for images.
_DICT_KEYS = ("bytes", "path", "video", "url")
#: Types of numbers; tables hold numpy's.
_NUMBERS = (int, float, np.integer, np.floating)
#: First bytes of pictures; GIF is a video here.
_PICTURES = (b"\x89PNG", b"\xff\xd8\xff", b"BM", b"II*\0", b"MM\0*")


class _ClipCache:
    """The newest clips of this process, up to `CACHE_BYTES`; callable from any thread."""

    def __init__(self) -> None:
        self._clips: OrderedDict[Any, ImageRef] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: Any, make: Callable[[], ImageRef]) -> ImageRef:
        """Return the clip of a key, which `make` makes if it is not there."""
        with self._lock:
            if key in self._clips:
                self._clips.move_to_end(key)
                return self._clips[key]
        clip = make()
        with self._lock:
            if key not in self._clips:
                self._bytes += len(clip.data)
            self._clips[key] = clip
            while self._bytes > CACHE_BYTES and len(self._clips) > 1:
                self._bytes -= len(self._clips.popitem(last=False)[1].data)
        return clip


_CLIPS = _ClipCache()


def video_values(cell: Any) -> list[Any]:
    """Return the videos of one cell of a table, in order.

    None has no video, a single value one. A list of pictures only is one video, given as frames;
    any other list has the videos of its elements. A list may be written as JSON.
    """
    if isinstance(cell, str) and cell.startswith("["):
        with suppress(ValueError):
            return video_values(json.loads(cell))
    if isinstance(cell, np.ndarray) and cell.dtype.kind in "OSU":
        cell = cell.tolist()
    if isinstance(cell, (list, tuple)):
        if cell and all(map(_is_picture, cell)):
            return [list(cell)]
        return [value for element in cell for value in video_values(element)]
    return [] if cell is None or cell == "" else [cell]


def to_clip_ref(
    value: Any, *, root: Path | None, settings: VideoConfig, hosts: Sequence[str] = ()
) -> ImageRef:
    """Convert one video of a row to the clip of its sampled frames.

    Args:
        value: encoded bytes, or a clip's; {"bytes": …, "path": …} or {"video": …}; a base64 string or data URI;
            a path inside `root`; a URL of one of `hosts`; or frames: a list of pictures as
            `to_image_ref` takes them, an array uint8 [T, H, W, 3], or {"frames": …, "fps": …}.
        root: the folder that paths are relative to and may not leave; None if there is none.
        settings: data.video.
        hosts: hosts from which videos may be fetched (data.image_hosts).

    Raises:
        ImageError: the value is anything else, or a video that can't be used.
    """
    if isinstance(value, dict) and value.get("frames") is not None:
        fps = settings.fps if value.get("fps") is None else value["fps"]
        if isinstance(fps, bool) or not isinstance(fps, _NUMBERS) or not 0 < fps < np.inf:
            raise ImageError(NOT_A_VIDEO, f"fps is {fps!r}: expected a number above 0")
        return _clip_of_frames(value["frames"], float(fps), root, settings, hosts)
    if isinstance(value, dict):
        keys = sorted(map(str, value))
        value = next((value[key] for key in _DICT_KEYS if value.get(key) is not None), None)
        if value is None or isinstance(value, dict):
            raise ImageError(
                NOT_A_VIDEO, f"a dict with keys {keys}: expected 'bytes', 'path' or 'frames'"
            )
    if isinstance(value, np.ndarray) and value.ndim == 4 or isinstance(value, (list, tuple)):
        return _clip_of_frames(value, settings.fps, root, settings, hosts)
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, str):
        value = _source_of(value, root, hosts)
    if isinstance(value, Path):
        return _clip_of_file(value, settings)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _clip_of_bytes(bytes(value), settings)
    raise ImageError(
        NOT_A_VIDEO,
        f"{type(value).__name__} is no video: expected bytes, a dict of bytes or path, base64, a "
        "path or a list of frames",
    )


def _is_picture(value: Any) -> bool:
    """Return whether a value is a picture rather than a video, by its first bytes or its name."""
    if isinstance(value, dict):
        if value.get("frames") is not None:
            return False
        value = next((value[key] for key in ("image", *_DICT_KEYS) if value.get(key)), None)
    if isinstance(value, str):
        return value.lower().endswith(IMAGE_SUFFIXES) or value[:11].lower() == "data:image/"
    if isinstance(value, (bytes, bytearray, memoryview)):
        begin = bytes(value[:12])
        return begin.startswith(_PICTURES) or begin[:4] + begin[8:] == b"RIFFWEBP"
    return isinstance(value, Image.Image) or (isinstance(value, np.ndarray) and value.ndim < 4)


def _source_of(text: str, root: Path | None, hosts: Sequence[str]) -> bytes | Path:
    """Return the bytes of a video that a text names or encodes, or the path of its file."""
    if text[:8].lower().startswith(("http://", "https://")):
        return fetch(text, hosts, MAX_BYTES, check=_check_bytes)
    if text[:5].lower() == "data:":
        return decode_data_uri(text, NOT_A_VIDEO)
    if not is_video_name(text) and len(text) > 64 and (data := decode_base64(text)) is not None:
        return data
    return file_inside(root, text, "video")


def _check_bytes(data: bytes) -> None:
    if len(data) > MAX_BYTES:
        raise ImageError(
            TOO_LARGE,
            f"a video of {len(data):,} bytes; at most {MAX_BYTES:,} are accepted in a row: name "
            "its file instead",
        )
    if not data:
        raise ImageError(NOT_A_VIDEO, "a video of 0 bytes")


def _clip_of_bytes(data: bytes, settings: VideoConfig) -> ImageRef:
    if data.startswith(MAGIC):
        return _checked_clip(data)
    _check_bytes(data)
    key = (hashlib.sha256(data).digest(), astuple(settings))
    return _CLIPS.get(key, lambda: _sampled(io.BytesIO(data), settings))


def _checked_clip(data: bytes) -> ImageRef:
    """Return a clip that was sampled before; an agent in another process passes it on."""
    ref = ImageRef.of(data)
    try:
        clip = clip_of(ref)
        sizes = {image_size(to_image_ref(frame, root=None)) for frame in clip.frames}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ImageError(NOT_A_VIDEO, f"a damaged clip: {error}") from error
    if len(sizes) != 1 or len(clip.frames) != len(clip.timestamps):
        raise ImageError(NOT_A_VIDEO, "a damaged clip: its frames don't match")
    return ref


def _clip_of_file(path: Path, settings: VideoConfig) -> ImageRef:
    def read() -> ImageRef:
        with path.open("rb") as file:
            return _sampled(file, settings)

    try:
        facts = path.stat()
        if facts.st_size > MAX_FILE_BYTES:
            raise ImageError(
                TOO_LARGE,
                f"a file of {facts.st_size:,} bytes; at most {MAX_FILE_BYTES:,} are accepted",
            )
        if not facts.st_size:
            raise ImageError(NOT_A_VIDEO, "a file of 0 bytes")
        # A file of gigabytes is not hashed: one that is written anew has another time.
        key = (str(path), facts.st_size, facts.st_mtime_ns, astuple(settings))
        return _CLIPS.get(key, read)
    except ImageError as error:
        raise ImageError(error.kind, f"{path.name!r}: {error.reason}") from error
    except OSError as error:
        raise ImageError("video file can't be read", f"{path.name!r}: {error}") from error


def _sampled(file: BinaryIO, settings: VideoConfig) -> ImageRef:
    return _clip(
        sample_video(
            file,
            fps=settings.fps,
            max_frames=settings.max_frames,
            min_pixels=settings.min_pixels,
            max_pixels=settings.max_pixels,
        )
    )


def _clip_of_frames(
    values: Any, fps: float, root: Path | None, settings: VideoConfig, hosts: Sequence[str]
) -> ImageRef:
    """Return the clip of frames `1 / fps` seconds apart; of too many, evenly sampled ones."""
    if not len(values):
        raise ImageError(NOT_A_VIDEO, "a video of 0 frames")
    if len(values) > MAX_LISTED_FRAMES:
        raise ImageError(
            TOO_LARGE,
            f"a video of {len(values):,} frames; at most {MAX_LISTED_FRAMES:,} are accepted",
        )
    frames: list[SampledFrame] = []
    size = (0, 0)
    for index in sampled_indices(len(values), min(len(values), settings.max_frames)):
        try:
            image = _decoded_frame(values[index], root, hosts)
        except ImageError as error:
            raise ImageError(error.kind, f"frame {index}: {error.reason}") from error
        if frames and image.size != size:
            widths_and_heights = f"{image.width}×{image.height}, the first {size[0]}×{size[1]}"
            raise ImageError(
                "frames of different sizes",
                f"frame {index} has {widths_and_heights} pixels: the frames of a video have one size",
            )
        size = image.size
        target = fitted_size(*size, settings.min_pixels, settings.max_pixels)
        frames.append(SampledFrame(resized(image, target), index / fps))
    return _clip(frames)


def _decoded_frame(value: Any, root: Path | None, hosts: Sequence[str]) -> Image.Image:
    if isinstance(value, np.ndarray):
        try:
            value = Image.fromarray(value)
        except TypeError as error:
            raise ImageError(
                NOT_A_VIDEO,
                f"an array of {value.dtype} {list(value.shape)}: expected uint8 [H, W, 3]",
            ) from error
    return decode(to_image_ref(value, root=root, hosts=hosts))


def _clip(frames: Iterable[SampledFrame]) -> ImageRef:
    encoded, timestamps = [], []
    for frame in frames:
        encoded.append(encode_png(frame.image))
        timestamps.append(frame.seconds)
    return clip_ref(encoded, timestamps)
