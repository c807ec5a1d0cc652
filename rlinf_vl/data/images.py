"""Images in every representation that datasets use → `ImageRef` (encoded bytes, as they came), and `ImageRef` → pixels.

A path in a row never leads out of its dataset's folder, and a URL only to hosts that the config lists. Nothing larger than
`MAX_BYTES` is read, nothing of more than `MAX_PIXELS` decoded. `image_size` reads the header only, and always agrees with
the size of what `decode` returns.
"""

import base64
import io
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from rlinf_vl.data.fetch import fetch
from rlinf_vl.data.unusable import ImageError, shorten
from rlinf_vl.data.videos import NAMES, NO_VIDEOS, VIDEO, is_video
from rlinf_vl.types import ImageRef

#: Largest area: 150 MB as RGB, at most 16 bytes a pixel while decoding. Diagrams and photos are far below; above it a small
#: file can make a worker run out of memory (a decompression bomb).
MAX_PIXELS = 50_000_000
MAX_BYTES = 64 * 2**20
#: Longer side : shorter side. The image processors of the Qwen-VL families refuse more.
MAX_ASPECT_RATIO = 200
#: Formats that are opened. Others of Pillow's (EPS, for one) start programs or read further files.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_SIGNATURES = (b"\x89PNG", b"\xff\xd8\xff", b"RIFF", b"GIF8")
_ORIENTATION_TAG = 0x0112
_TILE_WIDTH_TAG = 0x0142
_TILE_LENGTH_TAG = 0x0143
#: Where a mapping has its image: `datasets`' keys, and those of message parts, which verl's column of images may hold.
_DICT_KEYS = ("bytes", "path", "image", "url")
_T = Image.Transpose
#: What puts a picture of EXIF orientation 2, 3, … 8 upright.
_UPRIGHT = (
    *(_T.FLIP_LEFT_RIGHT, _T.ROTATE_180, _T.FLIP_TOP_BOTTOM),
    *(_T.TRANSPOSE, _T.ROTATE_270, _T.TRANSVERSE, _T.ROTATE_90),
)

NOT_AN_IMAGE = "not an image"
TOO_LARGE = "image too large"
UNDECODABLE = "image can't be decoded"
UNREADABLE = "image file can't be read"


