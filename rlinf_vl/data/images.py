"""Images in every representation that datasets use → `ImageRef` (encoded bytes), and `ImageRef` → pixels.

Invariants kept here:
- Encoded bytes are kept exactly as they came; pixels are made where they are used, by `decode`.
- A path in a row never leads out of its dataset's folder, and a URL only to hosts that the config lists.
- Nothing is read that is larger than `MAX_BYTES`, nothing decoded that has more than `MAX_PIXELS`.
- `image_size` reads the header only and always agrees with the size of what `decode` returns.
"""

import base64
import binascii
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from rlinf_vl.data.fetch import FetchError, fetch
from rlinf_vl.types import ImageRef

MAX_PIXELS = 50_000_000
"""Largest area accepted, from the header: 150 MB as RGB, at most 16 bytes a pixel while decoding. Diagrams and photos are
far below; above it a small file can make a worker run out of memory (a decompression bomb)."""

MAX_BYTES = 64 * 2**20
"""Largest encoded image: what a file's size is held against before it is read."""

MAX_ASPECT_RATIO = 200
"""Longer side : shorter side. The image processors of the Qwen-VL families refuse more."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Formats that are opened. Others of Pillow's (EPS, for one) start programs or read further files."""

_SIGNATURES = (b"\x89PNG", b"\xff\xd8\xff", b"RIFF", b"GIF8")
_ORIENTATION_TAG = 0x0112
_TILE_TAGS = (0x0142, 0x0143)
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientation → what puts the picture upright; 1 is upright."""


class ImageError(ValueError):
    """A value that should be an image isn't a usable one.

    Attributes:
        kind: a short phrase for the class of reason, by which bad rows are counted.
        reason: what is wrong with this value.
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(kind, reason)
        self.kind, self.reason = kind, reason

    def __str__(self) -> str:
        return self.reason


NOT_AN_IMAGE = "not an image"
TOO_LARGE = "image too large"
TOO_NARROW = "image too narrow"
UNDECODABLE = "image can't be decoded"
UNREADABLE = "image file can't be read"
OUTSIDE = "path leaves the dataset's folder"
NOT_FETCHED = "image not fetched"


def image_values(cell: Any) -> list[Any]:
    """The images of one cell of a table, in order: none for None, one for a single value, else one per element.

    Lists, tuples and arrays of objects may be nested; an array of pixels is one value (which `to_image_ref` refuses).
    """
    if cell is None:
        return []
    if isinstance(cell, np.ndarray) and cell.dtype.kind in "OSU":
        cell = cell.tolist()
    if isinstance(cell, (list, tuple)):
        return [value for element in cell for value in image_values(element)]
    return [cell]


def to_image_ref(value: Any, *, root: Path | None, hosts: Sequence[str] = ()) -> ImageRef:
    """One image as a row gives it → its encoded bytes, by hash.

    Args:
        value: encoded bytes; {"bytes": …, "path": …} (either may be None; bytes win); a base64 string or data URI; a
            path inside `root`; a URL of one of `hosts`; or a PIL image, which is encoded as PNG.
        root: the dataset's folder, which paths are relative to and may not leave; None when it has none.
        hosts: whom images may be fetched from (data.image_hosts).

    Raises:
        ImageError: anything else, a path out of `root`, or bytes whose header isn't that of an image of sane size.
    """
    match value:
        case bytes() | bytearray() | memoryview():
            data = bytes(value)
        case Image.Image():
            data = _encode_png(value)
        case str():
            data = _from_string(value, root, hosts)
        case dict():
            if not {"bytes", "path"} & value.keys():
                raise ImageError(
                    NOT_AN_IMAGE, f"a dict with keys {sorted(map(str, value))}: expected 'bytes' or 'path'"
                )
            inner = next((value[key] for key in ("bytes", "path") if value.get(key) is not None), None)
            if inner is None:
                raise ImageError(NOT_AN_IMAGE, "a dict whose 'bytes' and 'path' are both None")
            if isinstance(inner, dict):
                raise ImageError(NOT_AN_IMAGE, "a dict whose 'bytes' or 'path' is a dict again")
            return to_image_ref(inner, root=root, hosts=hosts)
        case _:
            shape = f" of shape {value.shape}" if isinstance(value, np.ndarray) else ""
            raise ImageError(
                NOT_AN_IMAGE,
                f"{type(value).__name__}{shape} is no image: expected bytes, a dict of bytes or path, base64, a path "
                "or a PIL image",
            )
    _check_bytes(len(data))
    _open(data)
    return ImageRef.of(data)


def decode(ref: ImageRef) -> Image.Image:
    """The picture, upright, in mode RGB: first frame, transparency on white, 16-bit greys scaled to 8.

    Raises:
        ImageError: the bytes are truncated or otherwise can't be decoded.
    """
    image, orientation = _open(ref.data)
    try:
        image.load()
        image = _to_rgb(image)
    except Exception as e:  # Pillow's decoders raise anything: OSError, SyntaxError, struct.error, EOFError…
        raise ImageError(UNDECODABLE, f"image {ref.hash[:12]} ({len(ref.data)} bytes) can't be decoded: {e}") from e
    return image.transpose(_TRANSPOSE[orientation]) if orientation in _TRANSPOSE else image


