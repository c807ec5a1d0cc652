"""Heat maps by occlusion: where an image is hidden, and how much the answer depends on it.

A map begins with a coarse grid of cells. Each is hidden in turn, and its *drop* is
Σ KL(p(· | image) ‖ p(· | cell hidden)) over the answer's tokens: what log p of a token that the
policy draws there loses on average. Then the cell with the largest drop is cut into quarters, which
are hidden in turn, again and again, until the budget of forwards is spent or such cells are single
patches. A cell's drop is shared among its quarters by what each loses alone, so the map still sums
to the drops of the coarse cells (Zeiler & Fergus 2014, "Visualizing and Understanding Convolutional
Networks", section 4.2, for occlusion itself).
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


class Cell(NamedTuple):
    """A rectangle of patches: rows top … bottom − 1, columns left … right − 1."""

    top: int
    left: int
    bottom: int
    right: int

    @property
    def area(self) -> int:
        return (self.bottom - self.top) * (self.right - self.left)

    def quarters(self) -> list["Cell"]:
        """Return its parts, two along each side that is longer than a patch."""
        rows = _halves(self.top, self.bottom)
        columns = _halves(self.left, self.right)
        return [Cell(a, b, c, d) for a, c in rows for b, d in columns]


def _halves(start: int, end: int) -> list[tuple[int, int]]:
    middle = (start + end) // 2
    return [(start, end)] if middle == start else [(start, middle), (middle, end)]


@dataclass(frozen=True)
class HeatMap:
    """The contribution of each patch of an image to an answer.

    Attributes:
        values: float32 [rows, columns], nats; their sum is that of the coarse cells' drops.
        forwards: how many cells were hidden.
    """

    values: np.ndarray
    forwards: int = field(default=0)

    @property
    def peak(self) -> tuple[int, int]:
        """The patch (row, column) with the largest value."""
        row, column = np.unravel_index(int(self.values.argmax()), self.values.shape)
        return int(row), int(column)


def edge_share(values: np.ndarray) -> float:
    """Return the share of a map's positive values that its outermost patches have; NaN without any.

    An answer that is read off a frame, a caption or a watermark has most of it there.
    """
    positive = np.maximum(values, 0)
    total = float(positive.sum())
    return 1 - float(positive[1:-1, 1:-1].sum()) / total if total else float("nan")


def heat_map(
    shape: tuple[int, int],
    drops: Callable[[Sequence[Cell]], Sequence[float]],
    budget: int,
    coarse: int = 4,
) -> HeatMap:
    """Map which patches an answer depends on.

    Args:
        shape: rows and columns of patches.
        drops: hides each cell alone, and returns its drop.
        budget: the most cells that are hidden; the coarse grid is hidden whatever it is.
        coarse: most cells along the longer side at first.
    """
    rows, columns = shape
    side = -(-max(shape) // coarse)
    cells = [
        Cell(top, left, min(top + side, rows), min(left + side, columns))
        for top in range(0, rows, side)
        for left in range(0, columns, side)
    ]
    values = np.zeros(shape, np.float32)
    # The largest drop first. Cells differ, so a tie never compares more than them.
    queue: list[tuple[float, Cell]] = []

    def spread(cell: Cell, drop: float) -> None:
        values[cell.top : cell.bottom, cell.left : cell.right] = drop / cell.area
        if cell.area > 1 and drop > 0:
            heapq.heappush(queue, (-drop, cell))

    for cell, drop in zip(cells, drops(cells), strict=True):
        spread(cell, float(drop))
    forwards = len(cells)
    while queue:
        negative_drop, cell = heapq.heappop(queue)
        quarters = cell.quarters()
        if forwards + len(quarters) > budget:
            break
        losses = np.maximum(np.asarray(drops(quarters), np.float64), 0)
        forwards += len(quarters)
        if not losses.sum():
            continue  # no part matters alone: the cell's drop stays spread evenly
        for quarter, share in zip(quarters, losses / losses.sum(), strict=True):
            spread(quarter, float(-negative_drop * share))
    return HeatMap(values, forwards)
