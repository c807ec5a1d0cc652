"""One dataset row → one `Problem`: `<image>` placeholders become image parts, text around them is kept verbatim."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlinf_vl.data.images import blank_like, image_values, to_image_ref
from rlinf_vl.data.unusable import (
    ANSWER_UNUSABLE,
    ENVIRONMENT_UNUSABLE,
    PROMPT_UNUSABLE,
    ImageError,
    RowError,
    shorten,
)
from rlinf_vl.data.videos import VIDEO, video_in
from rlinf_vl.errors import nearest
from rlinf_vl.types import Message, Problem

IMAGE_PLACEHOLDER = "<image>"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFormat:
    """How a row becomes a problem; the fields are those of `data.*`.

    The prompt is a string or a list of chat messages whose content is a string or parts (`text`, `image`); `<image>` in a text
    marks where an image stands. Without any placeholder all images stand first.
    """

    prompt_key: str = "problem"
    answer_key: str = "answer"
    image_keys: Sequence[str] = ("images",)
    system_prompt: str | None = None  # replaces the row's own, and the images shown there
    prompt_suffix: str = ""  # appended to the last message
    blank_images: bool = False  # replace each image by a grey one of its size
    image_hosts: Sequence[str] = ()  # which images may be fetched from

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
                said = f"{key}: column {column!r} not in {source}; columns are {', '.join(there) or 'none'}"
                return f"{said};{nearest(column, there)}".rstrip(";")
        return None


def row_to_problem(row: dict[str, Any], row_id: str, form: RowFormat, root: Path | None = None) -> Problem:
    """The problem that a row (column → value) states; paths are relative to `root`, None for a data set of the hub.

    Column `env_class` names the row's own environment, and `env_kwargs` (a mapping, or one as JSON) keywords for it.

    Raises:
        RowError: a missing column, an unusable prompt, answer, image or environment, a video, or placeholders and images unequal in
            number.
    """
    if missing := form.missing_column(row, "the row"):
        raise RowError(row_id, "column missing", missing)
    if video := video_in(row, form.prompt_key, form.image_keys):
        raise RowError(row_id, VIDEO, video)
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
        messages = _messages(row[form.prompt_key], form.prompt_key)
    except ValueError as e:
        raise RowError(row_id, PROMPT_UNUSABLE, str(e)) from None
    if not any(_image_parts(message) for message in messages):
        first = next(message for message in messages if message["role"] == "user")
        first["content"][:0] = [{"type": "image_url"} for _ in images]
    places = [(message["role"], part) for message in messages for part in _image_parts(message)]
    if len(places) != len(images):
        reason = f"the prompt has {len(places)} {IMAGE_PLACEHOLDER} and the row {len(images)} images"
        raise RowError(row_id, "placeholders and images disagree", reason)
    for (_, part), image in zip(places, images, strict=True):
        part["image_url"] = {"url": image.url}
    _add_text(messages[-1]["content"], form.prompt_suffix)
    if form.system_prompt is not None:
        images = [image for (role, _), image in zip(places, images, strict=True) if role != "system"]
        messages = [{"role": "system", "content": []}] + [m for m in messages if m["role"] != "system"]
        _add_text(messages[0]["content"], form.system_prompt)
    answer = _answer(row[form.answer_key], row_id, form.answer_key)
    columns = {name: _plain(value) for name, value in row.items() if name not in (*form.columns, "env_class")}
    env_class = _env_class(row.get("env_class"), columns, row_id, root)
    return Problem(row_id, tuple(messages), answer, tuple(images), env_class, columns)


def _env_class(name: Any, columns: dict[str, Any], row_id: str, root: Path | None) -> str | None:
    """The environment that a row names; `env_kwargs` in `columns` become a mapping, in place."""
    kwargs = columns.pop("env_kwargs", None)
    if isinstance(kwargs, str):
        try:
            kwargs = json.loads(kwargs)
        except ValueError as e:
            reason = f"column 'env_kwargs' holds {_shown(kwargs)}, which is not JSON: {e}"
            raise RowError(row_id, ENVIRONMENT_UNUSABLE, reason) from e
    if isinstance(kwargs, dict | None):
        given = {
            key: value for key, value in (kwargs or {}).items() if value is not None
        }  # tables have every row's keys
        columns |= {"env_kwargs": given} if given else {}
    else:
        reason = f"column 'env_kwargs' holds {_shown(kwargs)}: expected a mapping"
        raise RowError(row_id, ENVIRONMENT_UNUSABLE, reason)
    if not name:
        name = None
    elif not isinstance(name, str):
        reason = f"column 'env_class' holds {_shown(name)}: expected the name of an environment"
        raise RowError(row_id, ENVIRONMENT_UNUSABLE, reason)
    if root is None:
        if columns.get("env_kwargs") or ":" in (name or ""):
            reason = "names code or keywords, but comes from the hub: such a row may name a registered environment only"
            raise RowError(row_id, ENVIRONMENT_UNUSABLE, reason)
    elif name and (root / name.rpartition(":")[0]).is_file():
        name = str(root.absolute() / name)
    return name


def _plain(value: Any) -> Any:
    """Without numpy's types, which `datasets` gives to short floats: 0.1 for float32's 0.1."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return float(str(value)) if isinstance(value, np.floating) else value


