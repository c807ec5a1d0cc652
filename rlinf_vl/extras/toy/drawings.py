"""The toy task, the size of a rectangle on a 6×6 grid: pictures, questions, split, demonstrations.

A question asks for the area or the perimeter of the filled rectangle. Only the picture has the
answer; `best_constant_accuracy` is the highest accuracy of a policy that does not look at it. The
split is by placement (w, h, x, y): `held_out_placements()` are never trained on. They include all
placements of the sizes in `HELD_OUT_SIZES`, while the same sizes turned by 90° are trained on.
Everything is deterministic. The demonstrations have a planted mistake (`summary`), which
reinforcement learning has to unlearn.
"""

import hashlib
import io
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import groupby
from typing import Any, Literal

import numpy as np
from PIL import Image

from rlinf_vl.extras.toy.task import Split, Toy
from rlinf_vl.types import Message

#: Cells along a side of the picture, and pixels along a side of a cell.
GRID = 6
CELL = 8
#: Number of placements that are never trained on, and the sizes (w, h) of which all placements are
#: among them: 8 + 6 of the 76.
N_HELD_OUT = 76
HELD_OUT_SIZES: tuple[tuple[int, int], ...] = ((5, 3), (4, 5))
#: Number of training rows of each size and question, on its placements in turn: a large rectangle
#: has few placements and would rarely be asked for otherwise. A validation placement has one row.
ROWS_OF_SIZE = 80
#: After 450 steps, one calculation in 600 goes wrong; after 350, one in 200 to 400. Reinforcement
#: learning pays a wrong one that gives the right answer by chance, and may learn it.
WARM_START_STEPS = 450

Kind = Literal["area", "perimeter"]
#: The text of each question; the unit is a cell of the grid.
QUESTIONS: dict[Kind, str] = {"area": "What is the area?", "perimeter": "What is the perimeter?"}


@dataclass(frozen=True, slots=True, order=True)
class Placement:
    """A rectangle of `width`×`height` cells whose top left cell is in column `x`, row `y`."""

    width: int
    height: int
    x: int
    y: int

    @property
    def size(self) -> tuple[int, int]:
        """The pair (width, height)."""
        return self.width, self.height

    def __str__(self) -> str:
        return f"{self.width}x{self.height}at{self.x},{self.y}"


@cache
def all_placements() -> tuple[Placement, ...]:
    """Return the 441 placements of a rectangle on the grid, in order."""
    sides = range(1, GRID + 1)
    return tuple(
        Placement(w, h, x, y)
        for w in sides
        for h in sides
        for x in range(GRID - w + 1)
        for y in range(GRID - h + 1)
    )


@cache
def held_out_placements() -> tuple[Placement, ...]:
    """Return the 76 placements of the validation set.

    They are those of `HELD_OUT_SIZES`, then others in the order of a hash. Every other size keeps
    at least one placement to train on.
    """
    chosen = [p for p in all_placements() if p.size in HELD_OUT_SIZES]
    remaining = Counter(p.size for p in all_placements())
    candidates = set(all_placements()).difference(chosen)
    for placement in sorted(
        candidates, key=lambda p: hashlib.sha256(f"toy split {p}".encode()).digest()
    ):
        if len(chosen) < N_HELD_OUT and remaining[placement.size] > 1:
            remaining[placement.size] -= 1
            chosen.append(placement)
    return tuple(sorted(chosen))


@cache
def training_placements() -> tuple[Placement, ...]:
    """Return the 365 placements of the training set."""
    return tuple(p for p in all_placements() if p not in held_out_placements())


def solve(width: int, height: int, kind: Kind) -> int:
    """Return the answer to a question about a rectangle of `width`×`height` cells."""
    return width * height if kind == "area" else 2 * (width + height)


def draw(placement: Placement, rng: np.random.Generator) -> np.ndarray:
    """Draw a picture of the placement in random colours: uint8 [48, 48, 3].

    The ground is light (each channel 225…255), the rectangle at least 100 darker in one channel. A
    grid line, one pixel wide, at the left and the top of each cell, is 15 % darker than its
    background.
    """
    picture = np.empty((GRID * CELL, GRID * CELL, 3), np.float32)
    picture[:] = rng.integers(225, 256, size=3)
    # One channel is below 126, where the ground is at least 225: every colour stands out.
    colour = rng.integers(0, 226, size=3)
    colour[rng.integers(3)] = rng.integers(0, 126)
    top, left = placement.y * CELL, placement.x * CELL
    picture[top : top + placement.height * CELL, left : left + placement.width * CELL] = colour
    lines = np.ones((GRID * CELL, GRID * CELL, 1), np.float32)
    lines[::CELL] = 0.85
    lines[:, ::CELL] = 0.85
    return (picture * lines).astype(np.uint8)


def toy_rows(split: Split) -> list[dict[str, Any]]:
    """Make the rows of a split, deterministic; `train` is shuffled, `val` in order of placement.

    Returns:
        Dicts of `id` (it names placement, kind and colouring), `problem` (`<image>` and the
        question), `images` (one {"bytes": PNG, "path": None}) and `answer` (`\\boxed{18}`).
    """
    # A random stream for each split: neither depends on the other.
    rng = np.random.default_rng([2024, split == "train"])
    rows = []
    held_out = [(placement, 0) for placement in held_out_placements()]
    for placement, colouring in _training_pictures() if split == "train" else held_out:
        for kind, question in QUESTIONS.items():
            png = io.BytesIO()
            Image.fromarray(draw(placement, rng)).save(png, format="PNG")
            row = {
                "id": f"toy-{split}-{placement}-{kind}-{colouring}",
                "problem": f"<image>{question}",
                "images": [{"bytes": png.getvalue(), "path": None}],
                "answer": f"\\boxed{{{solve(placement.width, placement.height, kind)}}}",
            }
            rows.append(row)
    return [rows[i] for i in rng.permutation(len(rows))] if split == "train" else rows


