"""One dataset row → one `Problem`: `<image>` placeholders become image parts, text around them is kept verbatim."""

import difflib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlinf_vl.data.images import ImageError, blank_like, image_values, to_image_ref
from rlinf_vl.types import ImageRef, Message, Problem

IMAGE_PLACEHOLDER = "<image>"
_IMAGE = object()

PROMPT_UNUSABLE = "prompt unusable"
PROMPT_TOO_LONG = "prompt too long"
ANSWER_MISSING = "answer missing"
ANSWER_UNUSABLE = "answer unusable"
IMAGES_DISAGREE = "placeholders and images disagree"


class RowError(ValueError):
    """A row that can't become a problem: its id, the kind of reason (as `ImageError.kind`) and the reason."""

    def __init__(self, row_id: str, kind: str, reason: str) -> None:
        super().__init__(row_id, kind, reason)
        self.row_id, self.kind, self.reason = row_id, kind, reason

    def __str__(self) -> str:
        return f"row {self.row_id}: {self.reason}"


def kind_and_reason(error: Exception) -> tuple[str, str]:
    """What a bad row is counted under, and what is wrong with it; an error that isn't ours is counted by its type."""
    if isinstance(error, (RowError, ImageError)):
        return error.kind, error.reason
    return type(error).__name__, str(error)


def wanted_columns(prompt_key: str, answer_key: str, image_keys: Sequence[str]) -> list[tuple[str, str]]:
    """(config key, column) of every column that a problem is made from."""
    keys = [("data.prompt_key", prompt_key), ("data.answer_key", answer_key)]
    return keys + [("data.image_keys", column) for column in image_keys]


def missing_column(wanted: Sequence[tuple[str, str]], columns: Sequence[str], source: str) -> str | None:
    """Says which (config key, column) `columns` lacks first, and what is near; None if all are there."""
    for key, column in wanted:
        if column not in columns:
            near = difflib.get_close_matches(column, columns, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            return f"{key}: column {column!r} not in {source}; columns are {', '.join(sorted(columns)) or 'none'}{hint}"
    return None


def row_to_problem(
    row: dict[str, Any],
    *,
    row_id: str,
    prompt_key: str = "problem",
    answer_key: str = "answer",
    image_keys: Sequence[str] = ("images",),
    system_prompt: str | None = None,
    prompt_suffix: str = "",
    blank_images: bool = False,
    image_hosts: Sequence[str] = (),
    root: Path | None = None,
) -> Problem:
    """The problem that a row states.

    Args:
        row: column → value. The prompt is a string or a list of chat messages whose content is a string or parts
            (`text`, `image`); `<image>` in a text marks where an image stands. Without any placeholder all images stand
            first in the first user message.
        row_id: becomes `Problem.id`.
        system_prompt: put first; it replaces a system message of the row's own, and the images shown there.
        prompt_suffix: appended to the last message.
        blank_images: replace each image by a grey one of its size.
        image_hosts: whom images may be fetched from.
        root: the folder that paths of images are relative to.

    Raises:
        RowError: a missing column, an unusable prompt, answer or image, or placeholders and images unequal in number.
    """
    if missing := missing_column(wanted_columns(prompt_key, answer_key, image_keys), list(row), "the row"):
        raise RowError(row_id, "column missing", missing)
    images = _images(row, row_id, image_keys, root, image_hosts)
    if blank_images:
        images = [blank_like(image) for image in images]
    try:
        turns = _turns(row[prompt_key], prompt_key)
    except ValueError as e:
        raise RowError(row_id, PROMPT_UNUSABLE, str(e)) from None
    _place_images(turns, len(images), row_id)
    if prompt_suffix:
        turns[-1][1].append(prompt_suffix)
    if system_prompt is not None:
        roles = [role for role, pieces in turns for piece in pieces if piece is _IMAGE]  # of each image, in order
        images = [image for image, role in zip(images, roles, strict=True) if role != "system"]
        turns = [("system", [system_prompt])] + [turn for turn in turns if turn[0] != "system"]
    return Problem(
        id=row_id,
        messages=_messages(turns, images),
        answer=_answer(row[answer_key], row_id, answer_key),
        images=tuple(images),
    )


def _images(
    row: dict[str, Any], row_id: str, image_keys: Sequence[str], root: Path | None, hosts: Sequence[str]
) -> list[ImageRef]:
    images = []
    for column in image_keys:
        for i, value in enumerate(image_values(row[column])):
            try:
                images.append(to_image_ref(value, root=root, hosts=hosts))
            except ImageError as e:
                raise RowError(row_id, e.kind, f"column {column!r}, image {i}: {e}") from e
    return images


def _turns(prompt: Any, key: str) -> list[tuple[str, list[Any]]]:
    """(role, pieces) per message; a piece is a text or `_IMAGE`."""
    if isinstance(prompt, str) and prompt.strip():
        return [("user", _split(prompt))]
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"column {key!r} holds {_shown(prompt)}: expected a text or a list of chat messages")
    turns = []
    for message in prompt:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(f"column {key!r}: {_shown(message)} is no chat message with role and content")
        content = message["content"]
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        turns.append((message["role"], [piece for part in parts for piece in _pieces(part, key)]))
    if turns[-1][0] != "user":
        raise ValueError(f"column {key!r}: the last message is of role {turns[-1][0]!r}, not 'user'")
    if not any(piece is _IMAGE or piece.strip() for role, pieces in turns if role == "user" for piece in pieces):
        raise ValueError(f"column {key!r}: no message of role 'user' says anything")
    return turns


