"""Vision controls: a question again, with an image that can't answer it.

A control replaces each image of a problem by a view of it (`rlinf_vl.data.views`): the prompt keeps
its ids and grids, and nothing but pixels differs.

| kind | replacement |
|---|---|
| blank | uniform grey |
| swapped | another question's image; of the same size where there is one, else resized |
| cropped | the image with a grey rectangle over a share of its area |
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rlinf_vl.data.clips import is_clip, timestamps_of
from rlinf_vl.data.images import image_size
from rlinf_vl.data.views import Fitted, HiddenRectangle, ImageView, blank, random_of
from rlinf_vl.types import ImageRef, Message, Problem

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
                view: ImageView = blank
            elif self.kind == "swapped":
                donor = self.donors[place]
                view = Fitted(read_row(donor.row).images[donor.place])
            else:
                view = HiddenRectangle(HIDDEN_SHARE)
            replacements[image.hash] = view(image, self.seed)
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
    start = int(random_of(name).integers(len(candidates)))
    for k in range(len(candidates)):
        donor, number = candidates[(start + k) % len(candidates)]
        if number not in image_numbers:
            return donor
    return None


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
