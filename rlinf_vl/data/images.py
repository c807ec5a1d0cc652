"""Conversion of images from every representation in data sets to `ImageRef`, and from there to
pixels.

An `ImageRef` holds the encoded bytes unchanged. Invariants:

- A path in a row never leaves its dataset's folder, and a URL names a host that the config lists.
- Nothing larger than `MAX_BYTES` is read, nothing with more than `MAX_PIXELS` is decoded.
- `image_size` reads the header only and returns the size of the image that `decode` returns.
"""

import io
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from rlinf_vl.data.clips import clip_of, is_clip
from rlinf_vl.data.fetch import fetch
from rlinf_vl.data.local_files import decode_base64, decode_data_uri, file_inside, unreadable
from rlinf_vl.data.unusable import ImageError, shorten
from rlinf_vl.data.video_files import HINT, MISPLACED, is_video, is_video_name
from rlinf_vl.types import ImageRef

#: Largest area: 150 MB as RGB, and at most 16 bytes a pixel while decoding. Diagrams and photos are
#: far smaller; a larger image in a small file (a decompression bomb) can exhaust a worker's memory.
MAX_PIXELS = 50_000_000
MAX_BYTES = 64 * 2**20
#: Maximum ratio of the sides; the image processors of the Qwen-VL families refuse a higher one.
MAX_ASPECT_RATIO = 200
#: Formats that are opened. Others of Pillow, such as EPS, start programs or read further files.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_SIGNATURES = (b"\x89PNG", b"\xff\xd8\xff", b"RIFF", b"GIF8")
_ORIENTATION_TAG = 0x0112
_TILE_WIDTH_TAG = 0x0142
_TILE_LENGTH_TAG = 0x0143
#: Keys under which a mapping has its image: those of `datasets`, and those of message parts, which
#: verl's column of images may hold.
_DICT_KEYS = ("bytes", "path", "image", "url")
_T = Image.Transpose
#: The transposition that turns a picture of EXIF orientation 2, 3, … 8 upright.
_UPRIGHT: tuple[Image.Transpose, ...] = (
    _T.FLIP_LEFT_RIGHT,
    _T.ROTATE_180,
    _T.FLIP_TOP_BOTTOM,
    _T.TRANSPOSE,
    _T.ROTATE_270,
    _T.TRANSVERSE,
    _T.ROTATE_90,
)

NOT_AN_IMAGE = "not an image"
TOO_LARGE = "image too large"
UNDECODABLE = "image can't be decoded"


def image_values(cell: Any) -> list[Any]:
    """Return the images of one cell of a table, in order.

    None has no image, a single value one, a list one per element. Lists, tuples and arrays of
    objects may be nested, and a list may be written as JSON. An array of pixels is one value, which
    `to_image_ref` refuses.
    """
    if isinstance(cell, str) and cell.startswith("["):
        with suppress(ValueError):
            return image_values(json.loads(cell))
    if isinstance(cell, np.ndarray) and cell.dtype.kind in "OSU":
        cell = cell.tolist()
    if isinstance(cell, (list, tuple)):
        return [value for element in cell for value in image_values(element)]
    return [] if cell is None else [cell]


