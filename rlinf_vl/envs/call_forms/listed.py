"""Calls behind one mark, or as the whole reply: Mistral's, Llama's and Python's.

[TOOL_CALLS] [{"name": "add", "arguments": {"a": 3}}]     Mistral, Pixtral
[TOOL_CALLS]add[ARGS]{"a": 3}                             Mistral since Small 3.2, Magistral
{"name": "add", "parameters": {"a": 3}}                   Llama 3.1 to 4
<|tool_call_start|>[add(a=3)]<|tool_call_end|>            LFM2; Llama 4 and Gemma 3 unmarked
"""

import ast
import re
from typing import Any

from rlinf_vl.envs.call_forms.base import (
    CallForm,
    Calls,
    Tools,
    WrittenCall,
    read_json,
    to_json,
)

_SPACE = re.compile(r"\s*")


class _Bracketed(CallForm):
    """A base class for Mistral's forms: its templates refuse ids but of nine letters or digits."""

    def call_id(self, reply_id: str, number: int, name: str) -> str:
        """Return an id of nine letters and digits."""
        return f"{reply_id[-8:]}{number % 10}"


class BracketCalls(_Bracketed):
    """Calls as a JSON list behind [TOOL_CALLS]."""

    name = "a JSON list behind [TOOL_CALLS]"
    marks = ("[TOOL_CALLS]",)
    description = """\
Write function calls as a JSON list of objects with name and arguments behind [TOOL_CALLS]:
[TOOL_CALLS] [{"name": <function-name>, "arguments": <args-json-object>}]"""

    def read(self, text: str, tools: Tools = ()) -> list[WrittenCall]:
        """Return the calls of a reply in order, broken ones included."""
        calls: list[WrittenCall] = []
        start = text.find(self.marks[0])
        while start >= 0:
            begin = _end_of_space(text, start + len(self.marks[0]))
            value, end, error = read_json(text, begin)
            following = text.find(self.marks[0], end)
            values = value if isinstance(value, list) else [value]
            if error is None and not values:
                error = "the list of calls is empty"
            if error is not None:
                end = following if following >= 0 else len(text)
                values = [None]
            # Templates show the id of a call beside its name.
            calls += [
                WrittenCall(_without_id(item) if error is None else None, error, start, end)
                for item in values
            ]
            start = following
        return calls

    def write(self, calls: Calls) -> str:
        objects = [{"name": name, "arguments": arguments} for name, arguments in calls]
        return f"{self.marks[0]} {to_json(objects)}"

    def prefill(self, name: str | None) -> str:
        head = f"{self.marks[0]} ["
        return f'{head}{{"name": {to_json(name)}, "arguments": ' if name else head


class ArgumentCalls(_Bracketed):
    """Calls as [TOOL_CALLS], name, [ARGS] and JSON arguments."""

    name = "[TOOL_CALLS]name[ARGS]JSON"
    marks = ("[TOOL_CALLS]", "[ARGS]")
    description = """\
Write each function call as its name and its arguments, a JSON object, behind these marks:
[TOOL_CALLS]<function-name>[ARGS]<args-json-object>"""
    _HEAD = re.compile(r"\s*([^\s\[\]]+)(?:\[CALL_ID\][^\[\]]*)?\[ARGS\]\s*")

    def read(self, text: str, tools: Tools = ()) -> list[WrittenCall]:
        """Return the calls of a reply in order, broken ones included."""
        calls: list[WrittenCall] = []
        start = text.find(self.marks[0])
        while start >= 0:
            head = self._HEAD.match(text, start + len(self.marks[0]))
            value, error = None, "[TOOL_CALLS] is not followed by NAME[ARGS]"
            end = start + len(self.marks[0])
            if head is not None:
                arguments, end, error = read_json(text, head.end())
                value = {"name": head[1], "arguments": arguments}
            following = text.find(self.marks[0], end)
            if error is not None:
                value, end = None, following if following >= 0 else len(text)
            calls.append(WrittenCall(value, error, start, end))
            start = following
        return calls

    def write(self, calls: Calls) -> str:
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{to_json(arguments)}" for name, arguments in calls)

    def prefill(self, name: str | None) -> str:
        return f"[TOOL_CALLS]{name}[ARGS]" if name else "[TOOL_CALLS]"


