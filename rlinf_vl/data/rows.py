"""One dataset row → one `Problem`: `<image>` placeholders become image parts, text around them is kept verbatim."""

import json
import logging
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rlinf_vl.data.answers import answer_text
from rlinf_vl.data.formats import RowFormat
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
from rlinf_vl.types import ImageRef, Message, Problem

log = logging.getLogger(__name__)

IMAGE_PLACEHOLDER = "<image>"
#: Where a part of a message has its image.
_IMAGE_KEYS = ("image_url", "image", "url", "path", "base64")
#: `reward_spec.method` (SkyRL) and `reward_model.style` (verl) of rows that need no answer, as a model judges responses.
_JUDGED = {"reward_model", "model"}


def row_to_problem(
    row: dict[str, Any], row_id: str, form: RowFormat, root: Path | None = None, variant: int = 0
) -> Problem:
    """The problem that a row (column → value) states; paths are relative to `root`, None for a data set of the hub.

    Column `env_class` names the row's own environment, and `env_kwargs` (a mapping, or one as JSON) keywords for it. The question
    is put into `form.prompt_variants[variant]`, if there are any.

    Raises:
        RowError: a missing column, an unusable prompt, answer, image or environment, a video, or placeholders and images unequal in
            number.
    """
    if missing := form.missing_column(row, "the row"):
        raise RowError(row_id, "column missing", missing)
    if video := video_in(row, form.prompt_key, form.image_keys):
        raise RowError(row_id, VIDEO, video)
    image_root = root if form.image_root is None else Path(form.image_root)

    def image_of(value: Any, place: str) -> ImageRef:
        try:
            return to_image_ref(value, root=image_root, hosts=form.image_hosts)
        except ImageError as e:
            raise RowError(row_id, e.kind, f"column {place}: {e}") from e

    cells = [(column, image_values(row[column])) for column in form.image_keys]
    images = [image_of(value, f"{column!r}, image {i}") for column, values in cells for i, value in enumerate(values)]
    try:
        messages = _messages(row[form.prompt_key] if form.prompt_key else "", form)
    except ValueError as e:
        raise RowError(row_id, PROMPT_UNUSABLE, str(e)) from None
    if form.prompt_variants:
        _put_into(messages[-1]["content"], form.prompt_variants[variant])
    parts = [part for message in messages for part in _image_parts(message)]
    if not parts:
        first = next(message for message in messages if message["role"] == "user")
        first["content"][:0] = parts = [{"type": "image_url"} for _ in images]
    places = [part for part in parts if "image" not in part]
    if len(places) != len(images):
        reason = f"the prompt has {len(places)} {IMAGE_PLACEHOLDER} and the row {len(images)} images"
        raise RowError(row_id, "placeholders and images disagree", reason)
    named = iter(images)
    shown: dict[str, ImageRef] = {}
    part: dict[str, Any]
    for i, part in enumerate(parts):
        own = "image" in part
        image = image_of(part.pop("image"), f"{form.prompt_key!r}, image {i}") if own else next(named)
        image = blank_like(image) if form.blank_images else image
        shown[image.url] = image
        part["image_url"] = {"url": image.url}
    _add_text(messages[-1]["content"], form.prompt_suffix)
    if form.system_prompt is not None:
        messages = [{"role": "system", "content": []}] + [m for m in messages if m["role"] != "system"]
        _add_text(messages[0]["content"], form.system_prompt)
    dropped = _limit_images(messages, form.max_images_per_message, form.max_images_per_sample)
    refs = tuple(shown[part["image_url"]["url"]] for message in messages for part in _image_parts(message))
    answer = _answer(row, row_id, form)
    used = {form.prompt_key, *form.image_keys, "env_class"} | ({"answer"} if form.answer_key == "answer" else set())
    columns = {name: _plain(value) for name, value in row.items() if name not in used}
    env_class = _env_class(row.get("env_class"), columns, row_id, form, root)
    chat = isinstance(row.get(form.prompt_key), list)
    return Problem(row_id, tuple(messages), answer, refs, env_class, columns, dropped, chat)


