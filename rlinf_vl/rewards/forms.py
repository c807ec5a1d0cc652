"""The calling conventions of reward functions: ours, and those of other systems.

A convention is a row of `FORMS`, chosen by the names of a function's parameters. A function gets
the arguments that its own system gives it, and its return value is read as there: a number, or a
mapping with one under `score`, `overall` or `reward` (otherwise the sum of its numbers).
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

from rlinf_vl.errors import nearest
from rlinf_vl.rewards.result import RIGHT, Answer, Result
from rlinf_vl.types import Problem
from rlinf_vl.user_code import CodeError

#: Keys of a returned mapping for the score; the first that is there counts.
SCORES = ("score", "overall", "reward")
#: Keys of a returned mapping for whether the answer is right; the first that is there counts.
VERDICTS = ("correct", "acc", "accuracy")
#: Parameters that get the reference answer, and those that get the question, unless the row has a
#: column of this name.
ANSWERS = ("answer", "ground_truth", "solution", "label", "reference")
QUESTIONS = ("prompt", "problem", "question")
#: Parameters that get the response's text; a function with one of them is called by name.
_TEXTS = ("response", "final_response", "said")
Arguments = Mapping[str, Any]


class Form(NamedTuple):
    """A calling convention.

    Attributes:
        call: the signature as messages show it.
        fits: returns whether a function with these parameters has this form.
        of_group: whether one call takes a list of answers; otherwise it takes one.
        arguments: returns the keyword arguments that are available for a problem and its answers;
            the one under "" is positional.
    """

    call: str
    fits: Callable[[Mapping[str, inspect.Parameter]], bool]
    of_group: bool
    arguments: Callable[[Problem, Sequence[Answer]], Arguments]


def _ours(problem: Problem, answers: Sequence[Answer]) -> Arguments:
    """Return the arguments of our own form, for one answer."""
    (answer,) = answers
    return _facts(problem) | {
        "response": answer.response,
        "final_response": answer.final_response,
        "said": answer.final_response,  # its former name, accepted until 0.2
        "response_tokens": len(answer.ids),
        "response_ids": list(answer.ids),
        "truncated": answer.truncated,
    }


def _trl(problem: Problem, answers: Sequence[Answer]) -> Arguments:
    """Return TRL's arguments: a list with one entry per answer for each column."""
    n = len(answers)
    columns = {
        name: [value] * n for name, value in ({"answer": problem.answer} | problem.columns).items()
    }
    hooks = {"trainer_state": None, "log_extra": _ignore, "log_metric": _ignore}
    return columns | hooks | {
        "prompts": [list(problem.messages) if problem.chat else prompt_text(problem)] * n,
        "completions": [
            [{"role": "assistant", "content": a.response}] if problem.chat else a.response for a in answers
        ],
        "completion_ids": [list(a.ids) for a in answers],
    }  # fmt: skip


def _verl(problem: Problem, answers: Sequence[Answer]) -> Arguments:
    """Return the arguments of verl's `compute_score`, for one answer."""
    (answer,) = answers
    return {
        "data_source": problem.columns.get("data_source", ""),
        "solution_str": answer.response,
        "ground_truth": _ground_truth(problem),
        "extra_info": problem.columns.get("extra_info") or {},
    }


def _verl_batch(problem: Problem, answers: Sequence[Answer]) -> Arguments:
    """Return the arguments of verl's batched `compute_score`: lists under plural names."""
    arguments_by_answer = [_verl(problem, [answer]) for answer in answers]
    batch: dict[str, list[Any]] = {}
    for name in arguments_by_answer[0]:
        batch[f"{name}s"] = [arguments[name] for arguments in arguments_by_answer]
    return batch


def _easyr1_batch(problem: Problem, answers: Sequence[Answer]) -> Arguments:
    """Return EasyR1's only argument, a list with a mapping per answer."""
    truth = _ground_truth(problem)
    return {
        "": [
            problem.columns
            | {"response": a.response, "response_length": len(a.ids), "ground_truth": truth}
            for a in answers
        ]
    }


def _easyr1(problem: Problem, answers: Sequence[Answer]) -> Arguments:
    """Return the only argument of EasyR1's sequential form, the mapping of one answer."""
    (reward_input,) = _easyr1_batch(problem, answers)[""]
    return {"": reward_input}


