"""Calls of Gemma 4: a name and a mapping whose texts stand between marks.

<|tool_call>call:add{a:3,unit:<|"|>cm<|"|>}<tool_call|>
"""

import re
from collections.abc import Mapping
from typing import Any

from rlinf_vl.envs.call_forms.base import CallForm, Calls, Tools, WrittenCall, read_json, to_json

_QUOTE = '<|"|>'


class BracedCalls(CallForm):
    """Calls as call:name{key:value} in <|tool_call>."""

    name = "call:name{key:value} in <|tool_call>"
    marks = ("<|tool_call>", "<tool_call|>", _QUOTE)
    description = """\
Write each function call as its name and its arguments, texts between <|"|>:
<|tool_call>call:<function-name>{<key>:<value>,<key>:<|"|><text><|"|>}<tool_call|>"""
    _HEAD = re.compile(r"\s*call:([^\s{}]+)\{")
    _END = re.compile(r"\s*<tool_call\|>")

    def read(self, text: str, tools: Tools = ()) -> list[WrittenCall]:
        """Return the calls of a reply in order, broken ones included."""
        calls: list[WrittenCall] = []
        start = text.find(self.marks[0])
        while start >= 0:
            begin = end = start + len(self.marks[0])
            value, error = None, None
            try:
                head = self._HEAD.match(text, begin)
                if head is None:
                    raise ValueError("<|tool_call> is not followed by call:NAME{")
                arguments, end = _mapping(text, head.end())
                close = self._END.match(text, end)
                if close is None:
                    raise ValueError("<|tool_call> is not closed by <tool_call|>")
                value, end = {"name": head[1], "arguments": arguments}, close.end()
            except (ValueError, RecursionError) as reason:
                error = str(reason)
            following = text.find(self.marks[0], end)
            if error is not None:
                end = following if following >= 0 else len(text)
            calls.append(WrittenCall(value, error, start, end))
            start = following
        return calls

    def write(self, calls: Calls) -> str:
        return "".join(
            f"<|tool_call>call:{name}{_written(arguments)}<tool_call|>" for name, arguments in calls
        )

    def prefill(self, name: str | None) -> str:
        return f"<|tool_call>call:{name}{{" if name else "<|tool_call>call:"


def _mapping(text: str, position: int) -> tuple[dict[str, Any], int]:
    """Read a mapping behind its brace; return it and its end. Raises ValueError: it is none."""
    mapping: dict[str, Any] = {}
    while not text.startswith("}", position):
        if text.startswith(_QUOTE, position):
            key, position = _quoted(text, position)
            if not text.startswith(":", position):
                raise ValueError(f"the key {key!r} has no value")
            position += 1
        else:
            key, colon, _ = text[position:].partition(":")
            if not colon or re.search(r"[{}\[\],]", key):
                raise ValueError(f"{text[position : position + 20]!r} is no key with a value")
            position += len(key) + 1
        value, position = _value(text, position)
        mapping[key.strip()] = value
        position = _behind_comma(text, position, "}")
    return mapping, position + 1


def _value(text: str, position: int) -> tuple[Any, int]:
    """Read a value; return it and its end. Raises ValueError: it is none."""
    if text.startswith(_QUOTE, position):
        return _quoted(text, position)
    if text.startswith("{", position):
        return _mapping(text, position + 1)
    if text.startswith("[", position):
        items, position = [], position + 1
        while not text.startswith("]", position):
            item, position = _value(text, position)
            items.append(item)
            position = _behind_comma(text, position, "]")
        return items, position + 1
    # Gemma's template writes None as Python does.
    if text.startswith("None", position):
        return None, position + 4
    value, end, error = read_json(text, position)
    if error is not None:
        raise ValueError(f"{text[position : position + 20]!r} is no value: {error}")
    return value, end


def _quoted(text: str, position: int) -> tuple[str, int]:
    """Read a text between marks; return it and its end. Raises ValueError: it has no end."""
    begin = position + len(_QUOTE)
    end = text.find(_QUOTE, begin)
    if end < 0:
        raise ValueError(f"a text is not closed by {_QUOTE}")
    return text[begin:end], end + len(_QUOTE)


def _behind_comma(text: str, position: int, close: str) -> int:
    """Return where the next item begins, or the closing bracket. Raises ValueError: neither."""
    if text.startswith(",", position):
        return position + 1
    if text.startswith(close, position):
        return position
    raise ValueError(f"{text[position : position + 20]!r} follows no comma")


def _written(value: Any) -> str:
    """Return a value as the template writes it, keys in their order of the alphabet."""
    if isinstance(value, str):
        return f"{_QUOTE}{value}{_QUOTE}"
    if isinstance(value, Mapping):
        items = sorted(value.items())
        return "{" + ",".join(f"{key}:{_written(item)}" for key, item in items) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_written, value)) + "]"
    return "None" if value is None else to_json(value)
