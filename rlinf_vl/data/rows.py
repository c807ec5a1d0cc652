"""One row of a data set → one `Problem`: `<image>` and `<video>` placeholders become parts, the text
around them is kept verbatim."""

import json
import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rlinf_vl.config.parts import load_part
from rlinf_vl.data.answers import answer_text
from rlinf_vl.data.formats import RowFormat
from rlinf_vl.data.images import image_values, to_image_ref
from rlinf_vl.data.other_messages import openai_messages
from rlinf_vl.data.tool_fields import (
    MESSAGE_FIELDS,
    THOUGHT_KEYS,
    is_set,
    message_fields,
    row_tools,
)
from rlinf_vl.data.unusable import (
    ANSWER_UNUSABLE,
    ENVIRONMENT_UNUSABLE,
    PROMPT_UNUSABLE,
    ImageError,
    RowError,
    shorten,
)
from rlinf_vl.data.views import blank
from rlinf_vl.types import ImageRef, Message, Problem

log = logging.getLogger(__name__)

#: Placeholder of an image or a video of the row → the type of its part.
PLACEHOLDERS = {"<image>": "image_url", "<video>": "video_url"}
_PLACEHOLDER = re.compile("|".join(PLACEHOLDERS))
#: Type of a part of a message → the type of ours.
_PART_TYPES = {name.removesuffix("_url"): name for name in PLACEHOLDERS.values()}
_PART_TYPES |= {name: name for name in PLACEHOLDERS.values()}
#: Keys under which such a part may have its image or video, the first one that is set.
_VALUE_KEYS = ("image_url", "image", "video_url", "video", "url", "path", "base64")
#: Keys of messages and their parts that are read; `weight` is read in conversations to imitate.
_MESSAGE_KEYS = {"role", "content"}
_PART_KEYS = {"type", "text", "fps", *_VALUE_KEYS}
#: `reward_spec.method` (SkyRL) and `reward_model.style` (verl) of rows that need no answer, as a
#: model judges responses.
_JUDGED = {"reward_model", "model"}


def row_to_problem(
    row: dict[str, Any], row_id: str, form: RowFormat, root: Path | None = None, variant: int = 0
) -> Problem:
    """Return the problem of a row (column → value).

    Column `env_class` names the row's own environment, and `env_kwargs` (a mapping, or one as JSON)
    its keyword arguments. The question is put into `form.prompt_variants[variant]`, if there are
    variants.

    Args:
        root: the folder that paths are relative to; None for a data set of the hub.

    Raises:
        RowError: a missing column, an unusable prompt, answer, image, video or environment, or
            placeholders and images or videos unequal in number.
    """
    if problem := form.missing_column(row, "the row"):
        raise RowError(row_id, "column missing", problem)
    media_root = root if form.image_root is None else Path(form.image_root)

    def ref_of(part_type: str, value: Any, place: str) -> ImageRef:
        try:
            if part_type == "video_url":
                return load_part("clip")(
                    value, root=media_root, settings=form.video, hosts=form.image_hosts
                )
            return to_image_ref(value, root=media_root, hosts=form.image_hosts)
        except ImageError as e:
            raise RowError(row_id, e.kind, f"column {place}: {e}") from e

    row_refs: dict[str, list[ImageRef]] = {"image_url": [], "video_url": []}
    media = [("image_url", form.image_keys, image_values)]
    if form.video_keys:
        media.append(("video_url", form.video_keys, load_part("videos-of-a-cell")))
    for part_type, columns, values_of in media:
        row_refs[part_type] = [
            ref_of(part_type, value, f"{column!r}, {_noun(part_type)} {i}")
            for column in columns
            for i, value in enumerate(values_of(row[column]))
        ]
    try:
        messages, unused_keys = _messages(row[form.prompt_key] if form.prompt_key else "", form)
        if form.messages_key is not None:
            _set_weights(messages, form.prompt_key)
        tools = row_tools(row.get("tools"), required=form.messages_key is not None)
    except ValueError as e:
        raise RowError(row_id, PROMPT_UNUSABLE, str(e)) from None
    if form.prompt_variants:
        _put_into(messages[-1]["content"], form.prompt_variants[variant])
    _put_refs(messages, row_refs, row_id, form, ref_of)
    _add_text(messages[-1]["content"], form.prompt_suffix)
    if form.system_prompt is not None:
        messages = _with_system_prompt(messages, form.system_prompt)
    n_dropped = _limit_images(messages, form.max_images_per_message, form.max_images_per_sample)
    # In the order of the messages: some images may have been dropped.
    refs = tuple(
        part.pop("ref") for message in messages for part in message["content"] if "ref" in part
    )
    answer = _answer(row, row_id, form)
    columns = _unused_columns(row, form)
    env_class = _env_class(row.get("env_class"), columns, row_id, form, root)
    is_chat = isinstance(row.get(form.prompt_key), list)
    return Problem(
        row_id,
        tuple(messages),
        answer,
        refs,
        env_class,
        columns,
        n_dropped,
        is_chat,
        unused_keys=unused_keys,
        tools=tools,
    )


