"""Grade one response outside of a run: in a script, a notebook or a test."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlinf_vl.data.answers import answer_text
from rlinf_vl.data.images import to_image_ref
from rlinf_vl.rewards.forms import RewardFunction
from rlinf_vl.rewards.grading_pool import GradingError
from rlinf_vl.rewards.named import NAMED, named_function
from rlinf_vl.rewards.processes import load_function
from rlinf_vl.rewards.result import Answer
from rlinf_vl.types import ImageRef, Problem
from rlinf_vl.user_code import is_code

#: Names in `row` that describe the response and are no columns of the data set.
_RESPONSE_FACTS = ("response_tokens", "response_ids", "truncated")


def grade(name: str, /, response: str, answer: Any, **row: Any) -> float:
    """Return a reward function's score of a response.

    Neither weight nor reward_min_val and reward_max_val are applied.
    `grade("choice", "so (B)", "B", options=["red", "blue"])` is 1.0. A function of `module:name` or
    `path/to/file.py:name` runs in this process, without the limits of a run.

    Args:
        name: as in `reward.functions`.
        response: the whole response, thoughts included.
        answer: the reference, of any type that a row may have.
        row: the row's other columns, and keywords of the function (`kwargs` of its entry). `prompt`
            is the question as text or messages, `images` a list of PIL images, bytes or paths
            within the working folder. Functions that score length need `response_tokens` or
            `response_ids`.

    Returns:
        The score; 0.0 where a built-in function reaches no verdict, as in a run, and where the
        score is None.

    Raises:
        CodeError: the function does not exist, or its parameters are of no known form.
        ValueError: a row cannot have such an answer, or `response_tokens` is missing.
        Exception: any error of a user's function, and `judge`'s where its model can't be reached.
    """
    reference = answer_text(answer)
    if reference is None:
        raise ValueError(
            f"answer: {answer!r:.80} is no text, finite number, boolean or list of these"
        )
    function, keywords = _function(name, row)
    columns = {
        key: value
        for key, value in row.items()
        if key not in (*keywords, *_RESPONSE_FACTS, "prompt", "images")
    }
    ids = _response_ids(function, row)
    reply = response.rpartition("</think>")[2]
    problem = _problem(row.get("prompt", ""), reference, row.get("images") or (), columns)
    (result,) = function.results(
        problem, [Answer(response, reply, ids, bool(row.get("truncated")))], 60.0
    )
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
        if key in row
        and parameter.kind is parameter.KEYWORD_ONLY
        and key not in (*_RESPONSE_FACTS, *offered)
    }
    if isinstance(named.function, type):  # a judge; its keyword names also mean columns of a row
        hosts = keywords.pop("hosts", None) or [urlsplit(str(row.get("url", ""))).hostname or ""]
        # The row's images, not the judge's switch.
        if not isinstance(keywords.get("images", False), bool):
            del keywords["images"]
        # The question, not the judge's prompt.
        if "{response}" not in str(keywords.get("prompt", "{response}")):
            del keywords["prompt"]
        return named_function(name, keywords, hosts)[0], {key: row[key] for key in keywords}
    return named_function(name, keywords)[0], keywords


def _response_ids(function: RewardFunction, row: dict[str, Any]) -> tuple[int, ...]:
    """Return the response's token ids, zeros where `row` has only their number.

    Raises:
        ValueError: the function needs them, and `row` has neither them nor their number.
    """
    if "response_ids" in row:
        return tuple(row["response_ids"])
    if (
        "response_tokens" not in row
        and {"response_tokens", "response_ids"} & function.parameters.keys()
    ):
        raise ValueError(
            f"{function.name!r} pays by tokens: give response_tokens=, their number, or "
            "response_ids="
        )
    return (0,) * int(row.get("response_tokens", 0))


def _problem(prompt: Any, answer: str, images: Sequence[Any], columns: dict[str, Any]) -> Problem:
    """Return the row as a problem; a text prompt becomes the only message, of a user."""
    refs = tuple(
        image if isinstance(image, ImageRef) else to_image_ref(image, root=Path.cwd())
        for image in images
    )
    is_chat = isinstance(prompt, list)
    messages = (
        prompt
        if is_chat
        else [{"role": "user", "content": [{"type": "text", "text": str(prompt)}]}]
    )
    return Problem("grade", tuple(messages), answer, refs, None, columns, 0, is_chat)
