"""A video as the policy sees it: the frames that were sampled from it, and their times.

A video is decoded and sampled once, where its row is read. The result travels as one `ImageRef`, so
groups, engines and the trainer share it by its hash as they share pictures, and all see the same
frames. Its bytes are a magic word, a JSON header, and the encoded frames one after another.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlinf_vl.types import ImageRef

MAGIC = b"rlinf_vl clip 1\n"
#: Bytes of the number, little endian, that says how long the header is.
_LENGTH_BYTES = 4


@dataclass(frozen=True, slots=True)
class Clip:
    """The sampled frames of a video.

    Attributes:
        frames: encoded pictures (PNG, JPEG, …) of one size, in the order of time.
        timestamps: the seconds at which they are shown, from the video's start.
    """

    frames: tuple[bytes, ...]
    timestamps: tuple[float, ...]


def clip_ref(frames: Sequence[bytes], timestamps: Sequence[float]) -> ImageRef:
    """Return the reference that carries these encoded frames and their times in seconds."""
    assert len(frames) == len(timestamps) > 0, (len(frames), len(timestamps))
    header = json.dumps(
        {"timestamps": list(timestamps), "lengths": [len(frame) for frame in frames]}
    ).encode()
    return ImageRef.of(
        b"".join([MAGIC, len(header).to_bytes(_LENGTH_BYTES, "little"), header, *frames])
    )


def is_clip(ref: ImageRef) -> bool:
    """Return whether a reference carries a clip; else it is one picture."""
    return bytes(ref.data[: len(MAGIC)]) == MAGIC


def clip_of(ref: ImageRef) -> Clip:
    """Return the clip that a reference of `clip_ref` carries."""
    header, end = _header(ref)
    frames = []
    for length in header["lengths"]:
        frames.append(bytes(ref.data[end : end + length]))
        end += length
    return Clip(tuple(frames), tuple(header["timestamps"]))


def frame_refs(ref: ImageRef) -> tuple[ImageRef, ...]:
    """Return the pictures that a reference shows: the frames of a clip, else itself."""
    return tuple(map(ImageRef.of, clip_of(ref).frames)) if is_clip(ref) else (ref,)


def timestamps_of(ref: ImageRef) -> tuple[float, ...]:
    """Return the timestamps of the clip that a reference carries, without its frames."""
    return tuple(_header(ref)[0]["timestamps"])


def _header(ref: ImageRef) -> tuple[dict[str, Any], int]:
    """Return the header of a clip, and the index of the byte after it."""
    assert is_clip(ref), f"{ref.hash} is no clip"
    start = len(MAGIC) + _LENGTH_BYTES
    end = start + int.from_bytes(ref.data[len(MAGIC) : start], "little")
    return json.loads(bytes(ref.data[start:end])), end
