"""One dataset row → one `Problem`: `<image>` placeholders become image parts, text around them is kept verbatim."""

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlinf_vl.data import shorten
from rlinf_vl.data.images import ImageError, blank_like, image_values, to_image_ref
from rlinf_vl.types import ImageRef, Message, Problem

IMAGE_PLACEHOLDER = "<image>"
_IMAGE = object()

#: Kinds of bad rows that other rooms name, too.
PROMPT_UNUSABLE = "prompt unusable"
PROMPT_TOO_LONG = "prompt too long"
ANSWER_UNUSABLE = "answer unusable"


class RowError(ValueError):
    """A row that can't become a problem: its id, the kind of reason (as `ImageError.kind`) and the reason."""

    def __init__(self, row_id: str, kind: str, reason: str) -> None:
        super().__init__(row_id, kind, reason)
        self.row_id = row_id
        self.kind = kind
        self.reason = reason

    def __str__(self) -> str:
        return f"row {self.row_id}: {self.reason}"


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that can't be used: the kind of reason that it is counted under, its id, and the reason."""

    kind: str
    id: str
    reason: str

    def __str__(self) -> str:
        return f"row {self.id}: {self.kind}: {self.reason}"


def kind_and_reason(error: Exception) -> tuple[str, str]:
    """The kind that a bad row is counted under, and what is wrong with it; foreign errors are counted by their type."""
    if isinstance(error, (RowError, ImageError)):
        return error.kind, error.reason
    return type(error).__name__, str(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFormat:
    """How a row becomes a problem; the fields are those of `data.*`.

    The prompt is a string or a list of chat messages whose content is a string or parts (`text`, `image`); `<image>` in a text
    marks where an image stands. Without any placeholder all images stand first.

    Attributes:
        system_prompt: replaces the row's own, and the images shown there.
        prompt_suffix: appended to the last message.
        blank_images: replace each image by a grey one of its size.
        image_hosts: hosts that images may be fetched from.
    """

    prompt_key: str = "problem"
    answer_key: str = "answer"
    image_keys: Sequence[str] = ("images",)
    system_prompt: str | None = None
    prompt_suffix: str = ""
    blank_images: bool = False
    image_hosts: Sequence[str] = ()

    @property
    def columns(self) -> dict[str, str]:
        """Every column that a problem is made from → the config key that names it."""
        prompt_and_answer = {self.prompt_key: "data.prompt_key", self.answer_key: "data.answer_key"}
        return prompt_and_answer | dict.fromkeys(self.image_keys, "data.image_keys")

    def missing_column(self, columns: Iterable[str], source: str) -> str | None:
        """What to say of the first column that `columns` lacks, with what is near; None if all are there."""
        there = sorted(columns)
        for column, key in self.columns.items():
            if column not in there:
                near = difflib.get_close_matches(column, there, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                return f"{key}: column {column!r} not in {source}; columns are {', '.join(there) or 'none'}{hint}"
        return None


def row_to_problem(row: dict[str, Any], row_id: str, form: RowFormat, root: Path | None = None) -> Problem:
    """The problem that a row (column → value) states; paths of images are relative to `root`.

    Raises:
        RowError: a missing column, an unusable prompt, answer or image, or placeholders and images unequal in number.
    """
    if missing := form.missing_column(row, "the row"):
        raise RowError(row_id, "column missing", missing)
    images = []
    for column in form.image_keys:
        for i, value in enumerate(image_values(row[column])):
            try:
                images.append(to_image_ref(value, root=root, hosts=form.image_hosts))
            except ImageError as e:
                raise RowError(row_id, e.kind, f"column {column!r}, image {i}: {e}") from e
    if form.blank_images:
        images = [blank_like(image) for image in images]
    try:
        turns = _turns(row[form.prompt_key], form.prompt_key)
    except ValueError as e:
        raise RowError(row_id, PROMPT_UNUSABLE, str(e)) from None
    roles = [
        role for role, pieces in turns for piece in pieces if piece is _IMAGE
    ]  # of the message with each placeholder
    if not roles:
        first = next(pieces for role, pieces in turns if role == "user")
        first[:0] = [_IMAGE] * len(images)
        roles = ["user"] * len(images)
    if len(roles) != len(images):
        reason = f"the prompt has {len(roles)} {IMAGE_PLACEHOLDER} and the row {len(images)} images"
        raise RowError(row_id, "placeholders and images disagree", reason)
    if form.prompt_suffix:
        turns[-1][1].append(form.prompt_suffix)
    if form.system_prompt is not None:
        images = [image for image, role in zip(images, roles, strict=True) if role != "system"]
        turns = [("system", [form.system_prompt])] + [turn for turn in turns if turn[0] != "system"]
    answer = _answer(row[form.answer_key], row_id, form.answer_key)
    return Problem(id=row_id, messages=_messages(turns, images), answer=answer, images=tuple(images))


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
    """The pieces around the placeholders, and `_IMAGE` in place of each."""
    first, *rest = text.split(IMAGE_PLACEHOLDER)
    return [first, *(piece for after in rest for piece in (_IMAGE, after))]


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
    text = "" if value is None else str(value).strip()
    if not text:
        raise RowError(row_id, "answer missing", f"column {key!r} is empty")
    if isinstance(value, str) and text.lower() != "nan":  # which is how tables of strings hold a missing value
        return value
    if (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, (float, np.floating)) and math.isfinite(value)
    ):
        return _number(value)
    raise RowError(
        row_id, ANSWER_UNUSABLE, f"column {key!r} holds {_shown(value)}: expected a string or a finite number"
    )


def _number(value: int | float | np.floating) -> str:
    """A number as people write it: 0.00001, not 1e-05; 0.1 for a float32, not 0.10000000149011612; 5 for 5.0. Digits beyond
    the type's precision are noise of a computation, and rounded: 0.1 + 0.2 is 0.3."""
    if isinstance(value, int):
        return str(value)
    if value == int(value):
        return np.format_float_positional(value, trim="-")
    digits = np.finfo(value.dtype if isinstance(value, np.floating) else float).precision
    places = max(1, digits - 1 - math.floor(math.log10(abs(value))))
    return np.format_float_positional(value, precision=places, trim="-")


def _shown(value: Any) -> str:
    return shorten(repr(value))
