"""The page of `check-data`: the figures, and rows with their pictures: damaged, doubled, longest,
and random ones."""

import base64
import hashlib
import io
import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
from PIL import Image

from rlinf_vl.data.clips import frame_refs, is_clip, timestamps_of
from rlinf_vl.data.dataset import ProblemDataset
from rlinf_vl.data.images import decode, image_values, to_image_ref
from rlinf_vl.data.unusable import shorten
from rlinf_vl.runtime.files import write_aside
from rlinf_vl.tools.check.data.summary import Split
from rlinf_vl.types import ImageRef

#: Longer side of a thumbnail in pixels; images shown of a row; characters shown of a text.
SIDE, IMAGES, TEXT = 240, 4, 700
#: Side of a frame in a strip, in pixels.
FRAME_SIDE = 96
#: Rows shown of each kind of damage; groups of doubles; longest rows; random rows.
DAMAGED, DOUBLES, LONGEST, RANDOM = 4, 4, 4, 24
HERE = Path(__file__).parent


def write_page(
    path: Path,
    splits: Sequence[Split],
    datasets: Mapping[str, ProblemDataset],
    figures: Mapping[str, Any],
) -> None:
    """Write one HTML file that loads nothing; texts of the data are escaped."""
    sections = [
        section for split in splits for section in _sections(split, datasets[split.name], figures)
    ]
    if len(splits) > 1:
        pairs = figures["overlap"]["rows"] + figures["overlap"]["images"]
        rows = [
            (name, n)
            for pair in pairs[:DOUBLES]
            for name, n in zip(("val", "train"), pair, strict=True)
        ]
        overlapping_rows = [show(datasets[name], n, name) for name, n in rows]
        sections.append(("Rows of val, and what train has of them", overlapping_rows))
    style = (HERE / "page.css").read_text(encoding="utf-8")
    style_hash = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    # The data are not trusted: their texts are escaped, and the page may run and load nothing but
    # its own style.
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    page = environment.get_template("page.html.jinja").render(
        figures=figures,
        sections=[(title, rows) for title, rows in sections if rows],
        style=style,
        policy=f"default-src 'none'; img-src data:; style-src 'sha256-{style_hash}'",
    )
    with write_aside(path, durable=False) as aside:
        aside.write_text(page, encoding="utf-8", errors="replace")


def _sections(
    split: Split, dataset: ProblemDataset, figures: Mapping[str, Any]
) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return the page's sections on a split: title, rows."""
    split_figures = figures["splits"][split.name]
    facts_by_row = {facts.row: facts for facts in split.facts}
    sections = []
    for kind in split_figures["bad"]["by_kind"]:
        rows = [bad_row for bad_row in split_figures["bad"]["all"] if bad_row["kind"] == kind][
            :DAMAGED
        ]
        sections.append(
            (
                f"{split.name}: {kind}",
                [show(dataset, b["row"], split.name, b["reason"]) for b in rows],
            )
        )

    def row(n: int) -> dict[str, Any]:
        """Return a row with its number of tokens."""
        tokens = facts_by_row[n].tokens if n in facts_by_row else 0
        return show(dataset, n, split.name, f"{tokens} tokens" if tokens else "")

    contradictions = split_figures["contradictions"]
    doubles = contradictions + [
        group for group in split_figures["duplicates"]["rows"] if group not in contradictions
    ]
    # two rows of a group show that they are alike
    sections.append(
        (
            f"{split.name}: rows that repeat another",
            [row(n) for g in doubles[:DOUBLES] for n in g[:2]],
        )
    )
    longest = sorted(split.facts, key=lambda facts: -facts.tokens)[:LONGEST]
    if longest and longest[0].tokens:
        sections.append(
            (
                f"{split.name}: the longest {figures['limits']['length']['of']}s",
                [row(facts.row) for facts in longest],
            )
        )
    usable = split.usable
    # a fixed seed: the page of the same data is the same
    random_facts = random.Random(0).sample(usable, min(RANDOM, len(usable)))
    random_rows = sorted(facts.row for facts in random_facts)
    sections.append((f"{split.name}: usable rows, drawn at random", [row(n) for n in random_rows]))
    return sections


def show(dataset: ProblemDataset, n: int, split: str, note: str = "") -> dict[str, Any]:
    """Return a row for the page, as far as it can be read."""
    page_row: dict[str, Any] = {
        "id": dataset.row_id(n),
        "split": split,
        "row": n,
        "note": note,
        "images": [],
    }
    try:
        problem = dataset[n]
        parts = [part for message in problem.messages for part in message["content"]]
        texts = [part["text"] if part["type"] == "text" else "▣" for part in parts]
        page_row |= {"text": " ".join(texts), "answer": problem.answer}
        images = list(problem.images)
    except Exception:  # the row is no problem: show its cells as they are stored
        raw = dataset.raw(n)
        images = [image for value in raw.values() for image in _stored_images(value)]
        texts = {name: value for name, value in raw.items() if not _stored_images(value)}
        page_row |= {
            "text": "\n".join(f"{name}: {_text(value)}" for name, value in texts.items()),
            "answer": None,
        }
    page_row["text"] = shorten(page_row["text"], TEXT)
    page_row["images"] = [_thumbnail(image) for image in images[:IMAGES]]
    page_row["more"] = max(0, len(images) - IMAGES)
    return page_row


def _text(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)[: 2 * TEXT]


def _stored_images(value: Any) -> list[ImageRef]:
    """Return the images whose bytes a cell holds."""
    images = []
    for cell in image_values(value):
        try:
            images.append(to_image_ref(cell, root=None))
        except Exception:
            continue
    return images


def _thumbnail(image: ImageRef) -> dict[str, Any]:
    """Return the address of a small copy and the size of the image, or the reason why there is
    none; of a video an animated copy, and those of its frames."""
    if is_clip(image):
        return _moving_thumbnail(image)
    try:
        picture = decode(image)
    except Exception as error:
        return {"address": None, "about": str(error)}
    about = f"{picture.width} × {picture.height}"
    picture.thumbnail((SIDE, SIDE))
    return {"address": _address("JPEG", picture), "about": about}


def _moving_thumbnail(clip: ImageRef) -> dict[str, Any]:
    """Return the address of an animation of a video's sampled frames, which plays at their times,
    and `frames`, a small copy of each with its time."""
    pictures = [decode(frame) for frame in frame_refs(clip)]
    times = timestamps_of(clip)
    about = f"video: {len(times)} frames of {pictures[0].width} × {pictures[0].height}"
    frames = []
    for picture, seconds in zip(pictures, times, strict=True):
        picture.thumbnail((SIDE, SIDE))
        small = picture.copy()
        small.thumbnail((FRAME_SIDE, FRAME_SIDE))
        frames.append({"address": _address("JPEG", small), "about": f"{seconds:.2f} s"})
    pauses = [min(2000, max(20, round(1000 * (b - a)))) for a, b in pairwise(times)]
    options = {"save_all": True, "append_images": pictures[1:], "loop": 0}
    animation = _address("WEBP", pictures[0], duration=[*pauses, 1000], **options)
    return {"address": animation, "about": about, "frames": frames}


def _address(kind: str, picture: Image.Image, **options: Any) -> str:
    """Return an encoded picture as a data URI."""
    buffer = io.BytesIO()
    picture.save(buffer, kind, quality=75, **options)
    encoded = base64.b64encode(buffer.getvalue()).decode()
    return f"data:image/{kind.lower()};base64,{encoded}"
