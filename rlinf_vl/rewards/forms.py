"""How reward functions are called: ours, and those written for other systems, recognised by the names of their parameters.

A form is a row of `FORMS`. Whatever it is called, a function gets what it would get where it comes from, and what it returns is read
as it is read there: a number, or a mapping with one under `score`, `overall` or `reward` (otherwise the sum of its numbers).
"""

import asyncio
import functools
import inspect
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from numbers import Real
from typing import Any, NamedTuple

from rlinf_vl.code import CodeError
from rlinf_vl.errors import nearest
from rlinf_vl.rewards.result import RIGHT, Answer, Result
from rlinf_vl.types import Problem

#: Names under which a mapping has its score, and says whether the answer is right: the first that is there.
SCORES, VERDICTS = ("score", "overall", "reward"), ("correct", "acc", "accuracy")
#: Names of parameters that mean the reference answer, or the question, where no column of the row is called so.
ANSWERS = ("answer", "ground_truth", "solution", "label", "reference")
QUESTIONS = ("prompt", "problem", "question")
Arguments = Mapping[str, Any]


class Form(NamedTuple):
    """
    Attributes:
        call: how it is written, for messages.
        fits: whether a function with these parameters is of this form.
        of_group: whether it takes a list of answers; otherwise one.
        arguments: what it is offered for a problem and its answers, as keywords; one under "" is positional.
    """

    call: str
    fits: Callable[[Mapping[str, inspect.Parameter]], bool]
    of_group: bool
    arguments: Callable[[Problem, Sequence[Answer]], Arguments]


def _ours(problem: Problem, answers: Sequence[Answer]) -> Arguments:
    (answer,) = answers
    return _facts(problem) | {
        "response": answer.response,
        "said": answer.said,
        "response_tokens": len(answer.ids),
        "response_ids": list(answer.ids),
        "truncated": answer.truncated,
    }


def _trl(problem: Problem, answers: Sequence[Answer]) -> Arguments:
    n = len(answers)
    columns = {name: [value] * n for name, value in ({"answer": problem.answer} | problem.columns).items()}
    hooks = {"trainer_state": None, "log_extra": _ignore, "log_metric": _ignore}
    return columns | hooks | {
        "prompts": [list(problem.messages) if problem.chat else prompt_text(problem)] * n,
        "completions": [
            [{"role": "assistant", "content": a.response}] if problem.chat else a.response for a in answers
        ],
        "completion_ids": [list(a.ids) for a in answers],
    }  # fmt: skip


def _verl(problem: Problem, answers: Sequence[Answer]) -> Arguments:
    (answer,) = answers
    return {
        "data_source": problem.columns.get("data_source", ""),
        "solution_str": answer.response,
        "ground_truth": _ground_truth(problem),
        "extra_info": problem.columns.get("extra_info") or {},
    }


def _verl_batch(problem: Problem, answers: Sequence[Answer]) -> Arguments:
    each = [_verl(problem, [answer]) for answer in answers]
    return {f"{name}s": [one[name] for one in each] for name in each[0]}


def _easyr1_batch(problem: Problem, answers: Sequence[Answer]) -> Arguments:
    truth = _ground_truth(problem)
    return {
        "": [
            problem.columns | {"response": a.response, "response_length": len(a.ids), "ground_truth": truth}
            for a in answers
        ]
    }


def _easyr1(problem: Problem, answers: Sequence[Answer]) -> Arguments:
    (one,) = _easyr1_batch(problem, answers)[""]
    return {"": one}


def _only_parameter(parameters: Mapping[str, inspect.Parameter], name: str, annotation: str) -> bool:
    """Whether the one argument that must be given is called so, or said to be so."""
    positional = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not positional or positional[0].name != name and any(p.default is p.empty for p in positional[1:]):
        return False
    said = positional[0].annotation
    said = said if isinstance(said, str) else getattr(said, "__name__", "") if isinstance(said, type) else str(said)
    return positional[0].name == name or re.match(annotation, said.removeprefix("typing.").lower()) is not None


