"""The text of a reference answer, whatever type a row has it in."""

import json
import math
from typing import Any

import numpy as np


def answer_text(value: Any) -> str | None:
    """Return the text of an answer; None if the value is none that a grader reads.

    A text is itself, 5.0 is 5, true and false are "true" and "false". A list of texts, each of them right, is JSON, and so is a
    list of numbers, such as a box, or of such lists: "[1, 2]". One number in a list is that number.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, (bool, np.bool_)):
        return "true" if value else "false"
    if isinstance(value, (int, np.integer)):
        return str(int(value))
    if isinstance(value, (float, np.floating)):
        return _number_text(value) if math.isfinite(value) else None
    if isinstance(value, np.ndarray):
        value = list(value)
    if not isinstance(value, (list, tuple)) or not len(value):
        return None
    if all(isinstance(one, str) for one in value):
        return json.dumps(list(value), ensure_ascii=False)
    if len(value) == 1 and not isinstance(value[0], (list, tuple, np.ndarray)):
        return answer_text(value[0])
    return _list_text(value)


def _list_text(value: Any) -> str | None:
    """Return a list of numbers, or of lists of them, as JSON; None if it holds anything else."""
    items: list[str | None] = []
    for item in value:
        if isinstance(item, (list, tuple, np.ndarray)):
            items.append(_list_text(item) if len(item) else None)
        elif isinstance(item, (bool, np.bool_, str)):
            return None
        else:
            items.append(answer_text(item))
    texts = [text for text in items if text is not None]
    return f"[{', '.join(texts)}]" if len(texts) == len(items) else None


def _number_text(value: float | np.floating) -> str:
    """Return a number as people write it: 0.00001, not 1e-05; 0.1 for a float32, not 0.10000000149011612; 5 for 5.0. Digits beyond
    the type's precision are noise of a computation, and rounded: 0.1 + 0.2 is 0.3."""
    digits = np.finfo(value.dtype if isinstance(value, np.floating) else float).precision
    places = max(1, digits - 1 - math.floor(math.log10(abs(value) or 1)))
    return np.format_float_positional(value, precision=places, trim="-")
