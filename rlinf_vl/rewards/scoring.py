"""The rewards of a group's answers: several functions, weighted and added up, each logged by name.

A function returns a `Result` for each answer or fails. A `GradingError` is a score of 0, and
counted. Any other error (a judge that can't be reached) is no fault of the answer, whose trajectory
is then not trained on.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from typing import Any

from rlinf_vl.errors import never_reported
from rlinf_vl.rewards.forms import RewardFunction
from rlinf_vl.rewards.grading_pool import GradingError
from rlinf_vl.rewards.named import named_function
from rlinf_vl.rewards.processes import Limits, ProcessPool, UserFunctions, load_function
from rlinf_vl.rewards.result import RIGHT, Answer, Result
from rlinf_vl.types import Problem
from rlinf_vl.user_code import is_code

#: Answers that one task of a thread scores, for functions that compute and don't wait: handing a
#: task to a thread takes longer than most of them.
ANSWERS_PER_TASK = 8


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of one answer, and its parts.

    Attributes:
        reward: the sum on the scale of reward_min_val … reward_max_val.
        parts: each function's value, unweighted, by the function's name; its further numbers by
            `function.name`.
        values: each function's value, unweighted, in the functions' order; None: it gave none.
        correct: the verdict of the first function that judges answers.
        ungraded: reasons of functions that reached no verdict.
        fault: the reason why there is no score at all; None if there is one.
        spans: rewards of parts of the response by all functions, weighted: (start, end, value) in
            characters of its text.
    """

    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    correct: bool = False
    ungraded: tuple[str, ...] = ()
    fault: str | None = None
    values: tuple[float | None, ...] = ()
    spans: tuple[tuple[int, int, float], ...] = ()


@dataclass(frozen=True)
class Part:
    """A reward function with its name and weight.

    Attributes:
        name: its name in metrics, unique in a run.
        weight: the factor of its value in the sum.
        judges: whether it judges answers, and not just their form.
        begin: starts to score the answers to a problem, and returns a future for each at once.
    """

    name: str
    weight: float
    judges: bool
    begin: Callable[[Problem, Sequence[Answer]], Sequence["Future[Result]"]]