def _pieces(part: Any, key: str) -> list[Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return _split(part["text"])
    if kind == "image" and not any(part.get(k) for k in ("image", "url", "path", "base64")):
        return [_IMAGE]
    raise ValueError(
        f"column {key!r}: content part {_shown(part)} is neither text nor a placeholder {{'type': 'image'}} "
        "(images themselves belong in the columns of data.image_keys)"
    )


def _split(text: str) -> list[Any]:
    pieces: list[Any] = []
    for i, piece in enumerate(text.split(IMAGE_PLACEHOLDER)):
        pieces += [_IMAGE, piece] if i else [piece]
    return pieces


def _place_images(turns: list[tuple[str, list[Any]]], n_images: int, row_id: str) -> None:
    """Put images first in the first user message if nothing marks a place; else check that the numbers agree."""
    places = sum(piece is _IMAGE for _, pieces in turns for piece in pieces)
    if places == 0:
        first = next(pieces for role, pieces in turns if role == "user")
        first[:0] = [_IMAGE] * n_images
    elif places != n_images:
        raise RowError(
            row_id, IMAGES_DISAGREE, f"the prompt has {places} {IMAGE_PLACEHOLDER} and the row {n_images} images"
        )


def _messages(turns: list[tuple[str, list[Any]]], images: Sequence[ImageRef]) -> tuple[Message, ...]:
    urls = (image.url for image in images)
    messages = []
    for role, pieces in turns:
        parts: list[dict[str, Any]] = []
        for piece in pieces:
            if piece is _IMAGE:
                parts.append({"type": "image_url", "image_url": {"url": next(urls)}})
            elif piece and parts and parts[-1]["type"] == "text":
                parts[-1]["text"] += piece
            elif piece:
                parts.append({"type": "text", "text": piece})
        messages.append({"role": role, "content": parts})
    return tuple(messages)


def _answer(value: Any, row_id: str, key: str) -> str:
    if value is None or not str(value).strip():
        raise RowError(row_id, ANSWER_MISSING, f"column {key!r} is empty")
    usable = isinstance(value, (str, int, float, np.floating)) and not isinstance(value, bool)
    nan = str(value).strip().lower() == "nan"  # also as a text, which is how tables of strings hold a missing value
    if not usable or nan or (isinstance(value, (float, np.floating)) and math.isinf(value)):
        raise RowError(
            row_id, ANSWER_UNUSABLE, f"column {key!r} holds {_shown(value)}: expected a string or a finite number"
        )
    return value if isinstance(value, str) else _number(value)


def _number(value: int | float | np.floating) -> str:
    """A number as people write it: 0.00001, not 1e-05; 0.1 for a float32, not 0.10000000149011612; 5 for 5.0. Digits beyond
    the type's precision are noise of a computation, and rounded: 0.1 + 0.2 is 0.3."""
    if isinstance(value, int) or value == int(value):
        return str(value) if isinstance(value, int) else np.format_float_positional(value, trim="-")
    digits = np.finfo(value.dtype if isinstance(value, np.floating) else float).precision
    places = max(1, digits - 1 - math.floor(math.log10(abs(value))))
    return np.format_float_positional(value, precision=places, trim="-")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
