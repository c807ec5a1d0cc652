"""Calls of tools, thoughts and tools in rows, in the form of OpenAI's messages."""

import json
from collections.abc import Mapping
from typing import Any

from rlinf_vl.data.unusable import shorten
from rlinf_vl.types import Message

#: The fields of a message beside role and content that chat templates get, by its role.
MESSAGE_FIELDS = {
    "assistant": ("tool_calls", "reasoning_content"),
    "tool": ("tool_call_id", "name"),
}
#: Names under which other systems keep thoughts.
THOUGHT_KEYS = ("reasoning", "thinking")


def is_set(value: Any) -> bool:
    """Return whether a value is neither missing nor empty; tables fill in the keys of other rows."""
    return value is not None and not (isinstance(value, (str, list, dict)) and not value)


def message_fields(message: Message) -> dict[str, Any]:
    """Return those `MESSAGE_FIELDS` of a row's message that are set, in the form of chat templates.

    Arguments of calls are mappings there; as JSON text in the row, they keep their null values.

    Raises:
        ValueError: a field is malformed; its message goes on "a message has …".
    """
    fields: dict[str, Any] = {}
    if is_set(message.get("function_call")):
        raise ValueError("'function_call', which is not supported; write it as 'tool_calls'")
    result_keys = MESSAGE_FIELDS["tool"] if message["role"] == "tool" else ()
    for name in (*result_keys, "reasoning_content", *THOUGHT_KEYS):
        value = message.get(name)
        if not is_set(value):
            continue
        if not isinstance(value, str):
            raise ValueError(f"{name!r}: {shorten(repr(value))} is no text")
        key = "reasoning_content" if name in THOUGHT_KEYS else name
        if fields.setdefault(key, value) != value:
            raise ValueError(f"{name!r} beside other thoughts; leave one of them out")
    for name in ("tool_calls", "reasoning_content"):
        if message["role"] != "assistant" and (name in fields or is_set(message.get(name))):
            raise ValueError(f"{name!r}, which only the assistant's may have")
    calls = message.get("tool_calls")
    if not is_set(calls):
        return fields
    if isinstance(calls, str):
        calls = parsed(calls, "tool_calls")
    if not isinstance(calls, list):
        raise ValueError(f"'tool_calls': {shorten(repr(calls))} is no list")
    return {"tool_calls": [_call(call) for call in calls], **fields}


def row_tools(value: Any, required: bool) -> tuple[dict[str, Any], ...]:
    """Return the tools of a row's column `tools`: OpenAI's descriptions, or their functions alone.

    Args:
        value: a list of them, or of JSON texts, or one JSON text; None without the column.
        required: whether anything else is refused; if not, it is a column like any other.

    Raises:
        ValueError: a description is malformed.
    """
    if not is_set(value):
        return ()
    tools = value
    if isinstance(value, str):
        if not required and not value.lstrip().startswith("["):
            return ()
        tools = parsed(value, "tools", "column ")
    if isinstance(tools, list) and all(isinstance(tool, str) for tool in tools):
        if not required and not all(tool.lstrip().startswith("{") for tool in tools):
            return ()
        tools = [parsed(tool, "tools", "column ") for tool in tools]
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        if not required:
            return ()
        raise ValueError(f"column 'tools' holds {shorten(repr(value))}: expected a list of tools")
    return tuple(map(_tool, tools))


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a tool. Raises ValueError: it is malformed."""
    function = tool["function"] if is_set(tool.get("function")) else tool
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"column 'tools': {shorten(repr(tool))} has no function with a name")
    return {"type": "function", "function": _without_none(function)}


def _call(call: Any) -> dict[str, Any]:
    """Return a call. Raises ValueError: it is malformed."""
    function = call
    if isinstance(call, Mapping) and is_set(call.get("function")):
        function = call["function"]
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"'tool_calls': {shorten(repr(call))} has no function with a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments:
        arguments = parsed(arguments, "tool_calls")
    elif arguments is not None:
        # A table has the arguments of all rows in each: None where the row has no such argument.
        arguments = _without_none(arguments)
    if not isinstance(arguments or {}, dict):
        raise ValueError(f"'tool_calls': the arguments {shorten(repr(arguments))} are no mapping")
    call_id = call.get("id")
    return {
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments or {}},
    } | ({"id": str(call_id)} if is_set(call_id) else {})


def parsed(text: str, name: str, prefix: str = "") -> Any:
    """Return the value of a JSON text. Raises ValueError: it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{prefix}{name!r}: {shorten(repr(text))} is no JSON: {error}") from None


def _without_none(value: Any) -> Any:
    """Return a value without the keys whose value is None, which tables fill in."""
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value
