"""The toy task: how large is the filled rectangle on a 6×6 grid? Pictures, questions, split, parquet files.

A picture is 48×48 pixels: a light ground with the lines of a 6×6 unit grid (cells of 8 pixels) and one filled rectangle
of w×h cells in a random colour. The question asks its area or its perimeter; the answer is nowhere but in the picture
(`best_constant_accuracy` says what can be had without looking).

The split is by placement (w, h, x, y), of which there are 441: `held_out_placements()` are never trained on, and the
sizes in `HELD_OUT_SIZES` are among them whole: no picture of those sizes is ever trained on (turned by 90° they are).
Everything is deterministic: a file is written once per version of this module and reused.
"""

import hashlib
import io
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from rlinf_vl.data.cache import build_once, cache_root, source_version

GRID = 6
"""Cells along a side of the picture."""
CELL = 8
"""Pixels along a side of a cell."""
SIZE = GRID * CELL
"""Pixels along a side of the picture."""

Kind = Literal["area", "perimeter"]
Split = Literal["train", "val"]

QUESTIONS: dict[Kind, str] = {"area": "What is the area?", "perimeter": "What is the perimeter?"}
"""The text of each question, units of the grid understood."""

N_HELD_OUT = 76
"""Placements that are never trained on, of 441."""
HELD_OUT_SIZES = ((5, 3), (4, 5))
"""Sizes (w, h) of which every placement is held out: 8 + 6 of the 76."""
COLOURINGS = 8
"""Pictures of each training placement and question, in different colours; a validation placement has one."""


@dataclass(frozen=True, slots=True, order=True)
class Placement:
    """A rectangle of `width`×`height` cells whose top left cell is in column `x`, row `y`."""

    width: int
    height: int
    x: int
    y: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}at{self.x},{self.y}"


@cache
def all_placements() -> tuple[Placement, ...]:
    """The 441 placements of a rectangle on the grid, in order."""
    sides = range(1, GRID + 1)
    return tuple(
        Placement(w, h, x, y) for w in sides for h in sides for x in range(GRID - w + 1) for y in range(GRID - h + 1)
    )


@cache
def held_out_placements() -> tuple[Placement, ...]:
    """The 76 placements of the validation set: `HELD_OUT_SIZES`, then others in the order of a hash.

    Every size that isn't held out whole keeps a placement to train on.
    """
    chosen = [p for p in all_placements() if (p.width, p.height) in HELD_OUT_SIZES]
    left = Counter((p.width, p.height) for p in all_placements())
    others = [p for p in all_placements() if p not in chosen]
    for placement in sorted(others, key=lambda p: hashlib.sha256(f"toy split {p}".encode()).digest()):
        if len(chosen) == N_HELD_OUT:
            break
        size = (placement.width, placement.height)
        if left[size] > 1:
            left[size] -= 1
            chosen.append(placement)
    return tuple(sorted(chosen))


@cache
def training_placements() -> tuple[Placement, ...]:
    """The 365 placements that may be trained on."""
    held_out = set(held_out_placements())
    return tuple(p for p in all_placements() if p not in held_out)


def solve(width: int, height: int, kind: Kind) -> int:
    """The answer to a question about a rectangle of `width`×`height` cells."""
    return width * height if kind == "area" else 2 * (width + height)


def draw(placement: Placement, rng: np.random.Generator) -> np.ndarray:
    """A picture of the placement in random colours: uint8 [48, 48, 3].

    The ground is light (each channel 225…255), the rectangle at least 100 darker in one channel; a grid line is one
    pixel at the left and the top of each cell, 15 % darker than what it crosses.
    """
    picture = np.empty((SIZE, SIZE, 3), np.float32)
    picture[:] = rng.integers(225, 256, size=3)
    colour = rng.integers(0, 226, size=3)
    colour[rng.integers(3)] = rng.integers(0, 126)
    top, left = placement.y * CELL, placement.x * CELL
    picture[top : top + placement.height * CELL, left : left + placement.width * CELL] = colour
    lines = np.ones((SIZE, SIZE, 1), np.float32)
    lines[::CELL] = 0.85
    lines[:, ::CELL] = 0.85
    return (picture * lines).astype(np.uint8)


def encode_png(picture: np.ndarray) -> bytes:
    """PNG bytes of a uint8 [height, width, 3] picture."""
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, format="PNG")
    return buffer.getvalue()


def blank_png() -> bytes:
    """The picture without information that blind checks put in place of every picture: 48×48, uniform mid-grey."""
    return encode_png(np.full((SIZE, SIZE, 3), 128, np.uint8))


def toy_rows(split: Split) -> list[dict[str, Any]]:
    """The rows of a split, deterministic; `train` is shuffled, `val` in order of placement.

    Returns:
        Dicts of `id` (names placement, kind and colouring), `problem` (`<image>` and the question), `images` (one
        {"bytes": PNG, "path": None}) and `answer` (`\\boxed{18}`).
    """
    if split not in ("train", "val"):
        raise ValueError(f"split: {split!r} is neither 'train' nor 'val'")
    placements, colourings = (training_placements(), COLOURINGS) if split == "train" else (held_out_placements(), 1)
    rng = np.random.default_rng([2024, split == "train"])
    rows = [
        {
            "id": f"toy-{split}-{placement}-{kind}-{colouring}",
            "problem": f"<image>{question}",
            "images": [{"bytes": encode_png(draw(placement, rng)), "path": None}],
            "answer": f"\\boxed{{{solve(placement.width, placement.height, kind)}}}",
        }
        for placement in placements
        for kind, question in QUESTIONS.items()
        for colouring in range(colourings)
    ]
    return [rows[i] for i in rng.permutation(len(rows))] if split == "train" else rows


def best_constant_accuracy(rows: Iterable[Mapping[str, Any]]) -> float:
    """Share of rows answered right by whoever knows the best constant answer to each question and doesn't look.

    Chosen on these very rows, so it bounds from above what any blind policy scores on them.
    """
    answers: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        answers[row["problem"]][row["answer"]] += 1
    right = sum(counts.most_common(1)[0][1] for counts in answers.values())
    return right / sum(counts.total() for counts in answers.values())


def write_toy_dataset(split: Split, path: Path) -> None:
    """Write a split to `path` as parquet.

    Columns id, problem, answer: string; images: list<struct<bytes: binary, path: string>>, as real data sets have it.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    schema = pa.schema(
        [("id", pa.string()), ("problem", pa.string()), ("images", pa.list_(image)), ("answer", pa.string())]
    )
    pq.write_table(pa.Table.from_pylist(toy_rows(split), schema=schema), path)


def toy_dataset_path(split: Split, *, cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Path of a split's parquet file, generated on first use.

    Args:
        split: "train" (5840 rows) or "val" (152 rows).
        cache_dir: folder to keep it under; default `cache_root()`.
    """
    if split not in ("train", "val"):
        raise ValueError(f"split: {split!r} is neither 'train' nor 'val'")
    target = cache_root(cache_dir) / f"toy-{source_version(__file__)}" / f"{split}.parquet"
    return build_once(target, lambda path: write_toy_dataset(split, path))