def image_values(cell: Any) -> list[Any]:
    """The images of one cell of a table, in order: none for None, one for a single value, else one per element.

    Lists, tuples and arrays of objects may be nested, and a list may be written as JSON; an array of pixels is one value (which
    `to_image_ref` refuses).
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
    """One image as a row gives it → its encoded bytes, by hash.

    Args:
        value: encoded bytes; {"bytes": …, "path": …} (either may be None; bytes win) or {"image": …}; a base64 string or data URI; a
            path inside `root`; a URL of one of `hosts`; or a PIL image, which is encoded as PNG.
        root: the dataset's folder, which paths are relative to and may not leave; None when it has none.
        hosts: hosts that images may be fetched from (data.image_hosts).

    Raises:
        ImageError: anything else, a path out of `root`, or bytes whose header isn't that of an image of sane size.
    """
    if isinstance(value, dict):
        if not set(_DICT_KEYS) & value.keys():
            raise ImageError(NOT_AN_IMAGE, f"a dict with keys {sorted(map(str, value))}: expected 'bytes' or 'path'")
        value = next((value[key] for key in _DICT_KEYS if value.get(key) is not None), None)
        if value is None or isinstance(value, dict):
            what = "'path' are both None" if value is None else "'path' hold a dict again"
            raise ImageError(NOT_AN_IMAGE, f"a dict whose 'bytes' and {what}")
    if isinstance(value, str):
        data = _from_string(value, root, hosts)
    elif isinstance(value, Image.Image):
        data = _encode_png(value)
    elif isinstance(value, (bytes, bytearray, memoryview)):
        data = bytes(value)
    else:
        what = type(value).__name__ + (f" of shape {value.shape}" if isinstance(value, np.ndarray) else "")
        expected = "bytes, a dict of bytes or path, base64, a path or a PIL image"
        raise ImageError(NOT_AN_IMAGE, f"{what} is no image: expected {expected}")
    _check_bytes(len(data))
    if not isinstance(value, Image.Image):  # what was just encoded can be read
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
    return image.transpose(_UPRIGHT[orientation - 2]) if 2 <= orientation <= 8 else image


def image_size(ref: ImageRef) -> tuple[int, int]:
    """(height, width) in pixels of the upright picture, from the header alone."""
    image, orientation = _open(ref.data)
    return image.size if 5 <= orientation <= 8 else (image.height, image.width)


def blank_like(ref: ImageRef) -> ImageRef:
    """A uniform mid-grey PNG of the same (upright) size: an image with nothing to see."""
    height, width = image_size(ref)
    return ImageRef.of(_encode_png(Image.new("RGB", (width, height), (128, 128, 128))))


def _open(data: bytes | memoryview) -> tuple[Image.Image, int]:
    """Read the header: the image, not decoded yet, and its EXIF orientation."""
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        # Pillow turns TIFFs itself, and would decode a whole PNG to look for an EXIF block behind the pixels.
        no_exif = image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info)
        orientation = 1 if no_exif else image.getexif().get(_ORIENTATION_TAG, 1)
        orientation = orientation if isinstance(orientation, int) else 1  # a damaged tag may be of any type
        tags = image.tag_v2 if isinstance(image, TiffImageFile) else {}
        tile = int(tags.get(_TILE_WIDTH_TAG, 1)), int(tags.get(_TILE_LENGTH_TAG, 1))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as e:
        raise ImageError(TOO_LARGE, f"{e}; at most {MAX_PIXELS:,} pixels are accepted") from e
    except Exception as e:  # as above: a malformed header can raise anything
        why = "" if isinstance(e, UnidentifiedImageError) else f": {e}"
        begin = bytes(data[:8])
        what = f"{len(data)} bytes beginning {begin!r}"
        if is_video(bytes(data[:12])):
            raise ImageError(VIDEO, f"{what} are a video; {NO_VIDEOS}") from e
        if begin.startswith(_SIGNATURES):
            raise ImageError(UNDECODABLE, f"{what} are the damaged or truncated header of an image{why}") from e
        raise ImageError(NOT_AN_IMAGE, f"{what} are no image ({', '.join(FORMATS)}){why}") from e
    _check_size(*image.size, tile)
    return image, orientation


def _check_bytes(n: int) -> None:
    if n > MAX_BYTES:
        raise ImageError(TOO_LARGE, f"an image of {n:,} bytes; at most {MAX_BYTES:,} are accepted")


def _check_size(width: int, height: int, tile: tuple[int, int] = (1, 1)) -> None:
    for w, h in (tile, (width, height)):  # a tile is decoded whole, even if it is larger than the image
        if w * h > MAX_PIXELS:
            raise ImageError(TOO_LARGE, f"an image of {w}×{h} pixels; at most {MAX_PIXELS:,} are accepted")
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        reason = f"an image of {width}×{height} pixels: one side is over {MAX_ASPECT_RATIO} times the other"
        raise ImageError("image too narrow", reason)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "I" or image.mode.startswith("I;16"):
        grey = np.asarray(image) >> 8
        return Image.fromarray(grey.clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode == "F":  # stored as greys of 0…255; Pillow's own conversion clips
        return image.convert("L").convert("RGB")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def _encode_png(image: Image.Image) -> bytes:
    """PNG bytes of a PIL image; turned upright first, as its EXIF orientation doesn't travel along."""
    _check_size(*image.size)
    buffer = io.BytesIO()
    try:
        if image.getexif().get(_ORIENTATION_TAG, 1) != 1:
            image = ImageOps.exif_transpose(image)
        if image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
            image = _to_rgb(image)
        image.save(buffer, format="PNG")
    except Exception as e:  # a lazily opened PIL image decodes only here
        raise ImageError(UNDECODABLE, f"a PIL image that can't be decoded: {e}") from e
    return buffer.getvalue()


def _from_string(text: str, root: Path | None, hosts: Sequence[str]) -> bytes:
    if text[:8].lower().startswith(("http://", "https://")):
        return fetch(text, hosts, MAX_BYTES, check=_open)
    if text[:5].lower() == "data:":
        header, _, payload = text.partition(",")
        if not header.lower().endswith(";base64"):
            raise ImageError(NOT_AN_IMAGE, f"data URI {header[:60]!r} isn't ';base64,…'")
        if (data := _base64(payload)) is None:
            raise ImageError(NOT_AN_IMAGE, f"data URI {header[:60]!r}: what follows is not base64")
        return data
    if text[:7].lower() == "file://":
        return _read_inside(root, unquote(urlsplit(text).path))
    if (data := _base64(text)) is not None:
        try:
            _open(data)
            return data
        except ImageError as e:
            if e.kind != NOT_AN_IMAGE:  # an image that can't be used is no path, either
                raise
    return _read_inside(root, text)


def _base64(text: str) -> bytes | None:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except ValueError:
        return None


def _read_inside(root: Path | None, name: str) -> bytes:
    shown = repr(shorten(name))
    if name.lower().endswith(NAMES):
        raise ImageError(VIDEO, f"path {shown} is a video's; {NO_VIDEOS}")
    if root is None:
        reason = f"{shown} is neither base64 of an image nor, as the dataset has no folder, a path"
        raise ImageError(UNREADABLE, reason)
    try:
        path = (root / name).resolve()
        if not path.is_relative_to(root.resolve()):
            raise ImageError(
                "path leaves the dataset's folder",
                f"path {shown} leads out of the dataset's folder {root}; name the one that all images are in as data.image_root",
            )
        if not path.is_file():  # a device or a pipe isn't one either
            raise ImageError(UNREADABLE, f"{shown} is neither base64 of an image nor a file in {root}")
        _check_bytes(path.stat().st_size)
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)  # one too many is refused, should the file have grown
    except ImageError:
        raise
    except (OSError, ValueError, RuntimeError) as e:  # no such name can be, no permission, a loop of links
        raise ImageError(UNREADABLE, f"path {shown} in {root} can't be read: {e}") from e
