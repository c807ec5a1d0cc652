"""Corrupted images: of the same size, drawn from seed and image alone, and as noisy or as masked as they should be."""

import io
import math

import numpy as np
import pytest
from PIL import Image

from rlinf_vl.config.schema import ImageCorruptionConfig
from rlinf_vl.data.corruption import Shown, corruption_at
from rlinf_vl.data.images import decode, image_size
from rlinf_vl.data.unusable import ImageError
from rlinf_vl.data.views import SQUARE, Mask, Noise
from rlinf_vl.types import ImageRef


def image(color, size=(280, 420), orientation=None):
    file, exif = io.BytesIO(), Image.Exif()
    if orientation:
        exif[0x0112] = orientation
    Image.new("RGB", size, color).save(file, "JPEG" if orientation else "PNG", exif=exif)
    return ImageRef.of(file.getvalue())


@pytest.mark.parametrize("kind", [Noise, Mask])
def test_what_is_drawn_depends_on_seed_and_image_alone(kind):
    corrupt = kind(0.5)
    one, other = image((90, 100, 110)), image((91, 100, 110))
    assert corrupt(one, 7) == corrupt(one, 7)
    assert len({corrupt(one, 7).hash, corrupt(one, 8).hash, corrupt(other, 7).hash, one.hash}) == 4
    assert kind(0.0)(one, 7) is one


@pytest.mark.parametrize("strength", [1.0, 0.5])
def test_images_that_look_alike_keep_names_of_their_own(strength):
    """Two that are masked whole are still told apart, so that each is trained on as it is."""
    shown = Shown(Mask(strength), 3)
    images = [image((9, 9, 9)), image((8, 8, 8))]
    assert len({shown(i).hash for i in images}) == 2
    assert {name: i.hash for name, i in shown.by_hash.items()} == {
        i.hash: shown(i).hash for i in images
    }


def test_the_size_is_that_of_the_upright_picture():
    turned = image((200, 10, 10), (60, 20), orientation=6)
    assert image_size(turned) == (60, 20) == image_size(Noise(0.3)(turned, 1))


@pytest.mark.parametrize("strength", [0.1, 0.5, 0.9])
def test_noise_is_that_of_a_diffusion(strength):
    """x_t = √ᾱ x + √(1 - ᾱ) ε: of what is not clipped, mean and deviation are known. ᾱ by NoisyRollout's own loop of β."""
    left = 1.0
    for step in range(int(1000 * strength) + 1):
        left *= 1 - (1e-5 + (5e-3 - 1e-5) / (1 + math.exp(6 - 12 * step / 999)))
    grey = np.asarray(decode(Noise(strength)(image((128, 128, 128)), 1)), float) / 255
    mean, deviation = math.sqrt(left) * 128 / 255, math.sqrt(1 - left)
    # Both sides of the mean that noise reaches unclipped: the normal's share below it.
    for z in (-0.5, 0.0, 0.5):
        if 0 < (edge := mean + z * deviation) < 1:
            assert np.mean(grey < edge) == pytest.approx(
                0.5 * (1 + math.erf(z / math.sqrt(2))), abs=0.02
            )


def test_a_mask_blackens_whole_squares_with_its_probability():
    clean = image((200, 200, 200), (30 * SQUARE + 5, 40 * SQUARE + 3))
    pixels = np.asarray(decode(Mask(0.6)(clean, 5)))
    assert set(np.unique(pixels)) == {0, 200}
    squares = (
        pixels[: 40 * SQUARE, : 30 * SQUARE, 0]
        .reshape(40, SQUARE, 30, SQUARE)
        .swapaxes(1, 2)
        .reshape(1200, -1)
    )
    assert (squares == squares[:, :1]).all(), "a square is black, or as it was"
    assert np.mean(squares[:, 0] == 0) == pytest.approx(0.6, abs=4 * math.sqrt(0.24 / 1200))


def test_a_damaged_image_is_told():
    with pytest.raises(ImageError):
        Noise(0.5)(ImageRef.of(image((1, 2, 3)).data[:60]), 1)


@pytest.mark.parametrize(
    ("done", "left"),
    [
        (2 / 3, 0.5),
        (0.0, 1 - 1 / (1 + math.exp(30 * 2 / 3))),
        (0.8, 1 - 1 / (1 + math.exp(-30 * (0.8 - 2 / 3)))),
    ],
)
def test_strength_falls_during_the_run_as_the_papers(done, left):
    corruption = corruption_at(ImageCorruptionConfig(share=0.5, strength=0.4), done)
    assert corruption.view.strength == pytest.approx(0.4 * left, abs=1e-12)
    assert (corruption.samples(8), type(corruption.view)) == (4, Noise)


def test_images_as_they_are_are_no_corruption_of_strength_0():
    """Answers to those are graded where they arrive, without a thread for each."""
    assert corruption_at(ImageCorruptionConfig(), 0.5) is None
    assert corruption_at(ImageCorruptionConfig(share=0.5, strength=0.0), 0.5) is None