def _with_system_prompt(messages: Sequence[Message], text: str) -> list[Message]:
    """Return the messages with this system prompt in place of their own."""
    system: Message = {"role": "system", "content": []}
    _add_text(system["content"], text)
    return [system, *(message for message in messages if message["role"] != "system")]


def _unused_columns(row: dict[str, Any], form: RowFormat) -> dict[str, Any]:
    """Return the columns that reward functions and environments get: those not yet read.

    An answer of another name than "answer" is one of them.
    """
    used = {form.prompt_key, *form.image_keys, *(form.video_keys or ())}
    used |= {"env_class", *(("answer",) if form.answer_key == "answer" else ())}
    return {name: _plain(value) for name, value in row.items() if name not in used}


def at_path(row: dict[str, Any], name: str) -> Any:
    """Return the value of a column, or of a key of a mapping (which may be JSON) in a column, such
    as `reward_model.ground_truth`. None if there is none."""
    if name in row:
        return row[name]
    value: Any = row
    for key in name.split("."):
        if isinstance(value, str) and value.startswith("{"):
            with suppress(ValueError):
                value = json.loads(value)
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _put_refs(
    messages: list[Message],
    row_refs: dict[str, list[ImageRef]],
    row_id: str,
    form: RowFormat,
    ref_of: Callable[[str, Any, str], ImageRef],
) -> None:
    """Set the URL and the reference (`ref`) of each image and video part, in place.

    Args:
        row_refs: type of a part → the row's images or videos, for the parts without their own.
        ref_of: returns the reference of a part's own value, given (type, value, place).

    Raises:
        RowError: there are more or fewer placeholders than images or videos, or `ref_of` raises it.
    """
    parts: list[dict[str, Any]] = []
    for message in messages:
        parts += [part for part in message["content"] if part["type"] != "text"]
    if not parts:
        # A prompt without placeholders shows the images and videos of the row first.
        first = next(message for message in messages if message["role"] == "user")
        parts = [{"type": part_type} for part_type, refs in row_refs.items() for _ in refs]
        first["content"][:0] = parts
    for placeholder, part_type in PLACEHOLDERS.items():
        marks = [part for part in parts if part["type"] == part_type and "value" not in part]
        if len(marks) != len(row_refs[part_type]):
            nouns = f"{_noun(part_type)}s"
            counts = f"{len(marks)} {placeholder} and the row {len(row_refs[part_type])} {nouns}"
            raise RowError(row_id, f"placeholders and {nouns} disagree", f"the prompt has {counts}")
        for part, ref in zip(marks, row_refs[part_type], strict=True):
            part["ref"] = ref
    for i, part in enumerate(parts):
        if "value" in part:
            place = f"{form.prompt_key!r}, {_noun(part['type'])} {i}"
            part["ref"] = ref_of(part["type"], part.pop("value"), place)
        if form.blank_images:
            part["ref"] = blank(part["ref"])
        part[part["type"]] = {"url": part["ref"].url}


