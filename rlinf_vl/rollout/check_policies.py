"""Answers that `check-env` and `check-reward` try: hostile ones, and random ones that fit a text."""

import json
import math
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

from rlinf_vl.types import Problem

#: Answers that a policy may give, by kind; each is given in every turn of one episode.
HOSTILE = {
    "nothing": "",
    "blanks": " \n\t ",
    "100,000 characters": "word " * 20_000,
    "control tokens": "<|im_end|>\n<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>",
    "JSON that breaks off": '<tool_call>\n{"name": "x", "arguments": {"a": [1, ',
    "JSON of another form": '<tool_call>[1, null, {"name": 3, "arguments": "x"}]</tool_call>',
    "numbers that are none": r"\boxed{NaN} \boxed{1e999} \boxed{} \boxed{",
    "other scripts": "答案是四十二, الجواب ٤٢, ответ",
    "odd characters": "\x00\x1b[2J\u202e\ufffd\u0301",
    "braces and percent signs": "{} {0} {x!r} %s %(x)s ${a} {{",
}
RANDOM_EPISODES = 6  # per problem
#: Share of random tool calls whose arguments have the right types.
TYPED_SHARE = 0.75


def policies_for(problem: Problem, rng: random.Random) -> list[tuple[str, Callable[[str], str]]]:
    """Return (kind, function from an observation's text to an answer) of each episode to play."""
    policies: list[tuple[str, Callable[[str], str]]] = [
        (kind, lambda _, answer=answer: answer) for kind, answer in HOSTILE.items()
    ]
    reference = rf"\boxed{{{problem.answer}}}"
    policies.append(("the reference answer", lambda _: reference))
    for _ in range(RANDOM_EPISODES):
        policies.append(("words of its own messages", lambda text: random_answer(text, rng)))
    for _ in range(RANDOM_EPISODES // 2):
        policies.append(("calls of its own tools", lambda text: random_call(text, rng)))
    return policies


def random_answer(text: str, rng: random.Random) -> str:
    """Return a few words of an observation's text, perhaps boxed, or a tool call, or a number.

    Sooner or later these are the name of an action or a tool.
    """
    words = re.findall(r"\w+", text) or ["go"]
    word, number = rng.choice(words), rng.randint(-9, 99)
    several = " ".join(rng.choices(words, k=rng.randint(1, 8)))
    return rng.choice([word, rf"\boxed{{{word}}}", several, random_call(text, rng), str(number)])


def tool_schemas(text: str) -> list[dict[str, Any]]:
    """Return the functions whose JSON schemas a text contains: name, description, parameters."""
    functions: list[dict[str, Any]] = []
    for start in re.finditer(r'\{"type": ?"function"', text):
        try:
            schema, _ = json.JSONDecoder().raw_decode(text, start.start())
        except ValueError:
            continue
        function = schema.get("function")
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            functions.append(function)
    return functions


def typed_call(function: Mapping[str, Any], rng: random.Random) -> str:
    """Return a tool call with arguments of the right types, optional ones in half the calls."""
    parameters = function.get("parameters") or {}
    required = parameters.get("required", ())
    arguments = {
        name: typed_value(schema, rng)
        for name, schema in parameters.get("properties", {}).items()
        if name in required or rng.random() < 0.5
    }
    return f"<tool_call>\n{json.dumps({'name': function['name'], 'arguments': arguments})}\n</tool_call>"


def typed_value(schema: Mapping[str, Any], rng: random.Random) -> Any:
    """Return a random value of a JSON schema's type.

    Numbers in a list are sorted, as the corners of a box must be.
    """
    if schema.get("enum"):
        return rng.choice(schema["enum"])
    choices = schema.get("anyOf") or schema.get("oneOf")
    if choices:
        return typed_value(rng.choice(choices), rng)
    kind = schema.get("type", "string")
    kind = rng.choice(kind) if isinstance(kind, list) else kind
    low, high = schema.get("minimum", 0), schema.get("maximum", rng.choice([1, 10, 100]))
    match kind:
        case "integer":
            return rng.randint(math.ceil(low), max(math.ceil(low), math.floor(high)))
        case "number":
            return round(rng.uniform(low, max(low, high)), 3)
        case "boolean":
            return rng.random() < 0.5
        case "null":
            return None
        case "array":
            length = rng.choice([1, 2, 4, 4])
            length = min(max(length, schema.get("minItems", 0)), schema.get("maxItems", length))
            if isinstance(items := schema.get("prefixItems"), list):
                return [typed_value(item, rng) for item in items]
            item_schema = schema.get("items") or {"type": "integer"}
            values = [typed_value(item_schema, rng) for _ in range(length)]
            is_numeric = item_schema.get("type") in ("integer", "number")
            return sorted(values) if is_numeric else values
        case "object":
            properties = schema.get("properties", {})
            return {name: typed_value(inner, rng) for name, inner in properties.items()}
    return rng.choice(["x", "1 + 2", "left", "0", "the picture"])


def random_call(text: str, rng: random.Random) -> str:
    """Return a call of a tool whose JSON schema is in an observation's text.

    Mostly the arguments have the right types; otherwise names and arguments are random.
    """
    functions = tool_schemas(text)
    if functions and rng.random() < TYPED_SHARE:
        return typed_call(rng.choice(functions), rng)
    words = re.findall(r"\w+", text) or ["go"]
    tools = re.findall(r'"name": ?"(\w+)"', text) or words
    keys = re.findall(r'"(\w+)": ?{"type"', text) or words
    arguments: dict[str, Any] = {}
    for key in rng.sample(keys, min(len(keys), rng.randint(0, 4))):
        arguments[key] = rng.choice(
            [rng.randint(-9, 99), rng.random(), rng.choice(words), [1, 2], None]
        )
    return f"<tool_call>\n{json.dumps({'name': rng.choice(tools), 'arguments': arguments})}\n</tool_call>"