def image_size(ref: ImageRef) -> tuple[int, int]:
    """(height, width) in pixels of the upright picture, from the header alone."""
    image, orientation = _open(ref.data)
    width, height = image.size
    return (width, height) if orientation in (5, 6, 7, 8) else (height, width)


def blank_like(ref: ImageRef) -> ImageRef:
    """A uniform mid-grey PNG of the same (upright) size: an image with nothing to see."""
    height, width = image_size(ref)
    return ImageRef.of(_encode_png(Image.new("RGB", (width, height), (128, 128, 128))))


def _open(data: bytes | memoryview) -> tuple[Image.Image, int]:
    """Read the header: the image, not decoded yet, and its EXIF orientation."""
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        orientation = _orientation(image)
        tile = [int(image.tag_v2.get(tag, 1)) for tag in _TILE_TAGS] if isinstance(image, TiffImageFile) else (1, 1)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as e:
        raise ImageError(TOO_LARGE, f"{e}; at most {MAX_PIXELS:,} pixels are accepted") from e
    except Exception as e:  # as above: a malformed header can raise anything
        why = "" if isinstance(e, UnidentifiedImageError) else f": {e}"
        begin = bytes(data[:8])
        what = f"{len(data)} bytes beginning {begin!r}"
        if begin.startswith(_SIGNATURES):
            raise ImageError(UNDECODABLE, f"{what} are the damaged or truncated header of an image{why}") from e
        raise ImageError(NOT_AN_IMAGE, f"{what} are no image ({', '.join(FORMATS)}){why}") from e
    _check_pixels(*tile)  # a tile is decoded whole, be it larger than the image
    _check_size(*image.size)
    return image, orientation


def _check_bytes(n: int) -> None:
    if n > MAX_BYTES:
        raise ImageError(TOO_LARGE, f"an image of {n:,} bytes; at most {MAX_BYTES:,} are accepted")


def _check_pixels(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise ImageError(TOO_LARGE, f"an image of {width}×{height} pixels; at most {MAX_PIXELS:,} are accepted")


def _check_size(width: int, height: int) -> None:
    _check_pixels(width, height)
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise ImageError(
            TOO_NARROW, f"an image of {width}×{height} pixels: one side is over {MAX_ASPECT_RATIO} times the other"
        )


def _orientation(image: Image.Image) -> int:
    # Pillow turns TIFFs itself, and would decode a whole PNG to look for an EXIF block behind the pixels.
    if image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):
        return 1
    return image.getexif().get(_ORIENTATION_TAG, 1)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "I" or image.mode.startswith("I;16"):
        grey = np.asarray(image) >> 8
        return Image.fromarray(grey.clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode == "F":  # stored as greys of 0…255; Pillow's own conversion clips
        return image.convert("L").convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def _encode_png(image: Image.Image) -> bytes:
    """PNG bytes of a PIL image; turned upright first, as its EXIF orientation doesn't travel along."""
    _check_size(*image.size)
    buffer = io.BytesIO()
    try:
        image = ImageOps.exif_transpose(image)
        if image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
            image = _to_rgb(image)
        image.save(buffer, format="PNG")
    except Exception as e:  # a lazily opened PIL image decodes only here
        raise ImageError(UNDECODABLE, f"a PIL image that can't be decoded: {e}") from e
    return buffer.getvalue()


def _from_string(text: str, root: Path | None, hosts: Sequence[str]) -> bytes:
    if text[:8].lower().startswith(("http://", "https://")):
        try:
            return fetch(text, hosts, MAX_BYTES, check=_open)
        except FetchError as e:
            raise ImageError(NOT_FETCHED, str(e)) from e
    if text[:5].lower() == "data:":
        header, comma, payload = text.partition(",")
        if not comma or not header.lower().endswith(";base64"):
            raise ImageError(NOT_AN_IMAGE, f"data URI {header[:60]!r} isn't ';base64,…'")
        data = _base64(payload)
        if data is None:
            raise ImageError(NOT_AN_IMAGE, f"data URI {header[:60]!r}: what follows is not base64")
        return data
    data = _base64(text)
    if data is not None and _is_image(data):
        return data
    return _read_inside(root, text)


def _base64(text: str) -> bytes | None:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        return None


def _is_image(data: bytes) -> bool:
    """Whether the bytes are those of an image, be it a usable one or not."""
    try:
        _open(data)
    except ImageError as e:
        return e.kind != NOT_AN_IMAGE
    return True


def _read_inside(root: Path | None, name: str) -> bytes:
    shown = name if len(name) <= 80 else name[:77] + "…"
    if root is None:
        raise ImageError(
            UNREADABLE, f"{shown!r} is neither base64 of an image nor, as the dataset has no folder, a path"
        )
    try:
        path = (root / name).resolve()
        if not path.is_relative_to(root.resolve()):
            raise ImageError(OUTSIDE, f"path {shown!r} leads out of the dataset's folder {root}")
        if not path.is_file():  # a device or a pipe isn't one either
            raise ImageError(UNREADABLE, f"{shown!r} is neither base64 of an image nor a file in {root}")
        _check_bytes(path.stat().st_size)
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)  # one too many is refused, should the file have grown
    except ImageError:
        raise
    except (OSError, ValueError, RuntimeError) as e:  # no such name can be, no permission, a loop of links
        raise ImageError(UNREADABLE, f"path {shown!r} in {root} can't be read: {e}") from e