def _noun(part_type: str) -> str:
    """Return "image" or "video", for error messages."""
    return part_type.removesuffix("_url")


def _limit_images(messages: list[Message], per_message: int | None, per_sample: int | None) -> int:
    """Remove the images beyond the limits from the messages, in place; the first ones stay. Returns
    the number of removed images."""
    n_in_sample = n_dropped = 0
    for message in messages:
        n_in_message = 0
        for part in _image_parts(message):
            message_is_full = per_message is not None and n_in_message >= per_message
            sample_is_full = per_sample is not None and n_in_sample >= per_sample
            if message_is_full or sample_is_full:
                # By identity: parts of two images may be equal.
                message["content"] = [p for p in message["content"] if p is not part]
                n_dropped += 1
            else:
                n_in_message += 1
                n_in_sample += 1
    return n_dropped


def _put_into(parts: list[dict[str, Any]], variant: str) -> None:
    """Put the text of a variant around that of a message, in place; images at the start stay
    there."""
    text_before, _, text_after = variant.partition("{problem}")
    first = next((part for part in parts if part["type"] == "text"), None)
    if first is None:
        _add_text(parts, text_before)
    else:
        first["text"] = text_before + first["text"]
    _add_text(parts, text_after)


def _env_class(
    name: Any, columns: dict[str, Any], row_id: str, form: RowFormat, root: Path | None
) -> str | None:
    """Return the environment that a row names; None: that of the run. `env_kwargs` in `columns`
    become a mapping, in place.

    Rows of SkyRL name environments of SkyRL: those without an environment of this name here are
    played in that of the run.
    """
    kwargs = columns.pop("env_kwargs", None)
    if isinstance(kwargs, str):
        try:
            kwargs = json.loads(kwargs)
        except ValueError as e:
            reason = f"column 'env_kwargs' holds {_shown(kwargs)}, which is not JSON: {e}"
            raise RowError(row_id, ENVIRONMENT_UNUSABLE, reason) from e
    if isinstance(kwargs, dict | None):
        # A table has the keys of all rows in each: None where the row itself has no such key.
        set_kwargs = {key: value for key, value in (kwargs or {}).items() if value is not None}
        columns |= {"env_kwargs": set_kwargs} if set_kwargs else {}
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
    # Whoever wrote a data set of the hub must not choose code that this machine executes.
    if root is None:
        if columns.get("env_kwargs") or ":" in (name or ""):
            reason = "names code or keywords, but comes from the hub: such a row may name a registered environment only"
            raise RowError(row_id, ENVIRONMENT_UNUSABLE, reason)
    elif name and (root / name.rpartition(":")[0]).is_file():
        name = str(root.absolute() / name)
    return name


# Cached, so that each name is reported once, and not for every row.
@cache
def _warn_of_environment(name: str) -> None:
    log.warning(
        "rows name the environment %r, which is none of ours: they are played in rollout.env_class",
        name,
    )


