"""Samples for trackers: printable, short texts of a trajectory, and its images as one picture.

Models write the texts, so nothing in them may act as markup: `code_block` and `inert` prevent it.
"""

import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from PIL import Image

#: Samples logged per step and split, spread over its rows.
MAX_SAMPLES = 16
#: Characters logged of a text.
MAX_TEXT = 4000
#: Images logged of a sample, side by side, and the longest side of each in pixels.
MAX_IMAGES, MAX_SIDE = 4, 384
TEXTS = ("prompt", "response", "answer", "error")
FACTS = ("problem_id", "reward", "advantage", "correct", "finish_reason")


@dataclass(frozen=True)
class Sample:
    """A trajectory as trackers log it."""

    values: Mapping[str, str | float | bool | None]  # by name, out of FACTS and TEXTS
    picture: Image.Image | None


def spread(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return at most `MAX_SAMPLES` of the rows, evenly spaced."""
    return rows[:: max(1, -(-len(rows) // MAX_SAMPLES))]


def choose_samples(rows: Sequence[Mapping[str, Any]]) -> list[Sample]:
    """Return the rows that `spread` selects as samples; rows have the keys in `FACTS` and `TEXTS`,
    and images: encoded bytes."""
    samples = []
    for row in spread(rows):
        values = {name: _short(row[name]) for name in (*FACTS, *TEXTS)}
        samples.append(Sample(values, _picture(row["images"])))
    return samples


def inert(value: Any) -> Any:
    """Return a text that is neither HTML nor Markdown, and other values unchanged.

    An invisible space follows each character that a tag, a link or an image needs.
    """
    return (
        value.replace("<", "<\u200b").replace("]", "]\u200b") if isinstance(value, str) else value
    )


def code_block(text: str) -> str:
    """Return Markdown that shows just this text: in an indented block nothing has a meaning."""
    return "\n".join("    " + line for line in text.splitlines())


def _short(value: Any) -> str | float | bool | None:
    if not isinstance(value, str):
        return value if value is None or isinstance(value, bool) else round(float(value), 4)
    ellipsis = f"… ({len(value) - MAX_TEXT} characters more)" if len(value) > MAX_TEXT else ""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in value[:MAX_TEXT]) + ellipsis


def _picture(images: Sequence[bytes]) -> Image.Image | None:
    """Return the first images side by side, made small; None without any. One that can't be decoded
    is left out."""
    tiles = []
    for data in images[:MAX_IMAGES]:
        with suppress(OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            tile = Image.open(io.BytesIO(data))
            tile.thumbnail((MAX_SIDE, MAX_SIDE))
            tiles.append(tile.convert("RGB"))
    if not tiles:
        return None
    # left edges of the tiles, 4 pixels of background between two
    edges = [0, *accumulate(tile.width + 4 for tile in tiles)]
    picture = Image.new("RGB", (edges[-1] - 4, max(tile.height for tile in tiles)), "gray")
    for tile, x in zip(tiles, edges, strict=False):
        picture.paste(tile, (x, 0))
    return picture