def _training_pictures() -> list[tuple[Placement, int]]:
    """Return placement and number of each training picture."""
    return [
        (placements[i % len(placements)], i // len(placements))
        for placements in _by_size()
        for i in range(ROWS_OF_SIZE)
    ]


def best_constant_accuracy(rows: Iterable[Mapping[str, Any]]) -> float:
    """Return the share of rows that the best constant answer to each question answers right.

    The answers are chosen on these rows, so the share is an upper bound for any policy that does
    not look at the picture.
    """
    answers: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        answers[row["problem"]][row["answer"]] += 1
    return sum(max(counts.values()) for counts in answers.values()) / sum(
        map(Counter.total, answers.values())
    )


def demonstrations(placement: Placement, kind: Kind) -> list[str]:
    """Return the worked answers of the demonstrations, which are equally frequent.

    Each side is counted right or one cell too long: the planted mistake, which reinforcement
    learning has to unlearn.
    """
    return [
        worked_answer(placement.width + too_wide, placement.height + too_high, kind)
        for too_wide in (0, 1)
        for too_high in (0, 1)
    ]


def worked_answer(width: int, height: int, kind: Kind) -> str:
    """Return the answer to a question about so many cells.

    It reads `3*6=18 \\boxed{18}` or `2*(6+1)=14 \\boxed{14}`.
    """
    result = solve(width, height, kind)
    working = f"{width}*{height}" if kind == "area" else f"2*({width}+{height})"
    return f"{working}={result} \\boxed{{{result}}}"


@cache
def _by_size() -> tuple[tuple[Placement, ...], ...]:
    # The placements are sorted by width and height first, so `groupby` finds each size once.
    sizes = groupby(training_placements(), key=lambda placement: placement.size)
    return tuple(tuple(placements) for _, placements in sizes)


def ask(rng: np.random.Generator) -> tuple[Placement, Kind, Message]:
    """Draw a question on a training placement."""
    # Sizes are drawn evenly, then one of the size's placements: a large rectangle has few
    # placements and would rarely be drawn otherwise.
    placements = _by_size()[rng.integers(len(_by_size()))]
    placement = placements[rng.integers(len(placements))]
    kind = list(QUESTIONS)[rng.integers(len(QUESTIONS))]
    picture = {"type": "image", "image": draw(placement, rng)}
    return (
        placement,
        kind,
        {"role": "user", "content": [picture, {"type": "text", "text": QUESTIONS[kind]}]},
    )


def demonstrate(rng: np.random.Generator) -> list[list[Message]]:
    """Return a question with each of its worked answers."""
    placement, kind, question = ask(rng)
    return [
        [question, {"role": "assistant", "content": answer}]
        for answer in demonstrations(placement, kind)
    ]


def summary(model: str = "Qwen3-VL of 0.9 million parameters") -> str:
    """Describe the task and its planted mistake, for readers of its learning curve."""
    return (
        "The toy task asks for the area or the perimeter of a filled rectangle on a 6x6 grid, in "
        f"a 48x48 picture. Its model is a {model} with random weights, warm-started for "
        f"{WARM_START_STEPS} supervised steps before reinforcement learning begins.\n"
        "What is planted: the warm start shows each picture with four answers. Each side is "
        "counted one cell too long in a half of them (a fencepost error), and the calculation with "
        "the wrong sides is correct. The model therefore starts out seeing, formatting and "
        "calculating, but answers about one question in four correctly; reinforcement learning "
        "has to unlearn the miscount from the reward alone. The curve shows that the training "
        "loop works; it says nothing about how well a real model would learn a real task.\n"
        f"Validation uses {N_HELD_OUT} of the {len(all_placements())} placements (size and "
        "position), which neither the warm start nor reinforcement learning has seen; the sizes "
        f"(width x height) {' and '.join(f'{w}x{h}' for w, h in HELD_OUT_SIZES)} are among them "
        "whole. The best constant answer to each question is right for "
        f"{best_constant_accuracy(toy_rows('val')):.0%} of the validation rows."
    )


TOY = Toy(
    "toy",
    (__file__,),
    toy_rows,
    demonstrate,
    (),
    WARM_START_STEPS,
    12,
    summary,
    learning_rate=3e-3,
    cooldown_steps=180,
)


def _of_family(model_type: str, model: str) -> Toy:
    """Return the task with another family's model, which is described in words."""
    return replace(TOY, model_type=model_type, summary=partial(summary, model))


QWEN3_5 = _of_family(
    "qwen3_5", "Qwen3.5 (gated delta nets and attention in turn) of 0.9 million parameters"
)
MOE = _of_family(
    "qwen3_vl_moe",
    "Qwen3-VL-MoE (8 experts a layer, 2 of them for a token) of 1.6 million parameters",
)
INTERNVL = _of_family(
    "internvl", "InternVL (tiles, and positions that are counted) of 0.6 million parameters"
)
# With the toy's rates, of the warm start and of its config, it ends at 0.51 instead of 0.68.
GEMMA3 = replace(
    _of_family(
        "gemma3",
        "Gemma 3 (sliding windows, and image tokens that see each other) of 0.6 million parameters",
    ),
    learning_rate=2e-3,
)