class Scorer:
    """The reward functions of a run. `close` ends their processes and may be called twice."""

    def __init__(
        self,
        parts: Sequence[Part],
        reward_max: float,
        reward_min: float,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.parts = parts
        self.close = close
        self._max, self._min = reward_max, reward_min

    async def __call__(self, problem: Problem, answers: Sequence[Answer]) -> list[Score]:
        """Return the scores of a group's answers, in their order."""
        futures_by_part = [part.begin(problem, answers) for part in self.parts]
        try:
            for future in chain.from_iterable(futures_by_part):
                # Most futures finish during the wait for an earlier one; wrapping those costs time.
                if not future.done():
                    await asyncio.gather(asyncio.wrap_future(future), return_exceptions=True)
        except asyncio.CancelledError:
            for future in chain.from_iterable(futures_by_part):
                future.cancel()
            raise
        futures_by_answer = zip(*futures_by_part, strict=True)
        return [self._combine(futures) for futures in futures_by_answer]

    def grade(self, problem: Problem, response: str) -> bool:
        """Return whether a response is correct, for an environment that needs it at once.

        It blocks, so no thread with an event loop may call it.

        Raises:
            GradingError: a function reached no verdict.
            RuntimeError: there is no score.
        """
        score = self._combine(
            [part.begin(problem, [Answer(response, response)])[0] for part in self.parts]
        )
        if score.fault:
            raise RuntimeError(score.fault)
        if score.ungraded:
            raise GradingError("; ".join(score.ungraded))
        return score.correct

    def _combine(self, futures: Sequence["Future[Result]"]) -> Score:
        """Return the score of one answer from its futures, one for each part."""
        total, parts, correct, ungraded = 0.0, dict[str, float](), None, list[str]()
        values: list[float | None] = []
        spans: list[tuple[int, int, float]] = []
        for part, future in zip(self.parts, futures, strict=True):
            try:
                result = future.result()
            except GradingError as error:
                ungraded.append(f"{part.name}: {error}")
                result = Result(0.0, correct=False if part.judges else None)
            except Exception as error:
                return Score(self._min, fault=f"{part.name}: {type(error).__name__}: {error}")
            values.append(result.value)
            if result.value is not None:
                total += part.weight * result.value
                parts[part.name] = result.value
            parts |= {f"{part.name}.{name}": value for name, value in result.parts.items()}
            spans += [(start, end, part.weight * value) for start, end, value in result.spans]
            if correct is None and result.correct is not None:
                correct = result.correct
            elif correct is None and part.judges and result.value is not None:
                correct = result.value >= RIGHT
        return Score(
            self._min + (self._max - self._min) * total,
            parts,
            bool(correct),
            tuple(ungraded),
            values=tuple(values),
            spans=tuple(spans),
        )


def make_scorer(
    functions: Sequence[Mapping[str, Any]],
    *,
    reward_max: float,
    reward_min: float,
    files: Mapping[str, str],
    limits: Limits,
    hosts: Sequence[str] = (),
    first_report: Callable[[str], bool] = never_reported,
    pool_class: type[UserFunctions] = ProcessPool,
) -> Scorer:
    """Return the scorer of `reward.functions`; neither a process nor a thread is started yet.

    Args:
        functions: the entries of `reward.functions`.
        reward_max: `reward.reward_max_val`, the reward of a weighted sum of 1.
        reward_min: `reward.reward_min_val`, the reward of a weighted sum of 0.
        files: `runner.code_files`.
        limits: limits of the processes in which users' functions run.
        hosts: `reward.judge_hosts`.
        first_report: whether no other process has reported a text. The traceback of an error is
            printed then only; the default knows of this process only.
        pool_class: runs users' functions.

    Raises:
        CodeError, ValueError: a function does not exist, or can't be called.
    """
    user_functions = [
        (entry["function"], entry.get("kwargs") or {})
        for entry in functions
        if is_code(entry["function"])
    ]
    pool = pool_class(user_functions, files, limits, first_report)
    function_numbers = count()  # positions in `user_functions`
    # Thread pools by their size; functions without a limit share the one of None.
    threads: dict[int | None, ThreadPoolExecutor] = {}
    parts: list[Part] = []
    for entry in functions:
        name, kwargs = entry["function"], entry.get("kwargs") or {}
        if is_code(name):
            function, judges = load_function(name, kwargs, files), True
            begin = partial(
                pool.submit,
                next(function_numbers),
                images=function.wants_images,
                together=function.together(),
            )
        else:
            function, judges = named_function(name, kwargs, hosts)
            at_once = getattr(function.function, "at_once", None)
            if at_once not in threads:
                threads[at_once] = ThreadPoolExecutor(at_once, thread_name_prefix="rewards")
            begin = partial(_begin, threads[at_once], function, 1 if at_once else ANSWERS_PER_TASK)
        used_names = {part.name for part in parts}
        attribute = name.rpartition(":")[2]
        numbered = (attribute if n == 1 else f"{attribute}_{n}" for n in count(1))
        unique = next(name for name in numbered if name not in used_names)
        parts.append(Part(unique, float(entry.get("weight", 1.0)), judges, begin))

    def close() -> None:
        pool.close()
        for executor in threads.values():
            executor.shutdown(wait=False, cancel_futures=True)

    return Scorer(parts, reward_max, reward_min, close)


def _begin(
    threads: ThreadPoolExecutor,
    function: RewardFunction,
    task_size: int,
    problem: Problem,
    answers: Sequence[Answer],
) -> "list[Future[Result]]":
    """Start to score the answers in threads, `task_size` of them one after the other in a task."""
    futures: list[Future[Result]] = [Future() for _ in answers]

    def score_task(first: int) -> None:
        part = slice(first, first + task_size)
        for answer, future in zip(answers[part], futures[part], strict=True):
            if not future.set_running_or_notify_cancel():
                continue
            try:
                (result,) = function.results(problem, [answer], 0.0)
            except (
                BaseException
            ) as error:  # an uncaught one would leave the future waiting for ever
                result = error
            if isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)

    for first in range(0, len(answers), task_size):
        threads.submit(score_task, first)
    return futures
