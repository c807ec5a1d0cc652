"""Whether an image can be decoded, found with as little of that as it takes: `decode` has the last word on what looks damaged.

Of a PNG the rows are inflated and not unfiltered, of a JPEG the coefficients are read and an eighth of the size is transformed.
"""

import io
import struct
import zlib
from collections.abc import Iterator

import numpy as np
from PIL import Image

from rlinf_vl.data.images import decode
from rlinf_vl.types import ImageRef

_PNG = b"\x89PNG\r\n\x1a\n"
#: Color type → samples of a pixel.
_SAMPLES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}


def check_pixels(ref: ImageRef) -> None:
    """Raise what `decode` raises for an image whose header is sound: ImageError if its pixels are truncated or damaged."""
    data = bytes(ref.data)
    try:
        sound = _is_sound_png(data) if data.startswith(_PNG) else _is_sound_jpeg(data)
    except Exception:  # decoders raise anything
        sound = False
    if not sound:
        decode(ref)


def _is_sound_jpeg(data: bytes) -> bool:
    if not data.startswith(b"\xff\xd8\xff"):
        return False
    image = Image.open(io.BytesIO(data), formats=("JPEG",))
    image.draft(image.mode, (1, 1))
    image.load()
    return True


def _is_sound_png(data: bytes) -> bool:
    """Whether the chunks end with IEND, and the rows are all there and name filters that exist."""
    chunks = list(_chunks(data))
    width, height, depth, color, *methods = struct.unpack(">IIBBBBB", chunks[0][1])
    kinds = [kind for kind, _ in chunks]
    if kinds[-1] != b"IEND" or any(methods) or (color == 3 and b"PLTE" not in kinds):
        return False
    stride = 1 + (width * _SAMPLES[color] * depth + 7) // 8
    packed = b"".join(content for kind, content in chunks if kind == b"IDAT")
    rows = zlib.decompressobj().decompress(packed, stride * height)
    return len(rows) == stride * height and int(np.frombuffer(rows, np.uint8)[::stride].max()) <= 4


def _chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """(kind, content) of each chunk of a PNG, to the end of the file or IEND."""
    at, kind = len(_PNG), b""
    while at < len(data) and kind != b"IEND":
        size, kind = struct.unpack_from(">I4s", data, at)
        yield kind, data[at + 8 : at + 8 + size]
        at += size + 12
