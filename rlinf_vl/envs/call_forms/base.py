"""The contract of the forms in which policies write calls of tools, and what the forms share."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlinf_vl.envs.base import STRICT_JSON

#: OpenAI's descriptions of functions.
Tools = Sequence[Mapping[str, Any]]
#: Names and arguments of calls, in order.
Calls = Sequence[tuple[str, Mapping[str, Any]]]
#: The types of JSON Schema that a value written without quotes may have, and their Python types.
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}
#: Constants as Python writes them, which some templates show in place of JSON's.
_PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call as the policy wrote it.

    Attributes:
        value: {"name": …, "arguments": {…}}, or another JSON value that was written in its place.
        error: the reason why it can't be read; None if it can.
        start, end: the characters of the text that it takes.
    """

    value: Any
    error: str | None
    start: int = 0
    end: int = 0

    @property
    def named(self) -> tuple[str, dict[str, Any]] | None:
        """The name and the arguments; None if there is no name, or arguments are no object."""
        if not isinstance(self.value, dict) or not isinstance(self.value.get("name"), str):
            return None
        arguments = self.value.get("arguments", {})
        return (self.value["name"], arguments) if isinstance(arguments, dict) else None


class CallForm(ABC):
    """A form of calls: how they are read, written and described.

    Attributes:
        name: the form in messages, such as "JSON in <tool_call>".
        marks: the texts that belong to calls alone, the one that opens a call first.
        description: the sentence that tells a policy how to write a call.
    """

    name: str
    marks: tuple[str, ...]
    description: str

    @abstractmethod
    def read(self, text: str, tools: Tools = ()) -> list[WrittenCall]:
        """Return the calls of a reply in order, broken ones included; no text raises.

        Args:
            tools: those that may be called; their schemas give the types of arguments that the
                form writes without quotes.
        """

    @abstractmethod
    def write(self, calls: Calls) -> str:
        """Return the text of calls."""

    @abstractmethod
    def prefill(self, name: str | None) -> str:
        """Return the text with which a reply must begin to be a call, of the tool `name`."""

    def call_id(self, reply_id: str, number: int, name: str) -> str:
        """Return the id of a reply's call."""
        return f"call_{reply_id[-12:]}_{number}"


def to_json(value: Any) -> str:
    """Return a value as chat templates write JSON."""
    return json.dumps(value, ensure_ascii=False)


def read_json(text: str, begin: int) -> tuple[Any, int, str | None]:
    """Read the JSON value that begins at a character of a text.

    Returns:
        (value, the character behind it, None), or (None, begin, the reason why there is none).
    """
    try:
        value, end = STRICT_JSON.raw_decode(text, begin)
        # raises for half a surrogate pair, which can't be encoded
        to_json(value).encode()
        return value, end, None
    except json.JSONDecodeError as error:
        return None, begin, f"not valid JSON: {error.msg} at character {error.pos - begin}"
    except (ValueError, RecursionError) as error:
        return None, begin, f"not valid JSON: {error}"


def parameters_of(tools: Tools, name: str) -> Mapping[str, Any]:
    """Return the schemas of a tool's parameters by name; {} for a tool that is not known."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            return properties if isinstance(properties, Mapping) else {}
    return {}


def typed_value(text: str, schema: Any) -> Any:
    """Return an argument that was written without quotes, with the type of its schema.

    A text that has none of the schema's types stays a text, so that whoever checks the arguments
    can name it. Without a schema, everything but an object or a list is a text.
    """
    types = set(_types(schema))
    if not types and isinstance(schema, Mapping) and isinstance(schema.get("enum"), list):
        return next((item for item in schema["enum"] if untyped_text(item) == text), text)
    words = text.strip()
    if words in _PYTHON_CONSTANTS:
        value = _PYTHON_CONSTANTS[words]
    else:
        value, end, error = read_json(words, 0)
        if error is not None or end != len(words):
            return text
    allowed = tuple(t for name in types or ("object", "array") for t in _PYTHON_TYPES.get(name, ()))
    if isinstance(value, bool):
        return value if "boolean" in types else text
    if value is None and "string" in types and "null" not in types:
        return text
    # Whole numbers may be written as 3.0.
    if isinstance(value, float) and value.is_integer() and types & {"integer"}:
        return value if "number" in types else int(value)
    return value if isinstance(value, allowed) and not isinstance(value, str) else text


def untyped_text(value: Any) -> str:
    """Return an argument as forms without quotes write it: a text as it is, else JSON."""
    return value if isinstance(value, str) else to_json(value)


def _types(schema: Any) -> Iterator[str]:
    """Yield the types that a schema allows, those of its alternatives included."""
    if not isinstance(schema, Mapping):
        return
    declared = schema.get("type")
    names = declared if isinstance(declared, list) else [declared]
    yield from (name for name in names if isinstance(name, str))
    if schema.get("nullable") is True:
        yield "null"
    for union in ("anyOf", "oneOf"):
        alternatives = schema.get(union)
        for alternative in alternatives if isinstance(alternatives, list) else ():
            yield from _types(alternative)