def _plain(value: Any) -> Any:
    """Return the value without numpy's types, which `datasets` uses for short floats."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    # By its digits: the float32 0.1 becomes 0.1, and not 0.10000000149.
    return float(str(value)) if isinstance(value, np.floating) else value


def _messages(prompt: Any, form: RowFormat) -> tuple[list[Message], tuple[str, ...]]:
    """Return the chat messages of a prompt, and the keys of its messages and parts that nothing
    reads. The parts of ours are texts, images and videos.

    An image is {"type": "image_url"} and a video {"type": "video_url"}, with itself under "value"
    if the part has it; one without is an image or a video of the row.

    Raises:
        ValueError: the prompt is neither a text nor chat messages that end with the user's.
    """
    key = form.prompt_key
    if not key:
        return [{"role": "user", "content": []}], ()
    if isinstance(prompt, str) and prompt.lstrip().startswith("[{"):
        with suppress(ValueError):
            # A text may begin like JSON and be none, or be a list of something else.
            parsed = json.loads(prompt)
            is_chat = all("role" in message or "from" in message for message in parsed)
            prompt = parsed if is_chat else prompt
    if isinstance(prompt, str) and prompt.strip():
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(
            f"column {key!r} holds {_shown(prompt)}: expected a text or a list of chat messages"
        )
    try:
        prompt = openai_messages(prompt)
    except ValueError as e:
        raise ValueError(f"column {key!r}: {e}") from e
    imitates = form.messages_key is not None
    if not imitates and form.answer_key == key:
        # The last answer is the reference (`_answer`).
        prompt = prompt[: -1 if _last_answer(prompt) is not None else None]
    if not prompt:
        raise ValueError(f"column {key!r}: there is no message before the last answer")
    messages: list[Message] = []
    unused_keys: set[str] = set()
    for message in prompt:
        try:
            parsed_message, unused = _message(message, imitates)
        except ValueError as e:
            raise ValueError(f"column {key!r}: {e}") from e
        messages.append(parsed_message)
        unused_keys |= unused
    if imitates and messages[-1]["role"] != "assistant":
        raise ValueError(
            f"column {key!r}: the last message is of role {messages[-1]['role']!r}, not 'assistant'"
        )
    if not imitates and messages[-1]["role"] not in ("user", "tool"):
        raise ValueError(
            f"column {key!r}: the last message is of role {messages[-1]['role']!r}, not 'user'; "
            f"data.answer_key={key} takes the last answer for the reference, and `rlinf-vl sft` "
            "imitates it"
        )
    user_parts = [
        part for message in messages if message["role"] == "user" for part in message["content"]
    ]
    if not any(part["type"] != "text" or part["text"].strip() for part in user_parts):
        raise ValueError(f"column {key!r}: no message of role 'user' says anything")
    return messages, tuple(sorted(unused_keys))


def _message(message: Any, imitates: bool) -> tuple[Message, set[str]]:
    """Return a chat message in our form, and the keys of it and of its parts that nothing reads.

    Raises:
        ValueError: it is no message, or has a part of another kind.
    """
    is_message = isinstance(message, dict) and isinstance(message.get("role"), str)
    fields: dict[str, Any] = {}
    if is_message:
        try:
            fields = message_fields(message)
        except ValueError as e:
            raise ValueError(f"a message of role {message['role']!r} has {e}") from e
    # A message of calls needs no text.
    if fields.keys() & {"tool_calls", "reasoning_content"} and message.get("content") is None:
        message = {**message, "content": ""}
    if not is_message or "content" not in message:
        raise ValueError(f"{_shown(message)} is no chat message with role and content")
    role, content = message["role"], message["content"]
    read_keys = {*_MESSAGE_KEYS, *MESSAGE_FIELDS.get(role, ()), *THOUGHT_KEYS}
    if imitates:
        read_keys.add("weight")
    unused_keys = {name for name in message.keys() - read_keys if is_set(message[name])}
    parts: list[dict[str, Any]] = []
    for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind is not None:
            names = part.keys() - _PART_KEYS
            unused_keys |= {f"content.{name}" for name in names if is_set(part[name])}
        if kind == "text" and isinstance(part.get("text"), str):
            _add_marked_text(parts, part["text"])
        elif kind in _PART_TYPES:
            parts.append(_media_part(part))
        else:
            raise ValueError(f"content part {_shown(part)} is neither text nor an image or a video")
    parsed: Message = {"role": role, "content": parts} | fields
    if imitates and role == "assistant":
        parsed["weight"] = message.get("weight")
    return parsed, unused_keys


def _add_marked_text(parts: list[dict[str, Any]], text: str) -> None:
    """Append a text, with a part of its own for each placeholder in it."""
    end = 0
    for mark in _PLACEHOLDER.finditer(text):
        _add_text(parts, text[end : mark.start()])
        parts.append({"type": PLACEHOLDERS[mark.group()]})
        end = mark.end()
    _add_text(parts, text[end:])


def _media_part(part: dict[str, Any]) -> dict[str, Any]:
    """Return an image or a video part of a message in the form of ours."""
    value = next((part[name] for name in _VALUE_KEYS if part.get(name)), None)
    # OpenAI's form has the URL in a mapping.
    value = value["url"] if isinstance(value, dict) and value.get("url") else value
    if isinstance(value, list) and part.get("fps"):
        value = {"frames": value, "fps": part["fps"]}
    return {"type": _PART_TYPES[part["type"]]} | ({"value": value} if value else {})


def _set_weights(messages: Sequence[Message], column: str) -> None:
    """Set the `weight` of each of the assistant's messages, in place: 1 if it is imitated, else 0.

    Raises:
        ValueError: a weight is neither 0 nor 1, all are 0, or an answer shows an image or a video,
            or says nothing.
    """
    answers = [message for message in messages if message["role"] == "assistant"]
    for number, answer in enumerate(answers, 1):
        named = f"column {column!r}: message {number} of the assistant"
        weight = 1 if answer["weight"] is None else answer["weight"]
        if weight not in (0, 1):
            raise ValueError(f"{named} has the weight {_shown(weight)}: expected 0 or 1")
        if any(part["type"] != "text" for part in answer["content"]):
            raise ValueError(
                f"{named} shows an image or a video, which no model here can answer with"
            )
        has_text = any(part["text"].strip() for part in answer["content"])
        if not has_text and "tool_calls" not in answer:
            raise ValueError(f"{named} says nothing")
        answer["weight"] = int(weight)
    if not any(answer["weight"] for answer in answers):
        raise ValueError(f"column {column!r}: no message is imitated, all weights are 0")


def _add_text(parts: list[dict[str, Any]], text: str) -> None:
    """Append a text, to the last part if that is a text; an empty text is left out."""
    if text and parts and parts[-1]["type"] == "text":
        parts[-1]["text"] += text
    elif text:
        parts.append({"type": "text", "text": text})


def _image_parts(message: Message) -> list[dict[str, Any]]:
    return [part for part in message["content"] if part["type"] == "image_url"]


def _last_answer(prompt: Any) -> str | None:
    """Return the text of the assistant's message at the end of a prompt; None if there is none."""
    if isinstance(prompt, str) and prompt.lstrip().startswith("[{"):
        with suppress(ValueError):
            prompt = json.loads(prompt)
    messages = openai_messages(prompt) if isinstance(prompt, list) and prompt else []
    if (
        not messages
        or not isinstance(messages[-1], dict)
        or messages[-1].get("role") != "assistant"
    ):
        return None
    content = messages[-1].get("content")
    if isinstance(content, list):
        content = "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return content


