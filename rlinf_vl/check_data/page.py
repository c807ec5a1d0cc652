"""`check-data`'s page: the figures, and rows with their pictures: damaged, doubled, longest, and some as they are."""

import base64
import hashlib
import io
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from rlinf_vl.check_data.summary import Split
from rlinf_vl.data.dataset import ProblemDataset
from rlinf_vl.data.images import decode, image_values, to_image_ref
from rlinf_vl.data.unusable import shorten
from rlinf_vl.runtime.files import write_aside
from rlinf_vl.types import ImageRef

#: Longer side of a thumbnail; images shown of a row; characters of a text.
SIDE, IMAGES, TEXT = 240, 4, 700
#: Rows shown: of a kind of damage, of doubles, of the longest, and of those drawn at random.
DAMAGED, DOUBLES, LONGEST, RANDOM = 4, 4, 4, 24
HERE = Path(__file__).parent


def write_page(
    path: Path, splits: Sequence[Split], datasets: Mapping[str, ProblemDataset], figures: Mapping[str, Any]
) -> None:
    """Write one HTML file that loads nothing; what is said in the data is text in it."""
    shelves = [shelf for split in splits for shelf in _shelves(split, datasets[split.name], figures)]
    if len(splits) > 1:
        pairs = figures["overlap"]["rows"] + figures["overlap"]["images"]
        rows = [(name, n) for pair in pairs[:DOUBLES] for name, n in zip(("val", "train"), pair, strict=True)]
        both = [show(datasets[name], n, name) for name, n in rows]
        shelves.append(("Rows of val, and what train has of them", both))
    style = (HERE / "page.css").read_text(encoding="utf-8")
    hashed = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    page = environment.get_template("page.html.jinja").render(
        found=figures,
        shelves=[(title, rows) for title, rows in shelves if rows],
        style=style,
        policy=f"default-src 'none'; img-src data:; style-src 'sha256-{hashed}'",
    )
    with write_aside(path, durable=False) as aside:
        aside.write_text(page, encoding="utf-8", errors="replace")


def _shelves(
    split: Split, dataset: ProblemDataset, figures: Mapping[str, Any]
) -> list[tuple[str, list[dict[str, Any]]]]:
    found, of_row = figures["splits"][split.name], {facts.row: facts for facts in split.facts}
    shelves = []
    for kind in found["bad"]["by_kind"]:
        rows = [bad for bad in found["bad"]["all"] if bad["kind"] == kind][:DAMAGED]
        shelves.append((f"{split.name}: {kind}", [show(dataset, b["row"], split.name, b["reason"]) for b in rows]))

    def row(n: int) -> dict[str, Any]:
        tokens = of_row[n].tokens if n in of_row else 0
        return show(dataset, n, split.name, f"{tokens} tokens" if tokens else "")

    contradictions = found["contradictions"]
    doubles = contradictions + [group for group in found["duplicates"]["rows"] if group not in contradictions]
    shelves.append((f"{split.name}: rows that repeat another", [row(n) for g in doubles[:DOUBLES] for n in g[:2]]))
    longest = sorted(split.facts, key=lambda facts: -facts.tokens)[:LONGEST]
    if longest and longest[0].tokens:
        shelves.append((f"{split.name}: the longest prompts", [row(facts.row) for facts in longest]))
    usable = split.usable
    drawn = random.Random(0).sample(usable, min(RANDOM, len(usable)))
    shelves.append((f"{split.name}: usable rows, drawn at random", [row(n) for n in sorted(f.row for f in drawn)]))
    return shelves


def show(dataset: ProblemDataset, n: int, split: str, note: str = "") -> dict[str, Any]:
    """A row for the page, as far as it can be read."""
    shown: dict[str, Any] = {"id": dataset.row_id(n), "split": split, "row": n, "note": note, "images": []}
    try:
        problem = dataset[n]
        parts = [part for message in problem.messages for part in message["content"]]
        texts = [part["text"] if part["type"] == "text" else "▣" for part in parts]
        shown |= {"text": " ".join(texts), "answer": problem.answer}
        images = list(problem.images)
    except Exception:  # it is no problem: what is stored is shown
        raw = dataset.raw(n)
        images = [image for value in raw.values() for image in _stored_images(value)]
        texts = {name: value for name, value in raw.items() if not _stored_images(value)}
        shown |= {"text": "\n".join(f"{name}: {_text(value)}" for name, value in texts.items()), "answer": None}
    shown["text"] = shorten(shown["text"], TEXT)
    shown["images"] = [_thumbnail(image) for image in images[:IMAGES]]
    shown["more"] = max(0, len(images) - IMAGES)
    return shown


def _text(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)[: 2 * TEXT]


def _stored_images(value: Any) -> list[ImageRef]:
    """Images that a cell holds itself."""
    found = []
    for cell in image_values(value):
        try:
            found.append(to_image_ref(cell, root=None))
        except Exception:
            continue
    return found


def _thumbnail(image: ImageRef) -> dict[str, Any]:
    """The address of a small copy and the size of the image, or why there is none."""
    try:
        picture = decode(image)
    except Exception as error:
        return {"address": None, "about": str(error)}
    about = f"{picture.width} × {picture.height}"
    picture.thumbnail((SIDE, SIDE))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=75)
    return {"address": "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode(), "about": about}