def _messages(prompt: Any, key: str) -> list[Message]:
    """Chat messages whose parts are texts, and images without their address."""
    if isinstance(prompt, str) and prompt.strip():
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"column {key!r} holds {_shown(prompt)}: expected a text or a list of chat messages")
    messages: list[Message] = []
    for message in prompt:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(f"column {key!r}: {_shown(message)} is no chat message with role and content")
        content, parts = message["content"], []
        for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "text" and isinstance(part.get("text"), str):
                first, *rest = part["text"].split(IMAGE_PLACEHOLDER)
                _add_text(parts, first)
                for text in rest:
                    parts.append({"type": "image_url"})
                    _add_text(parts, text)
            elif kind == "image" and not any(part.get(k) for k in ("image", "url", "path", "base64")):
                parts.append({"type": "image_url"})
            else:
                raise ValueError(
                    f"column {key!r}: content part {_shown(part)} is neither text nor a placeholder {{'type': 'image'}} "
                    "(images themselves belong in the columns of data.image_keys)"
                )
        messages.append({"role": message["role"], "content": parts})
    if messages[-1]["role"] != "user":
        raise ValueError(f"column {key!r}: the last message is of role {messages[-1]['role']!r}, not 'user'")
    said = [part for message in messages if message["role"] == "user" for part in message["content"]]
    if not any(part["type"] == "image_url" or part["text"].strip() for part in said):
        raise ValueError(f"column {key!r}: no message of role 'user' says anything")
    return messages


def _add_text(parts: list[dict[str, Any]], text: str) -> None:
    """Append a text, to the last part if that is one; an empty text is left out."""
    if text and parts and parts[-1]["type"] == "text":
        parts[-1]["text"] += text
    elif text:
        parts.append({"type": "text", "text": text})


def _image_parts(message: Message) -> list[dict[str, Any]]:
    return [part for part in message["content"] if part["type"] == "image_url"]


def _answer(value: Any, row_id: str, key: str) -> str:
    if value is None or not str(value).strip():
        raise RowError(row_id, "answer missing", f"column {key!r} is empty")
    if isinstance(value, str) and value.strip().lower() != "nan":  # which is how tables of strings hold a missing value
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, (float, np.floating)) and math.isfinite(value):
        return _number(value)
    reason = f"column {key!r} holds {_shown(value)}: expected a string or a finite number"
    raise RowError(row_id, ANSWER_UNUSABLE, reason)


def _number(value: float | np.floating) -> str:
    """A number as people write it: 0.00001, not 1e-05; 0.1 for a float32, not 0.10000000149011612; 5 for 5.0. Digits beyond
    the type's precision are noise of a computation, and rounded: 0.1 + 0.2 is 0.3."""
    digits = np.finfo(value.dtype if isinstance(value, np.floating) else float).precision
    places = max(1, digits - 1 - math.floor(math.log10(abs(value) or 1)))
    return np.format_float_positional(value, precision=places, trim="-")


def _shown(value: Any) -> str:
    return shorten(repr(value))