def to_image_ref(value: Any, *, root: Path | None, hosts: Sequence[str] = ()) -> ImageRef:
    """Convert one image of a row to its encoded bytes.

    Args:
        value: encoded bytes; {"bytes": …, "path": …} (either may be None; bytes have priority) or
            {"image": …}; a base64 string or data URI; a path inside `root`; a URL of one of
            `hosts`; or a PIL image, which is encoded as PNG.
        root: the dataset's folder, to which paths are relative and which they may not leave; None
            if it has none.
        hosts: hosts from which images may be fetched (data.image_hosts).

    Raises:
        ImageError: the value is anything else, a path outside `root`, or bytes without the header
            of an image of acceptable size.
    """
    if isinstance(value, dict):
        if not set(_DICT_KEYS) & value.keys():
            raise ImageError(
                NOT_AN_IMAGE,
                f"a dict with keys {sorted(map(str, value))}: expected 'bytes' or 'path'",
            )
        value = next((value[key] for key in _DICT_KEYS if value.get(key) is not None), None)
        if value is None or isinstance(value, dict):
            fault = "'path' are both None" if value is None else "'path' hold a dict again"
            raise ImageError(NOT_AN_IMAGE, f"a dict whose 'bytes' and {fault}")
    if isinstance(value, str):
        data = _from_string(value, root, hosts)
    elif isinstance(value, Image.Image):
        data = encode_png(value)
    elif isinstance(value, (bytes, bytearray, memoryview)):
        data = bytes(value)
    else:
        value_type = type(value).__name__ + (
            f" of shape {value.shape}" if isinstance(value, np.ndarray) else ""
        )
        expected = "bytes, a dict of bytes or path, base64, a path or a PIL image"
        raise ImageError(NOT_AN_IMAGE, f"{value_type} is no image: expected {expected}")
    _check_bytes(len(data))
    if not isinstance(value, Image.Image):  # a PIL image was just encoded, so it can be read
        _open(data)
    return ImageRef.of(data)


def decode(ref: ImageRef) -> Image.Image:
    """Decode an image, upright, in mode RGB.

    The result is the first frame, with transparency on white and greys scaled to 8 bits
    (`_white`).

    Raises:
        ImageError: the bytes are truncated or can't be decoded for another reason, or greys of 32
            bits are in no range that images use.
    """
    image, orientation = _open(ref.data)
    try:
        image.load()
        image = _to_rgb(image)
    except ImageError as e:
        raise ImageError(e.kind, f"image {ref.hash[:12]}: {e.reason}") from e
    except Exception as e:  # Pillow raises OSError, SyntaxError, struct.error, EOFError…
        raise ImageError(
            UNDECODABLE, f"image {ref.hash[:12]} ({len(ref.data)} bytes) can't be decoded: {e}"
        ) from e
    return image.transpose(_UPRIGHT[orientation - 2]) if 2 <= orientation <= 8 else image


def image_size(ref: ImageRef) -> tuple[int, int]:
    """Return (height, width) of the upright picture in pixels, from the header alone; those of a
    frame, if it is a clip."""
    if is_clip(ref):
        return image_size(ImageRef.of(clip_of(ref).frames[0]))
    image, orientation = _open(ref.data)
    # Orientations 5 … 8 swap the sides; Pillow's size is (width, height).
    return image.size if 5 <= orientation <= 8 else (image.height, image.width)


def _open(data: bytes | memoryview) -> tuple[Image.Image, int]:
    """Read the header; return the image, not yet decoded, and its EXIF orientation."""
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        # Pillow turns TIFFs upright itself, and would decode a whole PNG to find its EXIF data.
        no_exif = image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info)
        orientation = 1 if no_exif else image.getexif().get(_ORIENTATION_TAG, 1)
        orientation = orientation if isinstance(orientation, int) else 1  # a damaged tag may differ
        tags = image.tag_v2 if isinstance(image, TiffImageFile) else {}
        tile_width = int(tags.get(_TILE_WIDTH_TAG, 1))
        tile_height = int(tags.get(_TILE_LENGTH_TAG, 1))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as e:
        raise ImageError(TOO_LARGE, f"{e}; at most {MAX_PIXELS:,} pixels are accepted") from e
    except Exception as e:  # a malformed header raises errors of many types, too
        cause = "" if isinstance(e, UnidentifiedImageError) else f": {e}"
        first_bytes = bytes(data[:8])
        description = f"{len(data)} bytes beginning {first_bytes!r}"
        if is_video(bytes(data[:12])):
            raise ImageError(MISPLACED, f"{description} are a video; {HINT}") from e
        if first_bytes.startswith(_SIGNATURES):
            raise ImageError(
                UNDECODABLE, f"{description} are the damaged or truncated header of an image{cause}"
            ) from e
        raise ImageError(
            NOT_AN_IMAGE, f"{description} are no image ({', '.join(FORMATS)}){cause}"
        ) from e
    _check_size(*image.size, (tile_width, tile_height))
    return image, orientation


