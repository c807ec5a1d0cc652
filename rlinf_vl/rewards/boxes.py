"""Rewards for places in a picture: a box (GIoU), a point in a box."""

import math
import re
from collections.abc import Sequence
from typing import Any

from rlinf_vl.rewards.grading_pool import GradingError
from rlinf_vl.rewards.texts import LONGEST, final_answer

Box = tuple[float, float, float, float]
_N = r"\s*([-+]?[0-9]{1,9}(?:\.[0-9]{0,9})?|[-+]?\.[0-9]{1,9})\s*"
_BOX = re.compile(rf"[\[(]{_N},{_N},{_N},{_N}[\])]|[\[(]{_N},{_N}[\])]\s*,?\s*[\[(]{_N},{_N}[\])]")
_POINT = re.compile(rf"[\[(]{_N},{_N}[\])]|x\d?\s*=\s*\"{_N}\"\s*y\d?\s*=\s*\"{_N}\"")
_NUMBER = re.compile(_N)


def bbox_giou(said: str, answer: str, *, relative: float | None = None, images: Sequence[Any] = ()) -> dict[str, float]:
    """GIoU of the last box that is said and the reference, -1 to 1: IoU − (hull − union) / hull (Rezatofighi et al. 2019,
    "Generalized Intersection over Union", algorithm 1); -1 without a box. Correct from an IoU of 0.5 on.

    A box is x1, y1, x2, y2: `[10, 20, 30, 40]`, `(10,20),(30,40)`, in JSON or Qwen's marks. Corners may come in any order.

    Args:
        relative: coordinates that are said run from 0 to this over the first image (Qwen3-VL: 1000), the reference's are pixels.
    """
    given, wanted = _last_box(said), reference_box(answer)
    if given is None:
        return {"score": -1.0, "iou": 0.0}
    iou, giou = overlap(_scaled(given, relative, images), wanted)
    return {"score": giou, "iou": iou, "correct": float(iou >= 0.5)}


def point_in_box(said: str, answer: str, *, relative: float | None = None, images: Sequence[Any] = ()) -> bool:
    """Whether the last point that is said lies in the reference box, its border included: `(15, 25)`, `[15, 25]`, or the middle of a
    box. `relative`: as `bbox_giou`."""
    point = _last_point(said)
    if point is None:
        return False
    x, y = _scaled(point, relative, images)
    x1, y1, x2, y2 = reference_box(answer)
    return x1 <= x <= x2 and y1 <= y <= y2


def overlap(a: Box, b: Box) -> tuple[float, float]:
    """IoU and GIoU of two boxes with x1 ≤ x2 and y1 ≤ y2."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = max(0.0, width) * max(0.0, height)
    union = _area(a) + _area(b) - shared
    hull = (max(a[2], b[2]) - min(a[0], b[0])) * (max(a[3], b[3]) - min(a[1], b[1]))
    iou = shared / union if union > 0 else float(a == b)
    return iou, iou - (hull - union) / hull if hull > 0 else iou


def reference_box(answer: str) -> Box:
    """The box that a reference is. Raises GradingError: it is none."""
    box = _last_box(answer)
    if box is None:
        raise GradingError(f"the reference answer {answer[:80]!r} is no box of four numbers")
    return box


def _last_box(text: str) -> Box | None:
    text = _text(text)
    found = [[float(n) for n in groups if n] for groups in _BOX.findall(text)]
    if not found and len(bare := _NUMBER.findall(text)) == 4:  # nothing but four numbers, as in 10 20 30 40
        found = [[float(n) for n in bare]]
    if not found:
        return None
    x1, y1, x2, y2 = found[-1]
    return min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)


def _last_point(text: str) -> tuple[float, float] | None:
    box = _last_box(text)
    if box is not None:
        return (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
    text = _text(text)
    found = [[float(n) for n in groups if n] for groups in _POINT.findall(text)]
    if not found and len(bare := _NUMBER.findall(text)) == 2:
        found = [[float(n) for n in bare]]
    return (found[-1][0], found[-1][1]) if found else None


def _text(text: str) -> str:
    final = final_answer(text)
    return (text if final is None else final)[-LONGEST:]


def _scaled(numbers: Sequence[float], relative: float | None, images: Sequence[Any]) -> Any:
    """Pixels of the first image, for x, y, x, y, … from 0 to `relative`."""
    if relative is None or not images:
        return tuple(numbers)
    return tuple(n * images[0].size[place % 2] / relative for place, n in enumerate(numbers))


def _area(box: Box) -> float:
    return math.prod((box[2] - box[0], box[3] - box[1]))
