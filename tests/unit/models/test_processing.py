"""Grids and pixels against transformers' own image processor; the ids that are never sampled."""

import io
import json
import shutil
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


@pytest.mark.parametrize("size", [(48, 48), (300, 200), (17, 700), (5, 5), (963, 115)])
def test_grid_from_the_header_is_the_processors(processor, size):
    image = picture(*size)
    pixels = processor.pixels(image)  # asserts that the grids agree
    assert pixels.shape[0] == np.prod(processor.grid(image))
    assert pixels.dtype == np.float32


def ids_of(processor, *names):
    return [processor.tokenizer.convert_tokens_to_ids(name) for name in names]


def test_an_image_has_a_token_for_each_square_of_merged_patches(processor):
    assert processor.image_tokens.merge_size == 2
    grids = np.array([[1, 4, 6], [1, 2, 2], [2, 8, 4]])
    assert processor.image_tokens(grids).tolist() == [6, 1, 16]


def test_stop_ids_are_those_of_the_tokenizer_and_of_the_checkpoint(toy_folder, tmp_path):
    folder = shutil.copytree(toy_folder, tmp_path / "checkpoint")
    processor = Processor(folder, family_of("qwen3_vl"))
    end, text_end = ids_of(processor, "<|im_end|>", "<|endoftext|>")
    assert processor.stop_ids == (end,)
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(
        json.dumps(generation | {"eos_token_id": [end, text_end]})
    )
    both = Processor(folder, family_of("qwen3_vl"))
    assert both.stop_ids == (end, text_end)
    assert not both.banned_ids(len(both.tokenizer))[[end, text_end]].any()
    (folder / "generation_config.json").unlink()
    assert Processor(folder, family_of("qwen3_vl")).stop_ids == (end,)


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