#: Of several forms that fit, the first counts.
FORMS: dict[str, Form] = {
    # TRL: docs, "Using a custom reward function" of the GRPO trainer
    "trl": Form(
        "fn(completions, **columns)", lambda p: bool({"completions", "completion_ids"} & p.keys()), True, _trl
    ),
    # verl: workers/reward_manager/{naive,batch}.py
    "verl": Form(
        "compute_score(data_source, solution_str, ground_truth, extra_info)", lambda p: "solution_str" in p, False, _verl
    ),
    "verl batch": Form(
        "compute_score(data_sources, solution_strs, ground_truths, extra_infos)",
        lambda p: "solution_strs" in p,
        True,
        _verl_batch,
    ),
    # EasyR1: examples/reward_function/*.py
    "easyr1": Form(
        "compute_score(reward_inputs: list[dict])",
        lambda p: _only_parameter(p, "reward_inputs", r"(list|sequence)(\[dict\b.*|\[mapping\b.*)"),
        True,
        _easyr1_batch,
    ),
    "easyr1 sequential": Form(
        "compute_score(reward_input: dict)",
        lambda p: _only_parameter(p, "reward_input", r"(dict|mapping)\b"),
        False,
        _easyr1,
    ),
    "ours": Form(
        "fn(response, answer, **row)",
        lambda p: "response" in p or "said" in p or _takes_two(p),
        False,
        _ours,
    ),
}  # fmt: skip
#: What `load_code` asks for, before `reward_function` looks closer.
SIGNATURE = "score(response, answer, **row) or score(completions, **columns) or score(reward_inputs)"
WANTED = " or ".join(FORMS[name].call for name in ("ours", "trl", "verl", "easyr1"))


def _takes_two(parameters: Mapping[str, inspect.Parameter]) -> bool:
    positional = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) >= 2 or any(p.kind is p.VAR_POSITIONAL for p in parameters.values())


