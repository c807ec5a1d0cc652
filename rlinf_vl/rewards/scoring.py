"""From the answers of a group to their rewards: several functions, weighted and added up, each kept by name.

A function comes to a `Result` for each answer, or to none: a `GradingError` is a verdict of 0, and counted; any other error (a judge
that can't be reached) is no fault of the answer, whose trajectory is then not trained on.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from typing import Any

from rlinf_vl.code import is_code
from rlinf_vl.rewards.forms import RewardFunction
from rlinf_vl.rewards.grading_pool import GradingError
from rlinf_vl.rewards.named import named_function
from rlinf_vl.rewards.processes import Limits, ProcessPool, load_function
from rlinf_vl.rewards.result import RIGHT, Answer, Result
from rlinf_vl.types import Problem

#: Answers that a function which computes, and waits for nothing, scores in one go: handing one to a thread takes longer than most.
TOGETHER = 8


@dataclass(frozen=True, slots=True)
class Score:
    """
    Attributes:
        reward: on the scale of reward_min_val … reward_max_val.
        parts: each function's value, unweighted, by the function's name; what else it gave as `function.name`.
        correct: as the first function that judges answers says.
        ungraded: why functions came to no verdict.
        fault: why there is no score at all.
    """

    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    correct: bool = False
    ungraded: tuple[str, ...] = ()
    fault: str | None = None


@dataclass(frozen=True)
class Part:
    """A function in its place among the others; `begin` scores the answers to a problem without being waited for."""

    name: str
    weight: float
    judges: bool  # whether it judges answers, and not just their form
    begin: Callable[[Problem, Sequence[Answer]], Sequence["Future[Result]"]]


class Scorer:
    """The reward functions of a run. `close` ends their processes; closing twice is fine."""

    def __init__(
        self, parts: Sequence[Part], reward_max: float, reward_min: float, close: Callable[[], None] = lambda: None
    ) -> None:
        self.parts = parts
        self.close = close
        self._max, self._min = reward_max, reward_min

    async def __call__(self, problem: Problem, answers: Sequence[Answer]) -> list[Score]:
        """The scores of a group's answers, in their order."""
        begun = [part.begin(problem, answers) for part in self.parts]
        try:
            for future in chain.from_iterable(begun):
                if not future.done():  # while one is waited for, most of the others are
                    await asyncio.gather(asyncio.wrap_future(future), return_exceptions=True)
        except asyncio.CancelledError:
            for future in chain.from_iterable(begun):
                future.cancel()
            raise
        return [self._combine(of_answer) for of_answer in zip(*begun, strict=True)]

    def grade(self, problem: Problem, response: str) -> bool:
        """Whether a response is correct, for an environment that has to know it at once; in any thread but an event loop's.

        Raises:
            GradingError: a function came to no verdict.
            RuntimeError: there is no score.
        """
        score = self._combine([part.begin(problem, [Answer(response, response)])[0] for part in self.parts])
        if score.fault:
            raise RuntimeError(score.fault)
        if score.ungraded:
            raise GradingError("; ".join(score.ungraded))
        return score.correct

    def _combine(self, futures: Sequence["Future[Result]"]) -> Score:
        total, parts, correct, ungraded = 0.0, dict[str, float](), None, list[str]()
        for part, future in zip(self.parts, futures, strict=True):
            try:
                result = future.result()
            except GradingError as error:
                ungraded.append(f"{part.name}: {error}")
                result = Result(0.0, correct=False if part.judges else None)
            except Exception as error:
                return Score(self._min, fault=f"{part.name}: {type(error).__name__}: {error}")
            if result.value is not None:
                total += part.weight * result.value
                parts[part.name] = result.value
            parts |= {f"{part.name}.{name}": value for name, value in result.parts.items()}
            if correct is None and result.correct is not None:
                correct = result.correct
            elif correct is None and part.judges and result.value is not None:
                correct = result.value >= RIGHT
        return Score(self._min + (self._max - self._min) * total, parts, bool(correct), tuple(ungraded))


def make_scorer(
    functions: Sequence[Mapping[str, Any]],
    *,
    reward_max: float,
    reward_min: float,
    files: Mapping[str, str],
    limits: Limits,
    hosts: Sequence[str] = (),
) -> Scorer:
    """The scorer of `reward.functions`; `files` is `runner.code_files`, `hosts` is `reward.judge_hosts`. Neither a process nor a
    thread is started yet.

    Raises:
        CodeError, ValueError: there is no such function, or it can't be called.
    """
    own = [(entry["function"], entry.get("kwargs") or {}) for entry in functions if is_code(entry["function"])]
    pool = ProcessPool(own, files, limits)
    numbers = count()
    threads: dict[int | None, ThreadPoolExecutor] = {}
    parts: list[Part] = []
    for entry in functions:
        name, kwargs = entry["function"], entry.get("kwargs") or {}
        if is_code(name):
            function, judges = load_function(name, kwargs, files), True
            begin = partial(
                pool.submit,
                next(numbers),
                images=function.wants_images,
                together=function.together(),
            )
        else:
            function, judges = named_function(name, kwargs, hosts)
            at_once = getattr(function.function, "at_once", None)
            if at_once not in threads:
                threads[at_once] = ThreadPoolExecutor(at_once, thread_name_prefix="rewards")
            begin = partial(_begin, threads[at_once], function, 1 if at_once else TOGETHER)
        taken = {part.name for part in parts}
        attribute = name.rpartition(":")[2]
        numbered = (attribute if n == 1 else f"{attribute}_{n}" for n in count(1))
        unique = next(name for name in numbered if name not in taken)
        parts.append(Part(unique, float(entry.get("weight", 1.0)), judges, begin))

    def close() -> None:
        pool.close()
        for room in threads.values():
            room.shutdown(wait=False, cancel_futures=True)

    return Scorer(parts, reward_max, reward_min, close)


def _begin(
    threads: ThreadPoolExecutor, function: RewardFunction, together: int, problem: Problem, answers: Sequence[Answer]
) -> "list[Future[Result]]":
    """Score the answers in threads, so many of them in one after the other."""
    futures: list[Future[Result]] = [Future() for _ in answers]

    def some(first: int) -> None:
        part = slice(first, first + together)
        for answer, future in zip(answers[part], futures[part], strict=True):
            if not future.set_running_or_notify_cancel():
                continue
            try:
                (result,) = function.results(problem, [answer], 0.0)
            except BaseException as error:
                result = error
            if isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)

    for first in range(0, len(answers), together):
        threads.submit(some, first)
    return futures