def _check_bytes(n: int) -> None:
    if n > MAX_BYTES:
        raise ImageError(TOO_LARGE, f"an image of {n:,} bytes; at most {MAX_BYTES:,} are accepted")


def _check_size(width: int, height: int, tile: tuple[int, int] = (1, 1)) -> None:
    # A tile is decoded as a whole, even if it is larger than the image.
    for w, h in (tile, (width, height)):
        if w * h > MAX_PIXELS:
            raise ImageError(
                TOO_LARGE, f"an image of {w}×{h} pixels; at most {MAX_PIXELS:,} are accepted"
            )
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        reason = f"an image of {width}×{height} pixels: one side is over {MAX_ASPECT_RATIO} times the other"
        raise ImageError("image too narrow", reason)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        values = np.asarray(image)
        white = _white(image.mode, values)
        if image.mode == "F":
            grey = np.rint(values * np.float32(255 / white))
        else:
            grey = values >> 8 if white > 255 else values
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def _white(mode: str, values: np.ndarray) -> int:
    """Return the value that is white among the greys of an image.

    16 bits say it. 32 bits, whole or not, hold values of any range: white is the smallest of 1 (of
    mode F), 255 and 65,535 that no value exceeds.

    Raises:
        ImageError: a value of 32 bits is negative, above 65,535 or not finite.
    """
    if mode.startswith("I;16"):
        return 65535
    low, high = float(values.min()), float(values.max())
    for white in (1, 255, 65535) if mode == "F" else (255, 65535):
        if low >= 0 and high <= white:
            return white
    raise ImageError(
        UNDECODABLE,
        f"greys of 32 bits from {low:g} to {high:g}, of which it is unknown what white is; store "
        "them as 0 to 255 or 0 to 65,535",
    )


def encode_png(image: Image.Image) -> bytes:
    """Encode a PIL image as PNG, turned upright, since the PNG has no EXIF orientation."""
    _check_size(*image.size)
    buffer = io.BytesIO()
    try:
        if image.getexif().get(_ORIENTATION_TAG, 1) != 1:
            image = ImageOps.exif_transpose(image)
        if image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
            image = _to_rgb(image)
        image.save(buffer, format="PNG")
    except ImageError:
        raise
    except Exception as e:  # a lazily opened PIL image is decoded here
        raise ImageError(UNDECODABLE, f"a PIL image that can't be decoded: {e}") from e
    return buffer.getvalue()


def _from_string(text: str, root: Path | None, hosts: Sequence[str]) -> bytes:
    if text[:8].lower().startswith(("http://", "https://")):
        return fetch(text, hosts, MAX_BYTES, check=_open)
    if text[:5].lower() == "data:":
        return decode_data_uri(text, NOT_AN_IMAGE)
    is_file_url = text[:7].lower() == "file://"
    if not is_file_url and (data := decode_base64(text)) is not None:
        # A path may be valid base64 by chance: only bytes of an image count.
        try:
            _open(data)
            return data
        except ImageError as e:
            if e.kind != NOT_AN_IMAGE:  # base64 of an unusable image is no path, either
                raise
    return _read_inside(root, text)


def _read_inside(root: Path | None, name: str) -> bytes:
    if is_video_name(name):
        raise ImageError(MISPLACED, f"path {shorten(name)!r} is a video's; {HINT}")
    path = file_inside(root, name, "image")
    try:
        _check_bytes(path.stat().st_size)
        with path.open("rb") as file:
            # One byte too many, so that a file that has grown meanwhile is refused.
            return file.read(MAX_BYTES + 1)
    except OSError as e:
        raise ImageError(
            unreadable("image"), f"path {shorten(name)!r} in {root} can't be read: {e}"
        ) from e
