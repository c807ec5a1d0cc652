"""A checkpoint's words: random answers with calls and thoughts, through its template and tokenizer."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError

from rlinf_vl.models.family import Family
from rlinf_vl.models.processing import Processor
from rlinf_vl.rollout.episode.observation import Observation
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.rollout.episode.words import PROBE_SCHEMAS, probe_tools
from rlinf_vl.types import Message

#: The number of random conversations.
CONVERSATIONS = 200
_TOOLS = probe_tools("look", "measure_side")
_TEXTS = (
    "AB",
    "12",
    "true",
    "Größe in m²",
    'a "b", c\nd',
    "x < 3 & y",
    "{}",
    "[1]",
    "日本",
    "a: b",
)
_QUESTION: Message = {"role": "user", "content": "What is the area?"}


def word_figures(family: Family, folder: Path) -> tuple[float, ...]:
    """Return how many of `CONVERSATIONS` random answers are read back otherwise than they were
    written, and how many next prompts do not extend their ids.

    Raises:
        LookupError: the template shows no calls.
        ValueError: no known form reads them.
    """
    renderer = Renderer(Processor(folder, family))
    if not renderer.words.shows_calls:
        raise LookupError("the chat template shows no calls of tools")
    form = renderer.words.reply_form.require_calls()
    rng = random.Random(0)
    most_calls = 2 if _is_rendered(renderer, _answer(renderer, rng, 2)) else 1
    n_wrong = n_rewritten = 0
    for _ in range(CONVERSATIONS):
        answer = _answer(renderer, rng, rng.randint(1, most_calls))
        results = _results(answer)
        messages = [_QUESTION, answer, *results]
        ids, [(start, end)], _ = renderer.conversation(messages, [], [1], _TOOLS)
        calls = [call.named for call in form.read(renderer.thoughts(ids[start:end]).reply, _TOOLS)]
        functions = [call["function"] for call in answer["tool_calls"]]
        n_wrong += _text(calls) != _text([(f["name"], f["arguments"]) for f in functions])
        first = Observation((_QUESTION,), (), tuple(_TOOLS))
        turns = [(ids[start:end], Observation(tuple(results), ()))]
        following, _ = renderer.follow(ids[:end], first, turns)
        n_rewritten += not np.array_equal(following[:end], ids[:end])
    return float(n_wrong), float(n_rewritten)


def _is_rendered(renderer: Renderer, answer: Message) -> bool:
    try:
        renderer.conversation([_QUESTION, answer, *_results(answer)], [], [1], _TOOLS)
    except TemplateError:  # some templates refuse two calls at once
        return False
    return True


def _answer(renderer: Renderer, rng: random.Random, n_calls: int) -> Message:
    """Return a random answer with as many calls, and all that the template shows beside them."""
    calls = []
    for number in range(n_calls):
        names = rng.sample(list(PROBE_SCHEMAS), rng.randint(0, len(PROBE_SCHEMAS)))
        arguments = {name: _value(PROBE_SCHEMAS[name]["type"], rng) for name in names}
        function = {"name": rng.choice(_TOOLS)["function"]["name"], "arguments": arguments}
        calls.append({"type": "function", "id": f"call0000{number}", "function": function})
    content = rng.choice(["", "I look."]) if renderer.words.shows_content_beside_calls else ""
    answer: Message = {"role": "assistant", "content": content, "tool_calls": calls}
    if renderer.words.shows_thoughts:
        answer["reasoning_content"] = rng.choice(["Hm.", "First\nthe side."])
    return answer


def _results(answer: Message) -> list[Message]:
    """Return a result for each call of an answer."""
    return [
        {
            "role": "tool",
            "tool_call_id": call["id"],
            "name": call["function"]["name"],
            "content": "12",
        }
        for call in answer["tool_calls"]
    ]


def _value(kind: str, rng: random.Random) -> Any:
    """Return a random value of a JSON type."""
    match kind:
        case "integer":
            return rng.randint(-999, 999)
        case "number":
            return rng.choice([0.5, -3.25, 1e-3])
        case "boolean":
            return rng.random() < 0.5
        case "object":
            return {
                key: rng.choice([1, "x y", True]) for key in rng.sample("abc", rng.randint(0, 3))
            }
        case "array":
            return [rng.choice([1, "x, y", [2]]) for _ in range(rng.randint(0, 3))]
    return rng.choice(_TEXTS)


def _text(calls: Sequence[Any]) -> str:
    """Return calls as a text that differs for 1, True and "1"."""
    return json.dumps(list(map(list, filter(None, calls))), sort_keys=True)
