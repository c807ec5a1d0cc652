"""Images in every representation that rows use, refusals, and decoding that agrees with the header."""

import base64
import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rlinf_vl.data.images import ImageError, blank_like, decode, image_size, image_values, to_image_ref
from rlinf_vl.types import ImageRef

RED = (200, 30, 30)


def encode(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=format, **options)
    return buffer.getvalue()


PNG = encode(Image.new("RGB", (40, 30), RED))


def representations(folder: Path) -> dict[str, Any]:
    (folder / "images").mkdir(exist_ok=True)
    (folder / "images/red.png").write_bytes(PNG)
    text = base64.b64encode(PNG).decode()
    return {
        "bytes": PNG,
        "bytearray": bytearray(PNG),
        "dict of bytes": {"bytes": PNG, "path": None},
        "dict of bytes and path": {"bytes": PNG, "path": "gone.png"},
        "dict of path": {"bytes": None, "path": "images/red.png"},
        "dict of base64": {"bytes": text},
        "base64": text,
        "base64 in lines": "\n".join(text[i : i + 60] for i in range(0, len(text), 60)),
        "data URI": f"data:image/png;base64,{text}",
        "path": "images/red.png",
        "absolute path": str(folder / "images/red.png"),
    }


def test_encoded_bytes_are_kept_whatever_they_come_in(tmp_path: Path) -> None:
    for name, value in representations(tmp_path).items():
        ref = to_image_ref(value, root=tmp_path)
        assert ref == ImageRef.of(PNG), name


def test_a_pil_image_becomes_a_png_of_its_pixels() -> None:
    for mode in ("RGB", "L", "P", "RGBA", "CMYK", "1", "F", "YCbCr"):
        ref = to_image_ref(Image.new("RGB", (5, 4), RED).convert(mode), root=None)
        assert ref.data.startswith(b"\x89PNG") and image_size(ref) == (4, 5), mode
    jpeg = Image.open(io.BytesIO(rotated_jpeg(6)))
    assert image_size(to_image_ref(jpeg, root=None)) == (8, 6)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"", "0 bytes beginning b''"),
        (b"GIF89a but no more", "no image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no image"),
        ({"bytes": None, "path": None}, "both None"),
        ({"url": "x.png"}, r"keys \['url'\]"),
        ({"bytes": {"bytes": PNG}}, "dict again"),
        (17, "int is no image"),
        (np.zeros((4, 5, 3), np.uint8), r"ndarray of shape \(4, 5, 3\) is no image"),
        ("https://example.org/a.png", "not fetched from the network"),
        ("HTTP://example.org/a.png", "not fetched from the network"),
        ("data:image/png,abc", "isn't ';base64"),
        ("data:image/png;base64,a*b", "not base64"),
        (f"data:image/png;base64,{base64.b64encode(b'text').decode()}", "no image"),
        ("missing.png", "nor a file in"),
        ("", "nor a file in"),
        ("a\0b", "can't be read"),
        ("x" * 5000, "x…"),
        ("../outside.png", "leads out of"),
        ("images/../../outside.png", "leads out of"),
        ("/etc/passwd", "leads out of"),
        ("link.png", "leads out of"),
        ("linked/outside.png", "leads out of"),
    ],
)
def test_what_is_refused_and_why(tmp_path: Path, value: Any, message: str) -> None:
    root = tmp_path / "data"
    root.mkdir()
    (tmp_path / "outside.png").write_bytes(PNG)
    os.symlink(tmp_path / "outside.png", root / "link.png")
    os.symlink(tmp_path, root / "linked")
    with pytest.raises(ImageError, match=message):
        to_image_ref(value, root=root)


def test_a_path_needs_a_folder() -> None:
    with pytest.raises(ImageError, match="has no folder"):
        to_image_ref("images/red.png", root=None)


def test_a_bomb_is_refused_by_its_header() -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    def bomb(side: int) -> bytes:
        header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
        return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")

    with pytest.raises(ImageError, match="8000×8000 pixels; at most 50,000,000"):
        to_image_ref(bomb(8000), root=None)
    with pytest.raises(ImageError, match="no image"):
        to_image_ref(bomb(60_000), root=None)


def test_cells_are_flattened_in_order() -> None:
    array = np.array(["a", "b"], dtype=object)
    pixels = np.zeros((2, 2, 3), np.uint8)
    assert image_values(None) == [] == image_values([]) == image_values([None, ()])
    assert image_values("a") == ["a"] and image_values({"path": "a"}) == [{"path": "a"}]
    assert image_values([["a", None], ("b", array)]) == ["a", "b", "a", "b"]
    assert len(image_values([pixels])) == 1


