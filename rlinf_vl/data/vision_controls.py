"""Vision controls: a question again, with an image that can't answer it.

A control replaces each image of a problem by a PNG of the same (upright) size, and each clip by one
with as many frames at the same times. So the prompt keeps its ids and grids, and nothing but pixels
differs. The replacement depends on a seed, the row and the image alone.

| kind | replacement |
|---|---|
| blank | uniform grey |
| swapped | another question's image; of the same size where there is one, else resized |
| cropped | the image with a grey rectangle over a share of its area |
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from rlinf_vl.data.clips import clip_of, clip_ref, is_clip, timestamps_of
from rlinf_vl.data.images import blank_like, decode, encode_png, image_size
from rlinf_vl.types import ImageRef, Message, Problem

#: The grey of blank images and of hidden rectangles.
GREY = 128
#: Share of each image's area that "cropped" hides.
HIDDEN_SHARE = 0.5


class ImageFacts(NamedTuple):
    """The facts about an image by which another row is chosen to lend its own."""

    number: int  # equal images have equal numbers
    height: int
    width: int
    frames: int  # of a clip; 0 for a picture

    @classmethod
    def of(cls, image: ImageRef) -> "ImageFacts":
        frames = len(timestamps_of(image)) if is_clip(image) else 0
        # 60 bits of the hash: a number is smaller to send than a text.
        return cls(int(image.hash[:15], 16), *image_size(image), frames)


class Donor(NamedTuple):
    """An image of another row: the row's number, and the image's place in it."""

    row: int
    place: int


@dataclass(frozen=True, slots=True)
class VisionControl:
    """A control of one row.

    Attributes:
        kind: "blank", "swapped" or "cropped".
        seed: seeds the hidden rectangles.
        donors: for "swapped", the image that replaces each of the row's images.
    """

    kind: str
    seed: int = 0
    donors: tuple[Donor, ...] = ()

    def __call__(self, problem: Problem, read_row: Callable[[int], Problem]) -> Problem:
        """Return the problem with its images replaced. `read_row` returns the problem of a row.

        Raises:
            ImageError: an image can't be decoded.
            RowError: a donor's row can't be read.
        """
        replacements: dict[str, ImageRef] = {}
        for place, image in enumerate(problem.images):
            if image.hash in replacements:
                continue
            if self.kind == "blank":
                replacements[image.hash] = blank_like(image)
            elif self.kind == "swapped":
                donor = self.donors[place]
                lent = read_row(donor.row).images[donor.place]
                replacements[image.hash] = fitted(lent, image)
            else:
                replacements[image.hash] = hide_rectangle(image, HIDDEN_SHARE, self.seed)
        return with_images(problem, replacements)


class Donors(NamedTuple):
    """The donors of a split's rows.

    Attributes:
        by_row: row → the donor of each of its images; rows for which there is none are left out.
        resized: the number of rows with an image that no other has the size of.
    """

    by_row: dict[int, tuple[Donor, ...]]
    resized: int


def choose_donors(images: Mapping[int, Sequence[ImageFacts]], seed: int) -> Donors:
    """Choose for each image another row's, a different one, of its size where there is one.

    The choice depends on the seed, the row and the rows there are. Pictures lend to pictures, and
    clips to clips.
    """
    by_size: dict[tuple[int, ...], list[tuple[Donor, int]]] = {}
    by_form: dict[bool, list[tuple[Donor, int]]] = {}
    for row in sorted(images):
        for place, facts in enumerate(images[row]):
            entry = (Donor(row, place), facts.number)
            by_size.setdefault(facts[1:], []).append(entry)
            by_form.setdefault(facts.frames > 0, []).append(entry)
    by_row: dict[int, tuple[Donor, ...]] = {}
    n_resized = 0
    for row, row_images in images.items():
        image_numbers = {facts.number for facts in row_images}
        donors: list[Donor] = []
        is_resized = False
        for place, facts in enumerate(row_images):
            name = f"{seed} donor {row} {place}"
            donor = _draw(by_size[facts[1:]], image_numbers, name)
            if donor is None:
                is_resized = True
                donor = _draw(by_form[facts.frames > 0], image_numbers, name)
            if donor is not None:
                donors.append(donor)
        if row_images and len(donors) == len(row_images):
            by_row[row] = tuple(donors)
            n_resized += is_resized
    return Donors(by_row, n_resized)


def _draw(
    candidates: Sequence[tuple[Donor, int]], image_numbers: set[int], name: str
) -> Donor | None:
    """Draw a candidate whose image is none of `image_numbers`; None if there is none."""
    start = int(_random(name).integers(len(candidates)))
    for k in range(len(candidates)):
        donor, number = candidates[(start + k) % len(candidates)]
        if number not in image_numbers:
            return donor
    return None


def fitted(lent: ImageRef, image: ImageRef) -> ImageRef:
    """Return `lent` with the size of `image`, and, of a clip, with its number of frames and
    times."""
    height, width = image_size(image)
    if not is_clip(image):
        return lent if image_size(lent) == (height, width) else _png(_resized(lent, height, width))
    timestamps, frames = timestamps_of(image), clip_of(lent).frames
    pictures = []
    for k in range(len(timestamps)):
        frame = ImageRef.of(frames[k * len(frames) // len(timestamps)])
        is_fit = image_size(frame) == (height, width)
        pictures.append(bytes(frame.data) if is_fit else encode_png(_resized(frame, height, width)))
    return clip_ref(pictures, timestamps)


def hide_rectangle(image: ImageRef, share: float, seed: int) -> ImageRef:
    """Return the image with a grey rectangle over `share` of its area; of a clip, over the same
    place of each frame.

    The rectangle has the image's proportions. Its place depends on the seed and the image.
    """
    height, width = image_size(image)
    box_height = min(height, max(1, round(height * math.sqrt(share))))
    box_width = min(width, max(1, round(width * math.sqrt(share))))
    random = _random(f"{seed} rectangle {image.hash}")
    top = int(random.integers(height - box_height + 1))
    left = int(random.integers(width - box_width + 1))
    box = (top, left, top + box_height, left + box_width)
    if not is_clip(image):
        return hide_box(image, box)
    clip = clip_of(image)
    frames = [bytes(hide_box(ImageRef.of(frame), box).data) for frame in clip.frames]
    return clip_ref(frames, clip.timestamps)


def hide_box(image: ImageRef, box: tuple[int, int, int, int]) -> ImageRef:
    """Return the picture with grey over the box (top, left, bottom, right), in pixels."""
    pixels = np.array(decode(image))
    top, left, bottom, right = box
    pixels[top:bottom, left:right] = GREY
    return _png(Image.fromarray(pixels))


def with_images(problem: Problem, replacements: Mapping[str, ImageRef]) -> Problem:
    """Return the problem with each image replaced by the one under its hash."""
    urls = {image.url: replacements[image.hash].url for image in problem.images}

    def plain_part(part: Any) -> Any:
        for key in ("image_url", "video_url"):
            if isinstance(part, dict) and isinstance(part.get(key), dict):
                url = part[key].get("url")
                return part | {key: part[key] | {"url": urls.get(url, url)}}
        return part

    messages: list[Message] = []
    for message in problem.messages:
        content = message["content"]
        if not isinstance(content, str):
            content = [plain_part(part) for part in content]
        messages.append(message | {"content": content})
    images = tuple(replacements[image.hash] for image in problem.images)
    return replace(problem, messages=tuple(messages), images=images)


def _resized(image: ImageRef, height: int, width: int) -> Image.Image:
    return decode(image).resize((width, height), Image.Resampling.BICUBIC)


def _png(picture: Image.Image) -> ImageRef:
    return ImageRef.of(encode_png(picture))


def _random(name: str) -> np.random.Generator:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little"))
