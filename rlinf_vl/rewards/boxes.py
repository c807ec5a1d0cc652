"""Rewards for locations in an image: a box (GIoU), a point in a box."""

import math
import re
from collections.abc import Sequence
from typing import Any

from rlinf_vl.rewards.grading_pool import GradingError
from rlinf_vl.rewards.texts import MAX_TEXT_LENGTH, final_answer

#: x1, y1, x2, y2 with x1 ≤ x2 and y1 ≤ y2.
Box = tuple[float, float, float, float]
# Digits are bounded, so that no number is infinite.
_N = r"\s*([-+]?[0-9]{1,9}(?:\.[0-9]{0,9})?|[-+]?\.[0-9]{1,9})\s*"
_FOUR = rf"[\[(]{_N},{_N},{_N},{_N}[\])]"
_PAIRS = rf"[\[(]{_N},{_N}[\])]\s*,?\s*[\[(]{_N},{_N}[\])]"
_BOX = re.compile(rf"{_FOUR}|{_PAIRS}")
#: A box where points are read, too: two pairs are one in Qwen's marks only.
_BOX_AMONG_POINTS = re.compile(rf"{_FOUR}|<\|box_start\|>\s*{_PAIRS}")
_POINT = re.compile(rf"[\[(]{_N},{_N}[\])]|x\d?\s*=\s*\"{_N}\"\s*y\d?\s*=\s*\"{_N}\"")
_NUMBER = re.compile(_N)


def bbox_giou(
    final_response: str, answer: str, *, relative: float | None = None, images: Sequence[Any] = ()
) -> dict[str, float]:
    """Return the GIoU of the reply's last box and the reference box, -1 to 1; -1 without a box.

    GIoU is IoU − (hull − union) / hull (Rezatofighi et al. 2019, "Generalized Intersection over
    Union", algorithm 1). The answer is correct from an IoU of 0.5 on.

    A box is x1, y1, x2, y2: `[10, 20, 30, 40]`, `(10,20),(30,40)`, in JSON or Qwen's marks. Its
    corners may come in any order.

    Args:
        relative: the reply's coordinates run from 0 to this over the first image (Qwen3-VL: 1000);
            the reference's are pixels.
    """
    reply_box, target_box = _last_box(final_response), reference_box(answer)
    if reply_box is None:
        return {"score": -1.0, "iou": 0.0}
    iou, giou = overlap(_scaled(reply_box, relative, images), target_box)
    return {"score": giou, "iou": iou, "correct": float(iou >= 0.5)}


def point_in_box(
    final_response: str, answer: str, *, relative: float | None = None, images: Sequence[Any] = ()
) -> bool:
    """Return whether the reply's last point lies in the reference box, its border included.

    A point is `(15, 25)`, `[15, 25]`, or the middle of a box. `(10, 20), (30, 40)` are two points,
    in Qwen's marks a box. `relative` is that of `bbox_giou`.
    """
    point = _last_point(final_response)
    if point is None:
        return False
    x, y = _scaled(point, relative, images)
    x1, y1, x2, y2 = reference_box(answer)
    return x1 <= x <= x2 and y1 <= y <= y2


def overlap(a: Box, b: Box) -> tuple[float, float]:
    """Return IoU and GIoU of two boxes with x1 ≤ x2 and y1 ≤ y2."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = max(0.0, width) * max(0.0, height)
    union = _area(a) + _area(b) - shared
    hull = (max(a[2], b[2]) - min(a[0], b[0])) * (max(a[3], b[3]) - min(a[1], b[1]))
    iou = shared / union if union > 0 else float(a == b)
    return iou, iou - (hull - union) / hull if hull > 0 else iou


def reference_box(answer: str) -> Box:
    """Return the box of a reference answer. Raises GradingError: it is no box, or several."""
    # Comparing with one of several boxes would pay for a part of the answer as if it were whole.
    if (count := len(_BOX.findall(_text(answer)))) > 1:
        raise GradingError(
            f"the reference answer {answer[:80]!r} has {count} boxes, and one is compared; give "
            "each box a row of its own, or match several in a reward function of yours"
        )
    box = _last_box(answer)
    if box is None:
        raise GradingError(f"the reference answer {answer[:80]!r} is no box of four numbers")
    return box


def _last_box(text: str) -> Box | None:
    """Return the last box of a text, or its only four numbers, `10 20 30 40`; None without."""
    text = _text(text)
    coordinates = _last_match(_BOX, text)
    if coordinates is None:
        coordinates = [float(number) for number in _NUMBER.findall(text)]
    if len(coordinates) != 4:
        return None
    x1, y1, x2, y2 = coordinates
    return min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)


def _last_point(text: str) -> tuple[float, float] | None:
    """Return the middle of a text's last box, its last point, or what its only four or two numbers
    say."""
    text = _text(text)
    coordinates = _last_match(_BOX_AMONG_POINTS, text) or _last_match(_POINT, text)
    if coordinates is None:
        coordinates = [float(number) for number in _NUMBER.findall(text)]
    if len(coordinates) == 4:
        x1, y1, x2, y2 = coordinates
        return (x1 + x2) / 2, (y1 + y2) / 2
    return (coordinates[0], coordinates[1]) if len(coordinates) == 2 else None


def _last_match(pattern: re.Pattern[str], text: str) -> list[float] | None:
    """Return the numbers in the last match of a pattern, None without one."""
    matches = pattern.findall(text)
    # The pattern's alternatives have groups of their own; those that did not match are "".
    return [float(number) for number in matches[-1] if number] if matches else None


def _text(text: str) -> str:
    """Return the end of the final answer, or of the whole text without one."""
    final = final_answer(text)
    return (text if final is None else final)[-MAX_TEXT_LENGTH:]


def _scaled(numbers: Sequence[float], relative: float | None, images: Sequence[Any]) -> Any:
    """Return pixels of the first image for x, y, x, y, … that run from 0 to `relative`."""
    if relative is None or not images:
        return tuple(numbers)
    # PIL's size is (width, height), so even positions are x and odd ones y.
    return tuple(n * images[0].size[index % 2] / relative for index, n in enumerate(numbers))


def _area(box: Box) -> float:
    return math.prod((box[2] - box[0], box[3] - box[1]))