class BareJsonCalls(CallForm):
    """Calls as JSON objects that are the whole reply."""

    name = 'a reply that is JSON, {"name": …, "parameters": …}'
    marks = ("<|python_tag|>",)
    description = """\
To call a function, reply with nothing but a JSON object:
{"name": <function-name>, "parameters": <args-json-object>}"""
    _OBJECT = re.compile(r"\s*(?:<\|python_tag\|>)?\s*(?=\{\s*\"name\"\s*:)")
    _SEPARATOR = re.compile(r"\s*;?\s*")

    def read(self, text: str, tools: Tools = ()) -> list[WrittenCall]:
        """Return the calls of a reply in order, broken ones included."""
        calls: list[WrittenCall] = []
        position = 0
        while (begin := self._OBJECT.match(text, position)) is not None:
            value, end, error = read_json(text, begin.end())
            if isinstance(value, dict) and "parameters" in value:
                value = {"name": value["name"], "arguments": value["parameters"]} | {
                    key: item for key, item in value.items() if key not in ("name", "parameters")
                }
            if error is not None:
                return [*calls, WrittenCall(None, error, position, len(text))]
            calls.append(WrittenCall(value, None, position, end))
            position = _end_of(self._SEPARATOR, text, end)
        if calls and position < len(text):
            calls[-1] = WrittenCall(
                None, "there is more behind the JSON object", calls[-1].start, len(text)
            )
        return calls

    def write(self, calls: Calls) -> str:
        return "; ".join(
            f'{{"name": {to_json(name)}, "parameters": {to_json(arguments)}}}'
            for name, arguments in calls
        )

    def prefill(self, name: str | None) -> str:
        return f'{{"name": {to_json(name)}, "parameters": ' if name else '{"name": '


class PythonCalls(CallForm):
    """Calls as a list of Python calls with keyword arguments."""

    def __init__(self, open_mark: str = "", close_mark: str = "") -> None:
        """`open_mark`, `close_mark`: around the list; "" if the list is the whole reply."""
        self._open, self._close = open_mark, close_mark
        self.name = "a list of Python calls" + (f" in {open_mark}" if open_mark else "")
        self.marks = tuple(mark for mark in (open_mark, close_mark) if mark)
        example = f"{open_mark}[function_name(argument=value)]{close_mark}"
        self.description = (
            f"Write function calls as a list of Python calls with keyword arguments:\n{example}"
        )

    def read(self, text: str, tools: Tools = ()) -> list[WrittenCall]:
        """Return the calls of a reply in order, broken ones included."""
        if not self._open:
            # Any text may begin with a bracket: a call's name must follow.
            is_list = re.match(r"\s*\[\s*[A-Za-z_][\w.]*\s*\(", text) is not None
            return _python_calls(text, 0, len(text)) if is_list else []
        calls: list[WrittenCall] = []
        start = text.find(self._open)
        while start >= 0:
            begin = start + len(self._open)
            end = text.find(self._close, begin)
            following = text.find(self._open, begin)
            if end < 0 or 0 <= following < end:
                error = f"{self._open} is not closed by {self._close}"
                end = following if following >= 0 else len(text)
                calls.append(WrittenCall(None, error, start, end))
            else:
                calls += _python_calls(text[begin:end], start, end + len(self._close))
            start = following
        return calls

    def write(self, calls: Calls) -> str:
        texts = []
        for name, arguments in calls:
            keywords = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
            texts.append(f"{name}({keywords})")
        return f"{self._open}[{', '.join(texts)}]{self._close}"

    def prefill(self, name: str | None) -> str:
        return f"{self._open}[" + (f"{name}(" if name else "")


def _python_calls(source: str, start: int, end: int) -> list[WrittenCall]:
    """Return the calls of a Python list, which takes these characters of the text."""
    try:
        tree = ast.parse(source.strip(), mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            raise ValueError("it is no list of calls")
        return [WrittenCall(_python_call(node), None, start, end) for node in tree.elts]
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else error
        return [WrittenCall(None, f"not a list of Python calls: {reason}", start, end)]


def _python_call(node: ast.expr) -> dict[str, Any]:
    """Return the value of a call. Raises ValueError: it is none, or has other than keywords."""
    if not isinstance(node, ast.Call):
        raise ValueError(f"{ast.unparse(node)} is no call")
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError(f"{ast.unparse(node.func)} has an argument without a name")
    arguments = {str(k.arg): _python_value(k.value) for k in node.keywords}
    return {"name": ast.unparse(node.func), "arguments": arguments}


def _python_value(node: ast.expr) -> Any:
    """Return the value of a literal, JSON's constants and containers included."""
    constants = {"true": True, "false": False, "null": None}
    if isinstance(node, ast.Name) and node.id in constants:
        return constants[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_python_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _python_value(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("an object has a key that is no text")
        return dict(zip(keys, map(_python_value, node.values), strict=True))
    value = ast.literal_eval(node)
    to_json(value).encode()  # raises for half a surrogate pair
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError(f"{ast.unparse(node)} is no JSON value")
    if isinstance(value, float) and value - value != 0:
        raise ValueError(f"{ast.unparse(node)} is too large a number")
    return value


def _without_id(value: Any) -> Any:
    return {key: v for key, v in value.items() if key != "id"} if isinstance(value, dict) else value


def _end_of_space(text: str, begin: int) -> int:
    return _end_of(_SPACE, text, begin)


def _end_of(pattern: re.Pattern[str], text: str, begin: int) -> int:
    """Return the end of what a pattern, which also matches nothing, matches there."""
    match = pattern.match(text, begin)
    return begin if match is None else match.end()
