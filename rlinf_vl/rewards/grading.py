"""Grade one response outside of a run: in a script, a notebook or a test."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlinf_vl.code import is_code
from rlinf_vl.data.answers import answer_text
from rlinf_vl.data.images import to_image_ref
from rlinf_vl.rewards.forms import RewardFunction
from rlinf_vl.rewards.grading_pool import GradingError
from rlinf_vl.rewards.named import NAMED, named_function
from rlinf_vl.rewards.processes import load_function
from rlinf_vl.rewards.result import Answer
from rlinf_vl.types import ImageRef, Problem

#: Names in `row` that are facts of the response instead of columns.
_OF_RESPONSE = ("response_tokens", "response_ids", "truncated")


def grade(name: str, /, response: str, answer: Any, **row: Any) -> float:
    """Return what a reward function pays for a response: its score, without weight, and before reward_min_val and reward_max_val.

    `grade("choice", "so (B)", "B", options=["red", "blue"])` is 1.0. A function of `module:name` or `path/to/file.py:name` runs
    in this process, without the limits of a run.

    Args:
        name: as in `reward.functions`.
        response: the whole response, thoughts included.
        answer: the reference, of any type that a row may have.
        row: the row's other columns, and keywords of the function (`kwargs` of its entry). `prompt` is the question as
            text or messages, `images` a list of PIL images, bytes or paths within the working folder; functions that pay
            for length want `response_tokens` or `response_ids`.

    Returns:
        The score; 0.0 where a named function comes to no verdict, as in a run, and where the score is None.

    Raises:
        CodeError: there is no such function, or it can't be called so.
        ValueError: the answer is none that a row may have, or `response_tokens` is missing.
        Exception: what a function of one's own raises, and what `judge` does where its model can't be asked.
    """
    reference = answer_text(answer)
    if reference is None:
        raise ValueError(f"answer: {answer!r:.80} is no text, finite number, boolean or list of these")
    function, keywords = _function(name, row)
    columns = {key: value for key, value in row.items() if key not in (*keywords, *_OF_RESPONSE, "prompt", "images")}
    ids = _response_ids(function, row)
    said = response.rpartition("</think>")[2]
    problem = _problem(row.get("prompt", ""), reference, row.get("images") or (), columns)
    (result,) = function.results(problem, [Answer(response, said, ids, bool(row.get("truncated")))], 60.0)
    if isinstance(result, GradingError):
        return 0.0
    if isinstance(result, Exception):
        raise result
    return 0.0 if result.value is None else float(result.value)


def _function(name: str, row: dict[str, Any]) -> tuple[RewardFunction, dict[str, Any]]:
    """Return the function, and the entries of `row` that are its keywords."""
    if is_code(name):
        return load_function(name, {}, {}), {}
    named = NAMED.get(name)
    if named is None:
        return named_function(name, {})[0], {}
    offered = {"images"} if not isinstance(named.function, type) else set()
    parameters = inspect.signature(named.function).parameters
    keywords = {
        key: row[key]
        for key, parameter in parameters.items()
        if key in row and parameter.kind is parameter.KEYWORD_ONLY and key not in (*_OF_RESPONSE, *offered)
    }
    if isinstance(named.function, type):
        hosts = keywords.pop("hosts", None) or [urlsplit(str(row.get("url", ""))).hostname or ""]
        if not isinstance(keywords.get("images", False), bool):  # of the row, not whether they are shown
            del keywords["images"]
        if "{response}" not in str(keywords.get("prompt", "{response}")):  # the question, not the judge's prompt
            del keywords["prompt"]
        return named_function(name, keywords, hosts)[0], {key: row[key] for key in keywords}
    return named_function(name, keywords)[0], keywords


def _response_ids(function: RewardFunction, row: dict[str, Any]) -> tuple[int, ...]:
    """Return the response's token ids. Raises ValueError: the function wants them, and `row` has neither them nor their number."""
    if "response_ids" in row:
        return tuple(row["response_ids"])
    if "response_tokens" not in row and {"response_tokens", "response_ids"} & function.parameters.keys():
        raise ValueError(f"{function.name!r} pays by tokens: give response_tokens=, their number, or response_ids=")
    return (0,) * int(row.get("response_tokens", 0))


def _problem(prompt: Any, answer: str, images: Sequence[Any], columns: dict[str, Any]) -> Problem:
    refs = tuple(image if isinstance(image, ImageRef) else to_image_ref(image, root=Path.cwd()) for image in images)
    is_chat = isinstance(prompt, list)
    messages = prompt if is_chat else [{"role": "user", "content": [{"type": "text", "text": str(prompt)}]}]
    return Problem("grade", tuple(messages), answer, refs, None, columns, 0, is_chat)
