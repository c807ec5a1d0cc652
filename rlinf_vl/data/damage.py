"""A fast check whether an image can be decoded.

A PNG's rows are inflated but not unfiltered; a JPEG's coefficients are read, but only an eighth of
the size is transformed. An image that looks damaged is decoded in full to decide.
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
    """Check the pixels of an image whose header is sound.

    Raises:
        ImageError: the pixels are truncated or damaged, as `decode` reports it.
    """
    data = bytes(ref.data)
    try:
        sound = _is_sound_png(data) if data.startswith(_PNG) else _is_sound_jpeg(data)
    except Exception:  # decoders raise exceptions of many types
        sound = False
    if not sound:
        decode(ref)


def _is_sound_jpeg(data: bytes) -> bool:
    """Return whether all coefficients can be read; raises if they can't."""
    if not data.startswith(b"\xff\xd8\xff"):
        return False
    image = Image.open(io.BytesIO(data), formats=("JPEG",))
    image.draft(image.mode, (1, 1))  # the smallest scale that the decoder has
    image.load()
    return True


def _is_sound_png(data: bytes) -> bool:
    """Return whether the chunks end with IEND, and all rows exist and have valid filter types."""
    chunks = list(_chunks(data))
    width, height, depth, color, *methods = struct.unpack(">IIBBBBB", chunks[0][1])
    kinds = [kind for kind, _ in chunks]
    if kinds[-1] != b"IEND" or any(methods) or (color == 3 and b"PLTE" not in kinds):
        return False
    # Each row begins with one byte, its filter type, 0 … 4.
    stride = 1 + (width * _SAMPLES[color] * depth + 7) // 8
    packed = b"".join(content for kind, content in chunks if kind == b"IDAT")
    rows = zlib.decompressobj().decompress(packed, stride * height)
    return len(rows) == stride * height and int(np.frombuffer(rows, np.uint8)[::stride].max()) <= 4


def _chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield (kind, content) of each chunk of a PNG, up to IEND or the end of the file."""
    offset, kind = len(_PNG), b""
    while offset < len(data) and kind != b"IEND":
        size, kind = struct.unpack_from(">I4s", data, offset)
        yield kind, data[offset + 8 : offset + 8 + size]
        offset += size + 12
