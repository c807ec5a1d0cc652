"""Images in every representation that rows use, refusals, and decoding that agrees with the header."""

import base64
import io
import os
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rlinf_vl.data.images import decode, image_size, image_values, to_image_ref
from rlinf_vl.data.unusable import ImageError
from rlinf_vl.data.views import blank as blank_view
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


@pytest.mark.quick
@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("images/../../outside.png", "path leaves the dataset's folder"),
        ("link.png", "path leaves the dataset's folder"),
        ("linked/outside.png", "path leaves the dataset's folder"),
        ("loop", "image file can't be read"),
        ("pipe", "image file can't be read"),
        ("folder", "image file can't be read"),
        ("large.png", "image too large"),
    ],
)
def test_which_paths_are_refused(tmp_path: Path, value: str, kind: str) -> None:
    root = tmp_path / "data"
    root.mkdir()
    (tmp_path / "outside.png").write_bytes(PNG)
    os.symlink(tmp_path / "outside.png", root / "link.png")
    os.symlink(tmp_path, root / "linked")
    os.symlink(root / "loop", root / "loop")
    os.mkfifo(root / "pipe")  # reading it would wait for ever
    (root / "folder").mkdir()
    with (root / "large.png").open("wb") as file:
        file.truncate(2**26 + 1)
    with pytest.raises(ImageError) as caught:
        to_image_ref(value, root=root)
    assert caught.value.kind == kind


def png_bomb(side: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


def webp_bomb() -> bytes:
    """Animated, of the largest canvas that the format has: 16384 × 16384."""
    frame = encode(Image.new("RGB", (1, 1)), "WEBP", lossless=True)[12:]
    chunk = struct.pack("<4sI", b"ANMF", 16 + len(frame)) + bytes(16) + frame
    body = (
        struct.pack("<4sIB3x", b"VP8X", 10, 2)
        + b"\xff\x3f\x00" * 2
        + struct.pack("<4sI6x", b"ANIM", 6)
        + chunk
    )
    return struct.pack("<4sI4s", b"RIFF", 4 + len(body), b"WEBP") + body


def tiff_of_a_large_tile() -> bytes:
    """A picture of 16 × 16 whose only tile has 32768 × 32768."""
    tags = [
        (256, 16),
        (257, 16),
        (258, 8),
        (259, 1),
        (262, 1),
        (277, 1),
        (322, 32768),
        (323, 32768),
        (324, 8),
        (325, 256),
    ]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + entries + bytes(260)


@pytest.mark.parametrize(
    "data",
    [png_bomb(8000), png_bomb(12_000), png_bomb(60_000), webp_bomb(), tiff_of_a_large_tile()],
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_bomb_is_refused_by_its_header(data: bytes) -> None:
    with pytest.raises(ImageError) as caught:
        to_image_ref(data, root=None)
    assert caught.value.kind == "image too large"


@pytest.mark.parametrize("size", [(1, 1), (1, 200), (200, 1), (5, 1000), (4000, 20)])
def test_narrow_images_pass_up_to_the_ratio_that_processors_take(size: tuple[int, int]) -> None:
    ref = to_image_ref(encode(Image.new("RGB", size, RED)), root=None)
    assert decode(ref).size == size and image_size(ref) == size[::-1]


@pytest.mark.parametrize("size", [(1, 4000), (4000, 1), (1, 201), (0, 5)])
def test_narrower_ones_are_refused_with_their_size(size: tuple[int, int]) -> None:
    header = b"P6 %d %d 255 " % size
    with pytest.raises(ImageError) as caught:
        to_image_ref(header + bytes(3 * size[0] * size[1]), root=None)
    assert caught.value.kind in ("image too narrow", "not an image")
    if 0 not in size:
        with pytest.raises(ImageError) as caught:
            to_image_ref(Image.new("RGB", size), root=None)
        assert caught.value.kind == "image too narrow"


def test_an_error_travels_with_its_kind() -> None:
    error = pickle.loads(pickle.dumps(ImageError("not an image", "3 bytes")))
    assert (error.kind, error.reason, str(error)) == ("not an image", "3 bytes", "3 bytes")


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
        "two pictures": encode(rgb, "MPO", save_all=True, append_images=[rgb]),
        "cmyk": encode(Image.new("CMYK", (8, 6), (0, 255, 255, 0)), "JPEG"),
        "bmp": encode(rgb, "BMP"),
        "ppm": encode(rgb, "PPM"),
        "animated gif": encode(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "animated webp": encode(
            rgb, "WEBP", save_all=True, append_images=[Image.new("RGB", (8, 6))], lossless=True
        ),
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
    with pytest.raises(ImageError, match="can't be decoded|truncated header"):
        decode(to_image_ref(data[: len(data) // 2], root=None))


def test_bytes_that_lie_in_the_object_store() -> None:
    assert decode(ImageRef("a", memoryview(np.frombuffer(PNG, np.uint8)))).getpixel((0, 0)) == RED
    for data in (PNG[:50], PNG[:12], b"text"):
        with pytest.raises(ImageError, match="can't be decoded|truncated header|no image"):
            decode(ImageRef("a", memoryview(np.frombuffer(data, np.uint8))))


def test_a_blank_image_has_the_size_and_nothing_else() -> None:
    for data in (PNG, rotated_jpeg(6)):
        ref = to_image_ref(data, root=None)
        blank = blank_view(ref)
        assert image_size(blank) == image_size(ref)
        assert np.unique(np.asarray(decode(blank))).tolist() == [128]


GREYS = np.arange(0, 256, 17, dtype=np.uint8).reshape(4, 4)


@pytest.mark.parametrize("suffix", ["png", "tiff"])
@pytest.mark.parametrize(
    ("mode", "values"),
    [
        ("I;16", GREYS.astype(np.uint16) * 257),
        ("I", GREYS.astype(np.int32)),
        ("I", GREYS.astype(np.int32) * 257),
        ("F", GREYS.astype(np.float32) / 255),
        ("F", GREYS.astype(np.float32)),
        ("F", GREYS.astype(np.float32) * 257),
    ],
)
def test_greys_of_more_than_8_bits_keep_their_brightness(suffix: str, mode: str, values: Any):
    image = Image.fromarray(values)
    assert image.mode == mode
    refs = [to_image_ref(image, root=None)]
    # A PNG has 16 bits at most, and says of them what white is.
    if suffix == "tiff" or mode == "I;16":
        file = io.BytesIO()
        image.save(file, suffix)
        refs.append(to_image_ref(file.getvalue(), root=None))
    for ref in refs:
        np.testing.assert_array_equal(np.asarray(decode(ref).convert("L")), GREYS)


@pytest.mark.parametrize("extreme", [-1, 65536, np.nan, np.inf])
def test_greys_of_an_unknown_range_are_refused(extreme: float):
    values = np.full((4, 4), extreme, np.float32 if extreme != 65536 else np.int32)
    file = io.BytesIO()
    Image.fromarray(values).save(file, "TIFF")
    for value in (file.getvalue(), Image.fromarray(values)):
        with pytest.raises(ImageError, match="greys of 32 bits"):
            decode(to_image_ref(value, root=None))
