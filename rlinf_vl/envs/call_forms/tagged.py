"""Calls between <tool_call> and </tool_call>: as JSON, with parameters as tags, or as pairs of tags.

    <tool_call>                       <tool_call>             <tool_call>add
    {"name": "add",                   <function=add>          <arg_key>a</arg_key>
     "arguments": {"a": 3}}           <parameter=a>           <arg_value>3</arg_value>
    </tool_call>                      3                       </tool_call>
                                      </parameter>
                                      </function>
                                      </tool_call>

Hermes, Qwen2.5 and Qwen3 write the first, Qwen3-Coder, Qwen3.5 and Nemotron 3 the second, GLM-4.5
and later the third.
"""

import re
from abc import abstractmethod
from typing import Any

from rlinf_vl.envs.call_forms.base import (
    CallForm,
    Calls,
    Tools,
    WrittenCall,
    parameters_of,
    read_json,
    to_json,
    typed_value,
    untyped_text,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_SPACE, _TAG = re.compile(r"\s*"), re.compile(f"{OPEN}|{CLOSE}")
_UNCLOSED = f"{OPEN} is not closed by {CLOSE}"


class JsonCalls(CallForm):
    """Calls as JSON in <tool_call>."""

    name = "JSON in <tool_call>"
    marks = (OPEN, CLOSE)
    description = """\
For each function call, return a json object with function name and arguments within <tool_call></tool_call>:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""

    def read(self, text: str, tools: Tools = ()) -> list[WrittenCall]:
        """Return the calls of a reply in order, broken ones included."""
        calls: list[WrittenCall] = []
        position = text.find(OPEN)
        while position >= 0:
            begin = _SPACE.match(text, position + len(OPEN)).end()  # pyright: ignore[reportOptionalMemberAccess]
            value, end, error = read_json(text, begin)
            tag = _TAG.search(text, end)
            if tag is None or tag[0] == OPEN:
                error = _UNCLOSED
            elif error is None and text[end : tag.start()].strip():
                error = (
                    f"not valid JSON: there is more behind the object, at character {end - begin}"
                )
            call_end, following = _ends(text, tag)
            calls.append(WrittenCall(None if error else value, error, position, call_end))
            position = text.find(OPEN, following)
        return calls

    def write(self, calls: Calls) -> str:
        return "\n".join(
            f'{OPEN}\n{{"name": {to_json(name)}, "arguments": {to_json(arguments)}}}\n{CLOSE}'
            for name, arguments in calls
        )

    def prefill(self, name: str | None) -> str:
        return f"{OPEN}\n" + (f'{{"name": {to_json(name)}, "arguments": ' if name else "")


class _InnerTags(CallForm):
    """A base class for forms whose calls hold tags of their own."""

    def read(self, text: str, tools: Tools = ()) -> list[WrittenCall]:
        """Return the calls of a reply in order, broken ones included."""
        calls: list[WrittenCall] = []
        start = text.find(OPEN)
        while start >= 0:
            value, end, error = self._read_call(text, start + len(OPEN), tools)
            following = end
            if error is not None:
                end, following = _ends(text, _TAG.search(text, start + len(OPEN)))
            calls.append(WrittenCall(value, error, start, end))
            start = text.find(OPEN, following)
        return calls

    @abstractmethod
    def _read_call(
        self, text: str, begin: int, tools: Tools
    ) -> tuple[dict[str, Any] | None, int, str | None]:
        """Read the call behind an opening tag; return (value, its end, the reason for none)."""


class ParameterCalls(_InnerTags):
    """Calls with an XML tag for each parameter in <tool_call>."""

    name = "<function=…><parameter=…> in <tool_call>"
    marks = (OPEN, CLOSE, "<function=", "</function>", "<parameter=", "</parameter>")
    description = """\
For each function call, write its name and its parameters within <tool_call></tool_call>:
<tool_call>
<function=<function-name>>
<parameter=<parameter-name>>
<value>
</parameter>
</function>
</tool_call>"""
    _FUNCTION = re.compile(r"\s*<function=([^\s<>]+)>")
    #: A value ends at the first end tag that another tag of the call follows, because values may
    #: be texts about such tags; one line break on each side belongs to the form.
    _PARAMETER = re.compile(
        r"\s*<parameter=([^\s<>]+)>\n?(.*?)\n?</parameter>"
        r"(?=\s*(?:<parameter=|</function>))",
        re.DOTALL,
    )
    _END = re.compile(rf"\s*</function>\s*{CLOSE}")

    def _read_call(
        self, text: str, begin: int, tools: Tools
    ) -> tuple[dict[str, Any] | None, int, str | None]:
        function = self._FUNCTION.match(text, begin)
        if function is None:
            return None, begin, f"{OPEN} is not followed by <function=NAME>"
        schemas = parameters_of(tools, function[1])
        arguments: dict[str, Any] = {}
        position = function.end()
        while (parameter := self._PARAMETER.match(text, position)) is not None:
            key, value_text = parameter.groups()
            if key in arguments:
                return None, begin, f"parameter {key!r} is written twice"
            arguments[key] = typed_value(value_text, schemas.get(key))
            position = parameter.end()
        end = self._END.match(text, position)
        if end is None:
            excerpt = text[position : position + 20]
            return None, begin, f"{excerpt!r} is no <parameter=NAME> and no </function>{CLOSE}"
        return {"name": function[1], "arguments": arguments}, end.end(), None

    def write(self, calls: Calls) -> str:
        return "\n".join(
            f"{OPEN}\n<function={name}>\n"
            + "".join(
                f"<parameter={key}>\n{untyped_text(value)}\n</parameter>\n"
                for key, value in arguments.items()
            )
            + f"</function>\n{CLOSE}"
            for name, arguments in calls
        )

    def prefill(self, name: str | None) -> str:
        return f"{OPEN}\n<function={name}>\n" if name else f"{OPEN}\n<function="


class PairCalls(_InnerTags):
    """Calls with a pair of tags for each argument in <tool_call>."""

    marks = (OPEN, CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    _NAME = re.compile(r"\s*([^\s<>]+)")
    _PAIR = re.compile(
        r"\s*<arg_key>([^<>]*)</arg_key>\s*<arg_value>(.*?)</arg_value>"
        rf"(?=\s*(?:<arg_key>|{CLOSE}))",
        re.DOTALL,
    )
    _END = re.compile(rf"\s*{CLOSE}")

    def __init__(self, separator: str) -> None:
        """`separator`: between the tags: a line break in GLM-4.5 and 4.6, nothing since 4.7."""
        self._separator = separator
        self.name = "<arg_key><arg_value> in <tool_call>" + ("" if separator else ", in one line")
        example = self.write([("<function-name>", {"<key>": "<value>"})])
        self.description = (
            "For each function call, write its name and a pair of tags for each argument within "
            f"<tool_call></tool_call>:\n{example}"
        )

    def _read_call(
        self, text: str, begin: int, tools: Tools
    ) -> tuple[dict[str, Any] | None, int, str | None]:
        name = self._NAME.match(text, begin)
        if name is None:
            return None, begin, f"{OPEN} is not followed by a function's name"
        schemas = parameters_of(tools, name[1])
        arguments: dict[str, Any] = {}
        position = name.end()
        while (pair := self._PAIR.match(text, position)) is not None:
            key, value_text = pair[1].strip(), pair[2]
            if key in arguments:
                return None, begin, f"argument {key!r} is written twice"
            arguments[key] = typed_value(value_text, schemas.get(key))
            position = pair.end()
        end = self._END.match(text, position)
        if end is None:
            excerpt = text[position : position + 20]
            return None, begin, f"{excerpt!r} is no <arg_key>…<arg_value> and no {CLOSE}"
        return {"name": name[1], "arguments": arguments}, end.end(), None

    def write(self, calls: Calls) -> str:
        texts = []
        for name, arguments in calls:
            pieces = [f"{OPEN}{name}"]
            for key, value in arguments.items():
                pieces += [f"<arg_key>{key}</arg_key>"]
                pieces += [f"<arg_value>{untyped_text(value)}</arg_value>"]
            texts.append(self._separator.join([*pieces, CLOSE]))
        return self._separator.join(texts)

    def prefill(self, name: str | None) -> str:
        return f"{OPEN}{name}{self._separator}" if name else OPEN


def _ends(text: str, tag: re.Match[str] | None) -> tuple[int, int]:
    """Return the end of a call and where the next one may begin, given the tag behind its content.

    A call that is not closed ends where the next one opens.
    """
    if tag is None:
        return len(text), len(text)
    return (tag.end() if tag[0] == CLOSE else tag.start()), tag.start()