def _only_parameter(
    parameters: Mapping[str, inspect.Parameter], name: str, annotation: str
) -> bool:
    """Return whether a function's only required argument has this name, or this annotation.

    Args:
        parameters: the function's parameters.
        name: the name that its system gives the argument.
        annotation: a regular expression for the annotation in lower case.
    """
    positional = [
        p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if (
        not positional
        or positional[0].name != name
        and any(p.default is p.empty for p in positional[1:])
    ):
        return False
    hint = positional[0].annotation
    # A text under `from __future__ import annotations`, a class such as dict, or list[dict].
    if isinstance(hint, type):
        hint_text = getattr(hint, "__name__", "")
    else:
        hint_text = hint if isinstance(hint, str) else str(hint)
    return (
        positional[0].name == name
        or re.match(annotation, hint_text.removeprefix("typing.").lower()) is not None
    )


#: All forms by name. The first that fits a function is its form.
FORMS: dict[str, Form] = {
    # TRL: docs, "Using a custom reward function" of the GRPO trainer
    "trl": Form(
        "fn(completions, **columns)",
        lambda p: bool({"completions", "completion_ids"} & p.keys()),
        True,
        _trl,
    ),
    # verl: workers/reward_manager/{naive,batch}.py
    "verl": Form(
        "compute_score(data_source, solution_str, ground_truth, extra_info)",
        lambda p: "solution_str" in p,
        False,
        _verl,
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
        lambda p: any(name in p for name in _TEXTS) or _takes_two(p),
        False,
        _ours,
    ),
}  # fmt: skip
#: The signature in `load_code`'s messages; `RewardFunction` checks it closer.
SIGNATURE = (
    "score(response, answer, **row) or score(completions, **columns) or score(reward_inputs)"
)
ACCEPTED_CALLS = " or ".join(FORMS[name].call for name in ("ours", "trl", "verl", "easyr1"))


def _takes_two(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Return whether a function can be called with a response and a reference by position."""
    positional = [
        p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return len(positional) >= 2 or any(p.kind is p.VAR_POSITIONAL for p in parameters.values())


class RewardFunction:
    """A reward function of any form, with the keywords of its entry in the config.

    Raises:
        CodeError: the function has none of the `FORMS`, or doesn't take the keywords.
    """

    def __init__(self, function: Callable[..., Any], name: str, kwargs: Mapping[str, Any]) -> None:
        self.function, self.name, self.kwargs = function, name, dict(kwargs)
        self.parameters = inspect.signature(function).parameters
        form = next((form for form in FORMS.values() if form.fits(self.parameters)), None)
        if form is None:
            raise CodeError(f"{name!r}: {self._signature()} is called as none of {ACCEPTED_CALLS}")
        self.form = form
        takes_any = any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())
        if unknown := [key for key in kwargs if key not in self.parameters and not takes_any]:
            raise CodeError(
                f"{name!r}: {self._signature()} takes no keyword {unknown[0]!r} (kwargs); leave it "
                "out"
            )
        self.wants_images = "images" in self.parameters
        call = function.func if isinstance(function, functools.partial) else function
        self.is_async = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(
            type(call).__call__
        )
        completions = self.parameters.get("completions")
        self._completions_type = (
            str(completions.annotation).replace("typing.", "").lower() if completions else ""
        )

    def needed(self) -> set[str]:
        """Return the required parameters that only a column or `kwargs` can fill."""
        empty = {name for name, p in self.parameters.items() if p.default is p.empty}
        return empty - {
            *ANSWERS,
            *QUESTIONS,
            *_TEXTS,
            "response_tokens",
            "response_ids",
            "truncated",
            "images",
        }

    def together(self) -> bool:
        """Return whether a group's answers are scored at once: in a list, or by coroutines."""
        return self.form.of_group or self.is_async

    def results(
        self, problem: Problem, answers: Sequence[Answer], timeout_s: float
    ) -> list[Result | Exception]:
        """Return the result of each answer, or its error; a coroutine ends after `timeout_s`."""
        groups = [answers] if self.form.of_group else [[answer] for answer in answers]
        outcomes: list[Any] = []  # what each call returned, or its error
        if self.is_async:
            outcomes = asyncio.run(self._gather(problem, groups, timeout_s))
        else:
            for group in groups:
                outcomes.append(self._try(lambda group=group: self._call(problem, group)))
        if not self.form.of_group:
            return [self._result_or_error(outcome) for outcome in outcomes]
        (returned,) = outcomes
        if isinstance(returned, Exception):
            return [returned] * len(answers)
        values = (
            list(returned)
            if isinstance(returned, Sequence) or hasattr(returned, "__iter__")
            else [returned]
        )
        if isinstance(returned, str | Mapping) or len(values) != len(answers):
            description = (
                type(returned).__name__ if len(values) == len(answers) else f"{len(values)} results"
            )
            return [
                TypeError(
                    f"it returned {description} for {len(answers)} answers; return a list with one "
                    "for each"
                )
            ] * len(answers)
        return [self._try(lambda value=value: result_of(value)) for value in values]

    def _result_or_error(self, outcome: Any) -> Result | Exception:
        """Return an error as it is, and the result in any other return value."""
        return outcome if isinstance(outcome, Exception) else self._try(lambda: result_of(outcome))

    async def _gather(
        self, problem: Problem, groups: Sequence[Sequence[Answer]], timeout_s: float
    ) -> list[Any]:
        """Await the calls of all groups at once; return what each returned, or its error."""

        async def call_group(group: Sequence[Answer]) -> Any:
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._call(problem, group)
            except Exception as error:
                return error

        return await asyncio.gather(*map(call_group, groups))

    def _try(self, call: Callable[[], Any]) -> Any:
        """Return what a call returns, or its error."""
        try:
            return call()
        except Exception as error:
            return error

    def _call(self, problem: Problem, answers: Sequence[Answer]) -> Any:
        """Call the function.

        Some functions for TRL read completions as texts and some as messages; in TRL the row's
        prompt decides. Here an annotation decides first, and if the call fails without one, the
        other kind is tried.
        """
        if self.form is not FORMS["trl"]:
            return self._call_with_arguments(problem, answers)
        chat = (
            "dict" in self._completions_type if "list[" in self._completions_type else problem.chat
        )
        try:
            return self._call_with_arguments(_with_chat(problem, chat), answers)
        except (TypeError, KeyError, AttributeError, IndexError):
            if self.is_async or "list[" in self._completions_type:
                raise
            with suppress(Exception):
                return self._call_with_arguments(_with_chat(problem, not chat), answers)
            raise

    def _call_with_arguments(self, problem: Problem, answers: Sequence[Answer]) -> Any:
        """Call the function with those arguments that its parameters name.

        Raises:
            KeyError: a parameter without a default has no argument.
        """
        offered = dict(self.form.arguments(problem, answers))
        if self.wants_images and "images" not in offered:
            from PIL import Image  # imported late: checking a config needs no images

            from rlinf_vl.data.clips import frame_refs

            images = [
                Image.open(io.BytesIO(frame.data))
                for image in problem.images
                for frame in frame_refs(image)
            ]
            offered["images"] = [images] * len(answers) if self.form.of_group else images
        positional = [offered.pop("")] if "" in offered else []
        named = {
            name
            for name, p in self.parameters.items()
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        }
        if self.form is FORMS["ours"] and named.isdisjoint(_TEXTS):
            # The parameters have other names, so response and reference are given by position.
            positional = [offered["response"], offered["answer"]]
        named -= set(list(self.parameters)[: len(positional)])
        for names, value in ((ANSWERS, problem.answer), (QUESTIONS, prompt_text(problem))):
            for name in named.intersection(names) - offered.keys():
                offered[name] = [value] * len(answers) if self.form.of_group else value
        available_names = {*offered, *problem.columns, "answer", "prompt", "images"} - {"said"}
        if not any(p.kind is p.VAR_KEYWORD for p in self.parameters.values()):
            offered = {name: value for name, value in offered.items() if name in named}
        arguments = offered | self.kwargs
        for name in named - arguments.keys():
            if self.parameters[name].default is inspect.Parameter.empty:
                listed = ", ".join(sorted(available_names))
                raise KeyError(
                    f"it asks for {name!r}, which is no column of the row, and nothing that "
                    f"functions get; there are {listed};"
                    f"{nearest(name, available_names)}".rstrip(";")
                )
        return self.function(*positional, **arguments)

    def _signature(self) -> str:
        """Return the function's name and parameters, for messages."""
        return f"{self.name.rpartition(':')[2]}{inspect.signature(self.function)}"


def prompt_text(problem: Problem) -> str:
    """Return the text of the last message, its text parts joined."""
    content = problem.messages[-1]["content"] if problem.messages else ""
    return (
        content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    )


def result_of(returned: Any) -> Result:
    """Return the result in a function's return value for one answer.

    Raises:
        TypeError, ValueError: the value is neither a finite number nor a mapping with one.
    """
    if returned is None:
        return Result(None)
    if not isinstance(returned, Mapping):
        return Result(_number(returned))
    spans = _spans(returned.get("spans"))
    numbers = {str(key): _number(value) for key, value in returned.items() if _is_number(value)}
    if not numbers:
        raise ValueError(
            "it returned a mapping without a number (of "
            f"{', '.join(map(str, returned)) or 'nothing'})"
        )
    score = next((name for name in SCORES if name in numbers), None)
    verdict = next((numbers[name] for name in VERDICTS if name in numbers), None)
    correct = None if verdict is None else verdict >= RIGHT
    if score is None:
        # `correct` is a verdict and no reward, unless it is all there is.
        value = sum(
            number for name, number in numbers.items() if name != VERDICTS[0] or len(numbers) == 1
        )
    else:
        value = numbers.pop(score)
    return Result(value, numbers, correct, spans)


def _spans(value: Any) -> tuple[tuple[int, int, float], ...]:
    """Return the rewards of parts of a response that a function returned under `spans`.

    Raises:
        TypeError, ValueError: they are not triples of a start, a later end and a finite number.
    """
    if value is None:
        return ()
    spans = []
    for entry in value:
        if not isinstance(entry, Sequence) or isinstance(entry, str) or len(entry) != 3:
            raise TypeError(
                f"it returned spans with {entry!r:.60}; each is (start, end, value), in characters "
                "of the response"
            )
        start, end, reward = int(entry[0]), int(entry[1]), _number(entry[2])
        if not 0 <= start < end:
            raise ValueError(f"it returned the span {entry!r:.60}; 0 <= start < end must hold")
        spans.append((start, end, reward))
    return tuple(spans)


def _is_number(value: Any) -> bool:
    """Return whether a value is a number, or an array or tensor of a single one."""
    if isinstance(value, Real):
        return True
    return (
        hasattr(value, "item")
        and getattr(value, "size", None) in (1, ())
        or getattr(value, "shape", None) == ()
    )


def _number(value: Any) -> float:
    """Return a value as a finite float. Raises TypeError or ValueError: it is none."""
    if isinstance(value, str | bytes) or value is None:
        raise TypeError(f"it returned {type(value).__name__} {value!r:.60}; return a number")
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"it returned a {type(value).__name__}; return a number or a mapping of numbers"
        ) from error
    if not math.isfinite(number):
        raise ValueError(f"it returned {number}; return a finite number")
    return number


def _with_chat(problem: Problem, chat: bool) -> Problem:
    """Return the problem with a prompt of messages (`chat`) or of text."""
    return problem if problem.chat == chat else replace(problem, chat=chat)


def _facts(problem: Problem) -> dict[str, Any]:
    """Return the row's columns, with the question and the reference under our names.

    A column goes before one of ours with the same name.
    """
    return {
        "prompt": prompt_text(problem),
        "messages": list(problem.messages),
        "answer": problem.answer,
    } | problem.columns


def _ground_truth(problem: Problem) -> Any:
    """Return the reference in the place where verl's rows have it; it may be no text."""
    for spec in (problem.columns.get("reward_model"), problem.columns.get("reward_spec")):
        if isinstance(spec, Mapping) and "ground_truth" in spec:
            return spec["ground_truth"]
    return problem.columns.get("ground_truth", problem.answer)


def _ignore(*_: Any, **__: Any) -> None:
    """Take the place of the logging callbacks of TRL's trainer, and do nothing."""