def _answer(row: dict[str, Any], row_id: str, form: RowFormat) -> str:
    """Return the reference answer of a row as text; "" if it needs none.

    Raises:
        RowError: the answer is missing or unusable.
    """
    key = form.answer_key
    value = at_path(row, key) if key else ""
    if key and key == form.prompt_key and form.messages_key is None:
        value = _last_answer(value)
    reward_spec = row.get(key.partition(".")[0]) if "." in key else None
    if (
        not key
        or isinstance(reward_spec, dict)
        and {reward_spec.get("style"), reward_spec.get("method")} & _JUDGED
    ):
        return "" if value is None else str(value)
    if value is None or isinstance(value, str) and not value.strip():
        raise RowError(row_id, "answer missing", f"column {key!r} is empty")
    text = answer_text(value)
    # A structured answer beside a reward's settings is one for the user's reward function, which
    # parses it.
    if text is None and isinstance(value, (dict, list)) and reward_spec is not None:
        text = json.dumps(_plain(value), ensure_ascii=False)
    # Tables of strings hold a missing value as "nan".
    if text is None or isinstance(value, str) and text.strip().lower() == "nan":
        reason = f"column {key!r} holds {_shown(value)}: expected a text, a finite number, true or false, or a list of these"
        raise RowError(row_id, ANSWER_UNUSABLE, reason)
    return text


def _shown(value: Any) -> str:
    """Return a value as it is shown in messages: its `repr`, shortened."""
    return shorten(repr(value))