class RewardFunction:
    """A function of any form, with keywords of its own.

    Raises:
        CodeError: its form is none of `FORMS`, or it doesn't take the keywords.
    """

    def __init__(self, function: Callable[..., Any], name: str, kwargs: Mapping[str, Any]) -> None:
        self.function, self.name, self.kwargs = function, name, dict(kwargs)
        self.parameters = inspect.signature(function).parameters
        form = next((form for form in FORMS.values() if form.fits(self.parameters)), None)
        if form is None:
            raise CodeError(f"{name!r}: {self._shown()} is called as none of {WANTED}")
        self.form = form
        takes_any = any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())
        if unknown := [key for key in kwargs if key not in self.parameters and not takes_any]:
            raise CodeError(f"{name!r}: {self._shown()} takes no keyword {unknown[0]!r} (kwargs); leave it out")
        self.wants_images = "images" in self.parameters
        call = function.func if isinstance(function, functools.partial) else function
        self.is_async = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)
        said = self.parameters.get("completions")
        self._completions = str(said.annotation).replace("typing.", "").lower() if said else ""

    def needed(self) -> set[str]:
        """Parameters without a default that nothing but a column or `kwargs` gives."""
        empty = {name for name, p in self.parameters.items() if p.default is p.empty}
        return empty - {
            *ANSWERS,
            *QUESTIONS,
            "response",
            "said",
            "response_tokens",
            "response_ids",
            "truncated",
            "images",
        }

    def together(self) -> bool:
        """Whether a group's answers go to one call: a list, or coroutines side by side."""
        return self.form.of_group or self.is_async

    def results(self, problem: Problem, answers: Sequence[Answer], timeout_s: float) -> list[Result | Exception]:
        """What it says of each answer, or raises; a coroutine ends after `timeout_s`."""
        groups = [answers] if self.form.of_group else [[answer] for answer in answers]
        called: list[Any] = []
        if self.is_async:
            called = asyncio.run(self._gather(problem, groups, timeout_s))
        else:
            for group in groups:
                called.append(self._tried(lambda group=group: self._call(problem, group)))
        if not self.form.of_group:
            return [
                one if isinstance(one, Exception) else self._tried(lambda one=one: result_of(one)) for one in called
            ]
        (returned,) = called
        if isinstance(returned, Exception):
            return [returned] * len(answers)
        found = list(returned) if isinstance(returned, Sequence) or hasattr(returned, "__iter__") else [returned]
        if isinstance(returned, str | Mapping) or len(found) != len(answers):
            shown = type(returned).__name__ if len(found) == len(answers) else f"{len(found)} results"
            return [
                TypeError(f"it returned {shown} for {len(answers)} answers; return a list with one for each")
            ] * len(answers)
        return [self._tried(lambda one=one: result_of(one)) for one in found]

    async def _gather(self, problem: Problem, groups: Sequence[Sequence[Answer]], timeout_s: float) -> list[Any]:
        async def one(group: Sequence[Answer]) -> Any:
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._call(problem, group)
            except Exception as error:
                return error

        return await asyncio.gather(*map(one, groups))

    def _tried(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    def _call(self, problem: Problem, answers: Sequence[Answer]) -> Any:
        """Of TRL's functions some read completions as texts and some as messages, which depends on the row's prompt there. What an
        annotation says goes before that; and where one fails, the other is tried."""
        if self.form is not FORMS["trl"]:
            return self._with(problem, answers)
        chat = "dict" in self._completions if "list[" in self._completions else problem.chat
        try:
            return self._with(_asked_as(problem, chat), answers)
        except (TypeError, KeyError, AttributeError, IndexError):
            if self.is_async or "list[" in self._completions:
                raise
            with suppress(Exception):
                return self._with(_asked_as(problem, not chat), answers)
            raise

    def _with(self, problem: Problem, answers: Sequence[Answer]) -> Any:
        offered = dict(self.form.arguments(problem, answers))
        if self.wants_images and "images" not in offered:
            from PIL import Image  # which a look at a config does without

            shown = [Image.open(io.BytesIO(image.data)) for image in problem.images]
            offered["images"] = [shown] * len(answers) if self.form.of_group else shown
        positional = [offered.pop("")] if "" in offered else []
        named = {name for name, p in self.parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        if self.form is FORMS["ours"] and not {"response", "said"} & named:  # other names: by place
            positional = [offered["response"], offered["answer"]]
        named -= set(list(self.parameters)[: len(positional)])
        for names, value in ((ANSWERS, problem.answer), (QUESTIONS, prompt_text(problem))):
            for name in named.intersection(names) - offered.keys():
                offered[name] = [value] * len(answers) if self.form.of_group else value
        known_names = {*offered, *problem.columns, "answer", "prompt", "images"}
        if not any(p.kind is p.VAR_KEYWORD for p in self.parameters.values()):
            offered = {name: value for name, value in offered.items() if name in named}
        given = offered | self.kwargs
        for name in named - given.keys():
            if self.parameters[name].default is inspect.Parameter.empty:
                listed = ", ".join(sorted(known_names))
                raise KeyError(
                    f"it asks for {name!r}, which is no column of the row, and nothing that functions get; there are {listed};"
                    f"{nearest(name, known_names)}".rstrip(";")
                )
        return self.function(*positional, **given)

    def _shown(self) -> str:
        return f"{self.name.rpartition(':')[2]}{inspect.signature(self.function)}"


def prompt_text(problem: Problem) -> str:
    """The texts of the last message."""
    content = problem.messages[-1]["content"] if problem.messages else ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def result_of(returned: Any) -> Result:
    """Read what a function returned for one answer.

    Raises:
        TypeError, ValueError: it is no finite number, and no mapping that has some.
    """
    if returned is None:
        return Result(None)
    if not isinstance(returned, Mapping):
        return Result(_number(returned))
    numbers = {str(key): _number(value) for key, value in returned.items() if _is_number(value)}
    if not numbers:
        raise ValueError(f"it returned a mapping without a number (of {', '.join(map(str, returned)) or 'nothing'})")
    score = next((name for name in SCORES if name in numbers), None)
    verdict = next((numbers[name] for name in VERDICTS if name in numbers), None)
    correct = None if verdict is None else verdict >= RIGHT
    if score is None:
        value = sum(number for name, number in numbers.items() if name != VERDICTS[0] or len(numbers) == 1)
    else:
        value = numbers.pop(score)
    return Result(value, numbers, correct)


def _is_number(value: Any) -> bool:
    if isinstance(value, Real):
        return True
    return hasattr(value, "item") and getattr(value, "size", None) in (1, ()) or getattr(value, "shape", None) == ()


def _number(value: Any) -> float:
    if isinstance(value, str | bytes) or value is None:
        raise TypeError(f"it returned {type(value).__name__} {value!r:.60}; return a number")
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"it returned a {type(value).__name__}; return a number or a mapping of numbers") from error
    if not math.isfinite(number):
        raise ValueError(f"it returned {number}; return a finite number")
    return number


def _asked_as(problem: Problem, chat: bool) -> Problem:
    return problem if problem.chat == chat else replace(problem, chat=chat)


def _facts(problem: Problem) -> dict[str, Any]:
    """The row, and the reference answer and the question by our names."""
    return {
        "prompt": prompt_text(problem),
        "messages": list(problem.messages),
        "answer": problem.answer,
    } | problem.columns


def _ground_truth(problem: Problem) -> Any:
    """The reference as verl's rows have it, which may be no text."""
    for spec in (problem.columns.get("reward_model"), problem.columns.get("reward_spec")):
        if isinstance(spec, Mapping) and "ground_truth" in spec:
            return spec["ground_truth"]
    return problem.columns.get("ground_truth", problem.answer)


def _ignore(*_: Any, **__: Any) -> None:
    """In place of what logs for TRL's trainer."""
