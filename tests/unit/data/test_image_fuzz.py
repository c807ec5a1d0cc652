"""Damaged and random bytes: each is a picture or an `ImageError`, soon, whatever Pillow's decoders do with it."""

import io
import re
import warnings
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from rlinf_vl.data.damage import check_pixels
from rlinf_vl.data.images import MAX_PIXELS, decode, image_size, to_image_ref
from rlinf_vl.data.unusable import ImageError

KINDS = (
    "not an image",
    "video among images",
    "image too large",
    "image too narrow",
    "image can't be decoded",
    "image file can't be read",
)
MAGIC = (
    b"\x89PNG\r\n\x1a\n",
    b"\xff\xd8\xff\xe1",
    b"RIFF\0\0\0\0WEBPVP8X",
    b"GIF89a",
    b"BM",
    b"II*\0",
    b"MM\0*",
    b"P6 ",
)
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "PPM")


@cache
def picture(format: str) -> bytes:
    """48 × 32, noise beside a plain part, with an EXIF orientation where the format has one; GIFs and WebPs move."""
    pixels = np.random.default_rng(1).integers(0, 256, (32, 48, 3), np.uint8)
    pixels[:, 24:] = 99
    image, options = Image.fromarray(pixels), {}
    if format in ("PNG", "JPEG", "WEBP"):
        exif = Image.Exif()
        exif[0x0112] = 6
        options["exif"] = exif
    if format in ("GIF", "WEBP"):
        options |= {"save_all": True, "append_images": [image.rotate(180)]}
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def look(value: bytes | str) -> str | None:
    """The kind of what is wrong with these bytes; None for a picture, which must then have the size in its header."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of much that it goes on with
        try:
            ref = to_image_ref(value, root=None)
        except ImageError as e:
            assert e.kind in KINDS and e.reason and len(e.reason) < 1000
            return e.kind
        try:
            decoded = decode(ref)
        except ImageError as e:
            assert e.kind in KINDS and e.reason and len(e.reason) < 1000
            with pytest.raises(ImageError, match=re.escape(e.reason[:60])):
                check_pixels(ref)
            return e.kind
        check_pixels(ref)
        height, width = image_size(ref)
    assert (
        decoded.mode == "RGB" and decoded.size == (width, height) and width * height <= MAX_PIXELS
    )
    return None


@pytest.mark.parametrize("format", FORMATS)
def test_the_pictures_to_be_damaged_are_whole(format: str) -> None:
    assert look(picture(format)) is None


@settings(max_examples=300)
@given(st.sampled_from((b"", *MAGIC)), st.binary(max_size=300))
def test_random_bytes(magic: bytes, rest: bytes) -> None:
    look(magic + rest)


@pytest.mark.slow
@settings(max_examples=100)
@given(st.text(max_size=60))
def test_random_text(text: str) -> None:
    assert look(text) in KINDS


@pytest.mark.parametrize("format", FORMATS)
def test_every_truncation(format: str) -> None:
    data = picture(format)
    found = [look(data[:n]) for n in range(0, len(data), max(1, len(data) // 200))]
    assert found[0] == "not an image" and set(found) - {None} <= {
        "not an image",
        "image can't be decoded",
    }
    # A quarter, as there may be two frames, of which one is enough.
    assert found[len(found) // 4] is not None


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=150)
@given(data=st.data())
def test_flipped_bits(format: str, data: st.DataObject) -> None:
    damaged = bytearray(picture(format))
    header = st.integers(0, 63)  # where a flip does most
    for at in data.draw(
        st.lists(st.one_of(header, st.integers(0, len(damaged) - 1)), min_size=1, max_size=6)
    ):
        damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    look(bytes(damaged))


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(0, 10**6), st.binary(max_size=40))
def test_a_part_replaced(format: str, start: int, end: int, by: bytes) -> None:
    data = picture(format)
    start, end = sorted((start % len(data), end % len(data)))
    look(data[:start] + by + data[end:])


def test_an_orientation_that_is_no_number_is_none():
    damaged = bytearray(picture("JPEG"))
    damaged[43] ^= 1  # the tag's type: a text
    assert look(bytes(damaged)) is None