def at_path(row: dict[str, Any], name: str) -> Any:
    """What stands in a column, or in a mapping (which may be JSON) in it: `reward_model.ground_truth`. None where nothing does."""
    if name in row:
        return row[name]
    value: Any = row
    for key in name.split("."):
        if isinstance(value, str) and value.startswith("{"):
            with suppress(ValueError):
                value = json.loads(value)
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _limit_images(messages: list[Message], per_message: int | None, per_sample: int | None) -> int:
    """Take images beyond the limits out of the messages, the first ones stay; returns how many."""
    shown = dropped = 0
    for message in messages:
        here = 0
        for part in _image_parts(message):
            beyond = (per_message is not None and here >= per_message) or (
                per_sample is not None and shown >= per_sample
            )
            if beyond:
                message["content"] = [other for other in message["content"] if other is not part]
                dropped += 1
            else:
                here += 1
                shown += 1
    return dropped


def _put_into(parts: list[dict[str, Any]], variant: str) -> None:
    """Put a text around what a message says, in place; images that stand first stay first."""
    before, _, after = variant.partition("{problem}")
    first = next((part for part in parts if part["type"] == "text"), None)
    if first is None:
        _add_text(parts, before)
    else:
        first["text"] = before + first["text"]
    _add_text(parts, after)


def _env_class(name: Any, columns: dict[str, Any], row_id: str, form: RowFormat, root: Path | None) -> str | None:
    """The environment that a row names; `env_kwargs` in `columns` become a mapping, in place. What SkyRL's rows name is another
    system's, and played by the run's own, if there is none of that name here."""
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
    elif form.format == "openai" and ":" not in name and name not in form.environments:
        columns["env_class"] = name
        _warn_of_environment(name)
        name = None
    if root is None:
        if columns.get("env_kwargs") or ":" in (name or ""):
            reason = "names code or keywords, but comes from the hub: such a row may name a registered environment only"
            raise RowError(row_id, ENVIRONMENT_UNUSABLE, reason)
    elif name and (root / name.rpartition(":")[0]).is_file():
        name = str(root.absolute() / name)
    return name


@cache
def _warn_of_environment(name: str) -> None:
    log.warning("rows name the environment %r, which is none of ours: they are played in rollout.env_class", name)


def _plain(value: Any) -> Any:
    """Without numpy's types, which `datasets` gives to short floats: 0.1 for float32's 0.1."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return float(str(value)) if isinstance(value, np.floating) else value


def _messages(prompt: Any, form: RowFormat) -> list[Message]:
    """Chat messages whose parts are texts and images: {"type": "image_url"}, with the image itself under "image" if the part has
    one, and without where it is one of the row's."""
    key = form.prompt_key
    if not key:
        return [{"role": "user", "content": []}]
    if isinstance(prompt, str) and prompt.lstrip().startswith("[{"):
        with suppress(ValueError):
            written = json.loads(prompt)
            prompt = written if all("role" in message for message in written) else prompt
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
            elif kind in ("image", "image_url"):
                own = next((part[name] for name in _IMAGE_KEYS if part.get(name)), None)
                own = own["url"] if isinstance(own, dict) and own.get("url") else own
                parts.append({"type": "image_url"} | ({"image": own} if own else {}))
            else:
                raise ValueError(f"column {key!r}: content part {_shown(part)} is neither text nor an image")
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


def _answer(row: dict[str, Any], row_id: str, form: RowFormat) -> str:
    key = form.answer_key
    value = at_path(row, key) if key else ""
    within = row.get(key.partition(".")[0]) if "." in key else None
    if not key or isinstance(within, dict) and {within.get("style"), within.get("method")} & _JUDGED:
        return "" if value is None else str(value)
    if value is None or isinstance(value, str) and not value.strip():
        raise RowError(row_id, "answer missing", f"column {key!r} is empty")
    text = answer_text(value)
    if text is None and isinstance(value, (dict, list)) and within is not None:  # what one's own function reads
        text = json.dumps(_plain(value), ensure_ascii=False)
    if (
        text is None or isinstance(value, str) and text.strip().lower() == "nan"
    ):  # as tables of strings hold a missing value
        reason = (
            f"column {key!r} holds {_shown(value)}: expected a text, a finite number, true or false, or a list of these"
        )
        raise RowError(row_id, ANSWER_UNUSABLE, reason)
    return text


def _shown(value: Any) -> str:
    return shorten(repr(value))