def rotated_jpeg(orientation: int) -> bytes:
    """8 wide, 6 high as stored; the left half is white."""
    picture = Image.new("RGB", (8, 6))
    picture.paste((255, 255, 255), (0, 0, 4, 6))
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(picture, "JPEG", exif=exif, quality=100, subsampling=0)


@pytest.mark.parametrize(
    ("orientation", "size", "white"),
    [(1, (6, 8), (3, 0)), (2, (6, 8), (3, 7)), (3, (6, 8), (3, 7)), (4, (6, 8), (3, 0)), (5, (8, 6), (0, 3)),
     (6, (8, 6), (0, 3)), (7, (8, 6), (7, 3)), (8, (8, 6), (7, 3)), (9, (6, 8), (3, 0))],
)  # fmt: skip
def test_exif_orientation_turns_picture_and_size(
    orientation: int, size: tuple[int, int], white: tuple[int, int]
) -> None:
    ref = to_image_ref(rotated_jpeg(orientation), root=None)
    pixels = np.asarray(decode(ref))
    assert image_size(ref) == size == pixels.shape[:2]
    assert pixels[white].min() > 200
    assert pixels[size[0] - 1 - white[0], size[1] - 1 - white[1]].max() < 60


def _varieties() -> dict[str, bytes]:
    exif = Image.Exif()
    exif[0x0112] = 6
    rgb = Image.new("RGB", (8, 6), RED)
    frames = [Image.new("P", (8, 6), i) for i in range(3)]
    return {
        "png": encode(rgb),
        "turned png": encode(rgb, exif=exif),
        "turned webp": encode(rgb, "WEBP", exif=exif, lossless=True),
        "turned tiff": encode(rgb, "TIFF", exif=exif),
        "palette": encode(rgb.convert("P", palette=Image.Palette.ADAPTIVE)),
        "one bit": encode(Image.new("1", (8, 6), 1)),
        "grey": encode(rgb.convert("L")),
        "grey and alpha": encode(Image.new("LA", (8, 6), (90, 128))),
        "16 bit": encode(Image.fromarray(np.full((6, 8), 0x8040, np.uint16))),
        "float tiff": encode(Image.fromarray(np.full((6, 8), 90, np.float32)), "TIFF"),
        "cmyk": encode(Image.new("CMYK", (8, 6), (0, 255, 255, 0)), "JPEG"),
        "bmp": encode(rgb, "BMP"),
        "ppm": encode(rgb, "PPM"),
        "animated gif": encode(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "animated webp": encode(rgb, "WEBP", save_all=True, append_images=[Image.new("RGB", (8, 6))], lossless=True),
    }


@pytest.mark.parametrize("name", _varieties())
def test_every_variety_decodes_to_rgb_of_the_size_in_its_header(name: str) -> None:
    ref = to_image_ref(_varieties()[name], root=None)
    picture = decode(ref)
    height, width = image_size(ref)
    assert picture.mode == "RGB" and picture.size == (width, height)
    assert (height, width) == ((8, 6) if "turned" in name else (6, 8))


def test_colours_survive_decoding() -> None:
    def pixel(data: bytes) -> tuple[int, ...]:
        return decode(ImageRef.of(data)).getpixel((0, 0))

    varieties = _varieties()
    for name in ("png", "turned png", "palette", "bmp", "ppm", "animated webp"):
        assert pixel(varieties[name]) == RED, name
    assert pixel(varieties["16 bit"]) == (128, 128, 128)
    red, green, blue = pixel(varieties["cmyk"])
    assert red > 240 and green < 15 and blue < 15
    assert pixel(encode(Image.new("RGBA", (8, 6), (0, 0, 0, 0)))) == (255, 255, 255)
    assert pixel(encode(Image.new("RGBA", (8, 6), (0, 0, 0, 51)))) == (204, 204, 204)
    transparent = Image.new("P", (8, 6), 0)
    transparent.putpalette([0, 0, 0, 10, 20, 30])
    assert pixel(encode(transparent, transparency=0)) == (255, 255, 255)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "WEBP"])
def test_a_truncated_file_passes_its_header_and_fails_to_decode(format: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    data = encode(Image.fromarray(noise), format)
    with pytest.raises(ImageError, match="can't be decoded|no image"):
        decode(to_image_ref(data[: len(data) // 2], root=None))


def test_a_blank_image_has_the_size_and_nothing_else() -> None:
    for data in (PNG, rotated_jpeg(6)):
        ref = to_image_ref(data, root=None)
        blank = blank_like(ref)
        assert image_size(blank) == image_size(ref)
        assert np.unique(np.asarray(decode(blank))).tolist() == [128]
