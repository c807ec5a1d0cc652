"""Placeholder expansion and pixels against transformers' own image processor; the ids that are never sampled."""

import io
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from rlinf_vl.models.families import family_of
from rlinf_vl.models.processing import PixelCache, Processor
from rlinf_vl.types import ImageRef


@pytest.fixture(scope="module")
def processor(toy_folder):
    return Processor(toy_folder, family_of("qwen3_vl"))


def picture(height: int, width: int, seed: int = 0) -> ImageRef:
    array = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "PNG")
    return ImageRef.of(buffer.getvalue())


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


def part(image):
    return {"type": "image_url", "image_url": {"url": image.url}}


TEXT = {"type": "text", "text": "What is x?"}


@pytest.mark.parametrize("size", [(48, 48), (300, 200), (17, 700), (5, 5), (963, 115)])
def test_grid_from_the_header_is_the_processors(processor, size):
    image = picture(*size)
    pixels = processor.pixels(image)  # asserts that the grids agree
    assert pixels.shape[0] == np.prod(processor.grid(image))
    assert pixels.dtype == np.float32


def test_each_image_gets_its_own_count_of_placeholders(processor):
    images = [picture(48, 48), picture(96, 160, 1), picture(48, 96, 2)]
    ids, grids = processor.prompt(user(part(images[0]), TEXT, part(images[1]), part(images[2])), images)
    assert (ids == processor.image_token_id).sum() == processor.image_tokens(grids).sum()
    runs = np.diff(np.flatnonzero(np.diff(np.concatenate([[0], ids == processor.image_token_id, [0]]))))[::2]
    assert runs.tolist() == processor.image_tokens(grids).tolist()


def test_text_only_prompt(processor):
    ids, grids = processor.prompt(user(TEXT), [])
    assert grids.shape == (0, 3) and not (ids == processor.image_token_id).any()
    assert ids.dtype == np.int32


def test_a_placeholder_written_in_the_text_is_refused(processor):
    with pytest.raises(ValueError, match="for 1 images"):
        image = picture(48, 48)
        processor.prompt(user(part(image), {"type": "text", "text": "<|image_pad|>"}), [image])


def test_banned_ids(processor):
    size = len(processor.tokenizer) + 5
    banned = processor.banned_ids(size)
    assert banned[processor.image_token_id] and banned[processor.pad_id] and banned[-5:].all()
    assert not banned[list(processor.stop_ids)].any()
    ordinary = processor.tokenizer("3*6=18 \\boxed{18}")["input_ids"]
    assert not banned[ordinary].any()


def test_pixel_limits_are_honoured_and_checked(toy_folder):
    path, family = toy_folder, family_of("qwen3_vl")
    small = Processor(path, family, max_pixels=64 * 64)
    t, h, w = small.grid(picture(600, 600))
    patch = small.image_processor.patch_size
    assert h * w * patch * patch <= 64 * 64
    assert len(small.pixels(picture(600, 600))) == t * h * w
    with pytest.raises(ValueError, match="data.image_min_pixels"):
        Processor(path, family, min_pixels=10**6, max_pixels=10**4)


def test_pixel_cache_counts_an_image_once_that_two_threads_ask_for():
    both, calls = threading.Barrier(2), []

    def pixels(image):
        calls.append(image.hash)
        if len(calls) <= 2:
            both.wait(timeout=60)  # neither thread finds the other's pixels
        return np.full(100, len(calls), np.uint8)

    a, b = picture(4, 4, 0), picture(4, 4, 1)
    cache = PixelCache(pixels, max_bytes=250)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(cache, [a, a])
    assert first is second and len(calls) == 2
    cache(b)  # 200 bytes are held, not 300: both stay
    assert cache(a) is first and len(calls) == 3


def test_pixel_cache_is_bounded_and_right():
    calls = []

    def pixels(image):
        calls.append(image.hash)
        return np.full(100, len(calls), np.uint8)

    a, b, c = (picture(4, 4, seed) for seed in range(3))
    cache = PixelCache(pixels, max_bytes=250)
    assert (cache(a) == cache(a)).all() and len(calls) == 1
    cache(b), cache(c)  # 300 bytes: the oldest goes
    cache(c)
    assert len(calls) == 3
    cache(a)
    assert len(calls) == 4
