"""Answers that `check-env` and `check-reward` try: hostile, suggested by a text, and random ones."""

import itertools
import json
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlinf_vl.errors import ConfigError
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
#: Episodes per problem that repeat one suggested answer in every turn.
SUGGESTED_EPISODES = 12
#: Calls with every value of an enum that are tried of one tool.
MAX_ENUM_CALLS = 32

#: A policy: from the text of an observation to an answer.
Policy = Callable[[str], str]
#: Share of random tool calls whose arguments have the right types.
TYPED_SHARE = 0.75


def policies_for(
    problem: Problem,
    rng: random.Random,
    scripts: Sequence[Sequence[str]] = (),
    n_suggested: int = SUGGESTED_EPISODES,
) -> list[tuple[str, Policy]]:
    """Return (kind, policy) of each episode to play. A policy is of one episode: it counts turns.

    Args:
        scripts: answers of the user, by turn; each is an episode of its own.
        n_suggested: the number of episodes with an answer that the messages suggest.
    """
    policies: list[tuple[str, Policy]] = [("answers of --answers", _scripted(s)) for s in scripts]
    policies += [(kind, _scripted([answer])) for kind, answer in HOSTILE.items()]
    policies.append(("the reference answer", _scripted([rf"\boxed{{{problem.answer}}}"])))
    for index in range(n_suggested):
        policies.append(("an answer that its messages suggest", _suggested(index)))
    for index in range(n_suggested // 4):
        policies.append(("each value of its tools' enums", _enumerated(index)))
    for _ in range(n_suggested // 2):
        policies.append(("boxed words of its messages", lambda text: random_boxed(text, rng)))
    for _ in range(RANDOM_EPISODES):
        policies.append(("words of its own messages", lambda text: random_answer(text, rng)))
    for _ in range(RANDOM_EPISODES // 2):
        policies.append(("calls of its own tools", lambda text: random_call(text, rng)))
    return policies


def _scripted(answers: Sequence[str]) -> Policy:
    """Return a policy that gives these answers in their order, and repeats the last one."""
    turns = itertools.chain(answers, itertools.repeat(answers[-1]))
    return lambda _: next(turns)


def _suggested(index: int) -> Policy:
    """Return a policy that boxes suggestion number `index` of each observation."""

    def answer(text: str) -> str:
        candidates = suggested_answers(text)
        return rf"\boxed{{{candidates[index % len(candidates)]}}}"

    return answer


def _enumerated(index: int) -> Policy:
    """Return a policy that calls tools with each value of their enums in turn, from `index` on."""
    turns = itertools.count(index)

    def answer(text: str) -> str:
        functions = tool_schemas(text)
        calls = [call for function in functions for call in enum_calls(function)]
        # Without a tool the first turn ends the episode, as a plain answer does.
        return calls[next(turns) % len(calls)] if calls else r"\boxed{go}"

    return answer


def scripts_of(answers: Sequence[str]) -> list[list[str]]:
    """Return the episodes that `--answers` asks for, each a list of answers by turn.

    Of a file, a line is the answer of a turn, and an empty line begins another episode. Texts are
    played in their order as one episode, and each by itself.

    Raises:
        ConfigError: there is no answer in a file.
    """
    scripts: list[list[str]] = []
    texts: list[str] = []
    for answer in answers:
        if not _is_file(answer):
            texts.append(answer)
            continue
        episodes = re.split(r"\n\s*\n", Path(answer).read_text(encoding="utf-8").strip())
        scripts += [episode.splitlines() for episode in episodes if episode]
        if not any(episodes):
            raise ConfigError(f"--answers {answer}: the file has no answer; write one a line")
    if len(texts) > 1:
        scripts.append(texts)
    scripts += [[text] for text in texts]
    return scripts


def _is_file(answer: str) -> bool:
    try:
        return Path(answer).is_file()
    except (OSError, ValueError):  # an answer may be longer than a name, or hold a NUL
        return False


def suggested_answers(text: str) -> list[str]:
    """Return what a text suggests as an answer, the likeliest first; never empty.

    Boxed examples come first, then quoted words, lists such as "left, right or up", letters of
    choices, and at last its other words.
    """
    # Names and types of a tool's schema are no answers.
    for _, start, end in reversed(list(_schema_spans(text))):
        text = text[:start] + text[end:]
    candidates: list[str] = []
    for example in re.findall(r"\\boxed\{([^{}]+)\}", text):
        candidates += re.split(r"\s*(?:[|/,]|\bor\b)\s*", example)
    candidates += re.findall(r"[`\"'“‘]([\w+.-][\w+. -]{0,29})[`\"'”’]", text)
    for listed in re.findall(r"\w+(?:(?:, | ?[/|] ?)\w+)*,? (?:or|and) \w+", text):
        candidates += re.split(r"\W+(?:(?:or|and)\W+)?", listed)
    candidates += re.findall(r"(?m)^\s*\(?([A-J])[.):]", text)
    candidates += re.findall(r"\w+", text)
    return [name for name in dict.fromkeys(candidates) if name.strip()] or ["go"]


def enum_calls(function: Mapping[str, Any]) -> Iterator[str]:
    """Yield calls of a tool with every combination of its parameters' enums.

    A tool without an enum is left to random calls.
    """
    parameters = function.get("parameters") or {}
    properties = parameters.get("properties", {})
    enums = {name: schema["enum"] for name, schema in properties.items() if schema.get("enum")}
    required = parameters.get("required", ())
    typed_names = [name for name in required if name not in enums and name in properties]
    if not enums:
        return
    rng = random.Random(0)
    for values in itertools.islice(itertools.product(*enums.values()), MAX_ENUM_CALLS):
        arguments = dict(zip(enums, values, strict=True))
        arguments |= {name: typed_value(properties[name], rng) for name in typed_names}
        yield _call_text(function["name"], arguments)


def _call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call of a tool as a policy writes it."""
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def random_boxed(text: str, rng: random.Random) -> str:
    """Return one of the likeliest answers of an observation's text, boxed."""
    return rf"\boxed{{{rng.choice(suggested_answers(text)[:SUGGESTED_EPISODES])}}}"


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
    return [function for function, _, _ in _schema_spans(text)]


def _schema_spans(text: str) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Yield each tool's function of a text, with the start and the end of its JSON."""
    for match in re.finditer(r'\{"type": ?"function"', text):
        try:
            schema, end = json.JSONDecoder().raw_decode(text, match.start())
        except ValueError:
            continue
        function = schema.get("function")
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            yield function, match.start(), end


def typed_call(function: Mapping[str, Any], rng: random.Random) -> str:
    """Return a tool call with arguments of the right types, optional ones in half the calls."""
    parameters = function.get("parameters") or {}
    required = parameters.get("required", ())
    arguments = {
        name: typed_value(schema, rng)
        for name, schema in parameters.get("properties", {}).items()
        if name in required or rng.random() < 0.5
    }
    return _call_text(function["name"], arguments)


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
    return _call_text(rng.choice(tools), arguments)
